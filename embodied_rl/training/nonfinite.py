"""Where a gradient that is NaN or infinite comes from: weights, what a sample holds, or its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from embodied_rl.contracts import SAMPLE_ID_ROOM, TrainBatch
from embodied_rl.errors import listed
from embodied_rl.training.sharding import is_distributed

_FIELDS = ("advantages", "logprobs", "values", "returns", "proximal_logprobs", "reference_logprobs")


def origin(policy: nn.Module, minibatch: TrainBatch, losses: Sequence[tuple[Tensor, Tensor]]) -> str:
    """What is not finite on this rank, in words.

    Args:
        losses: of each micro-batch, the ids of its samples and its loss.
    """
    if broken := [name for name, parameter in policy.named_parameters() if not _finite(parameter)]:
        return f"the weights themselves are not finite ({listed(broken, 3)})"
    if found := list(_inputs(minibatch)):
        return listed(found, 4, "; ")
    for ids, loss in losses:
        if not torch.isfinite(loss):
            return f"the loss is {loss.item()} in a micro-batch of {listed(map(sample_name, ids.tolist()), 3, '; ')}"
    return "weights, samples and losses of this rank are finite: the gradient overflowed on the way back"


def sample_name(sample_id: int) -> str:
    """A sample's place in its training step: an env, or in ``task=math`` a completion, and its chunk."""
    sequence, chunk = divmod(sample_id, SAMPLE_ID_ROOM)
    epoch, env = divmod(sequence, SAMPLE_ID_ROOM)
    return f"env {env}, chunk {chunk}" + (f" of rollout epoch {epoch}" if epoch else "")


def _inputs(batch: TrainBatch) -> Iterator[str]:
    """Samples that hold what is not finite where they count."""
    tensors = {name: getattr(batch, name) for name in _FIELDS} | dict(batch.replay_inputs)
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point() or not len(tensor):
            continue
        bad = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1)
        for sample_id in batch.sample_ids[bad].tolist():
            yield f"{name} of {sample_name(sample_id)}"


def _finite(parameter: nn.Parameter) -> bool:
    tensor = parameter.detach()
    return bool(torch.isfinite(tensor.to_local() if is_distributed(tensor) else tensor).all())
