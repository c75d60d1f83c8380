"""Low-rank adapters (LoRA, arXiv:2106.09685) in any policy, with peft: the base stays, small matrices are trained.

They are put into the policy in place, so that acting, evaluating, sharding, saving and weight sync need not know.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy
from embodied_rl.schema import LoraSettings

ADAPTER = "default"


def add_adapters(policy: Policy, settings: LoraSettings) -> None:
    """Put adapters into the policy's linear layers; they, the value head and ``modules_to_save`` stay trainable.

    Raises:
        UserError: ``target_modules`` or ``modules_to_save`` name nothing in this model.
    """
    root = policy.adapter_root()
    targets = _targets(policy, root, settings)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        use_rslora=settings.use_rslora,
        init_lora_weights=True if settings.init_lora_weights == "default" else settings.init_lora_weights,
    )
    policy.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # the head is no target
        inject_adapter_in_model(config, root, adapter_name=ADAPTER)
    for parameter in policy.value_parameters():
        parameter.requires_grad_(True)
    for name in settings.modules_to_save:
        found = [p for key, p in root.named_parameters() if name in key.split(".") and ".lora_" not in key]
        if not found:
            raise UserError(f"model.lora.modules_to_save: got {name!r}, which is no part of {_parts(root)}")
        for parameter in found:
            parameter.requires_grad_(True)


def has_adapters(policy: Policy) -> bool:
    return any(isinstance(module, LoraLayer) for module in policy.modules())


def trains_base_weights(policy: Policy) -> bool:
    """Whether anything beside adapters and value head is trained."""
    own = {id(p) for p in policy.value_parameters()}
    return any(p.requires_grad and id(p) not in own and ".lora_" not in name for name, p in policy.named_parameters())


@contextlib.contextmanager
def adapters_off(policy: Policy) -> Iterator[None]:
    """The policy computes as its base does. Without gradients only: they would be those of nothing."""
    layers = [module for module in policy.modules() if isinstance(module, LoraLayer)]
    # Scaled by 0 rather than disabled: disabling also changes which parameters want gradients, under FSDP's feet.
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def _targets(policy: Policy, root: nn.Module, settings: LoraSettings) -> list[str]:
    value_head = {id(p) for p in policy.value_parameters()}
    kept = {id(p) for p in policy.head_parameters()}
    linear = {
        name
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in value_head
    }
    if settings.target_modules == "all-linear":
        return sorted(name for name in linear if id(root.get_submodule(name).weight) not in kept)
    wanted = [settings.target_modules] if isinstance(settings.target_modules, str) else settings.target_modules
    targets: set[str] = set()
    for pattern in wanted:
        found = {name for name in linear if name == pattern or name.endswith(f".{pattern}")}
        if not found:
            raise UserError(
                f"model.lora.target_modules: got {pattern!r}, which is no linear layer of this model; expected "
                f"all-linear or some of {_parts(root, linear)}"
            )
        targets |= found
    return sorted(targets)


def _parts(root: nn.Module, names: set[str] | None = None) -> str:
    """The last parts of modules' names, for a message."""
    names = {name for name, _ in root.named_modules() if name} if names is None else names
    return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
