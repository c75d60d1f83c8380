"""What is done to a model's blocks before they are sharded: compilation, and recomputation in the backward pass."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy


def compile_blocks(policy: Policy) -> None:
    """Compile the forward pass of each block, in place; names of modules and parameters stay.

    Raises:
        UserError: the model names no blocks.
    """
    _require_blocks(policy, "actor.torch_compile")
    for block in policy.shard_units():
        # FSDP's hooks stay outside.
        block.forward = torch.compile(block.forward)


def checkpoint_blocks(policy: Policy) -> None:
    """Keep of each block its inputs alone for the backward pass, in place; to be called after :func:`compile_blocks`.

    Not torch's ``checkpoint_wrapper``, which puts a module around each block and so its own name into those of all
    parameters.

    Raises:
        UserError: the model names no blocks.
    """
    _require_blocks(policy, "actor.gradient_checkpointing")
    for block in policy.shard_units():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _require_blocks(policy: Policy, key: str) -> None:
    if not policy.shard_units():
        raise UserError(
            f"{key}=true: {type(policy).__name__} names no blocks to apply it to; set it to false, or name them in its "
            "shard_units()"
        )
