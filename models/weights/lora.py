"""Low-rank adapters (LoRA, arXiv:2106.09685) in any policy, with peft: the base stays, small matrices are trained.

They are put into the policy in place, so that acting, evaluating, sharding, saving and weight sync need not know.
``adapter_folder.py`` has them on the disk.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from embodied_rl.errors import UserError, listed
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.adapters import KEY, AdapterFolder, copy_into, read_folder, write_folder
from embodied_rl.models.weights.folder import VALUE_HEAD_FILE, check_fit
from embodied_rl.schema import LoraSettings

ADAPTER = "default"
_VALUE_HEAD = "value_head."


def add_adapters(policy: Policy, settings: LoraSettings) -> None:
    """Put adapters into the policy's linear layers; they, the value head and ``modules_to_save`` stay trainable.

    What nothing reads stays as it is: adapters of ``path`` that are of such layers are left out.

    Raises:
        UserError: ``target_modules`` or ``modules_to_save`` name nothing in this model, or nothing that is read, or the
            adapters of ``path`` do not fit it.
    """
    root = policy.adapter_root()
    folder = None if settings.path is None else read_folder(settings.path)
    if folder is not None:
        _check_layers(policy, root, folder)
        settings = _as_in(folder, settings)
    targets = _targets(policy, root, settings)
    config = _peft_config(settings, targets)
    unread = {id(p) for module in policy.unread_modules() for p in module.parameters()}
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
        read = [p for p in found if id(p) not in unread]
        if not read:
            raise UserError(
                f"model.lora.modules_to_save: got {name!r}, which nothing reads in this model: leave it out"
            )
        for parameter in read:
            parameter.requires_grad_(True)
    if folder is not None:
        weights = {name: tensor for name, tensor in folder.weights.items() if name.rpartition(".")[0] in targets}
        copy_into(lambda name: root.get_parameter(f"{name}.{ADAPTER}.weight"), weights, folder.path)
        if folder.value_head and (own := _value_head(policy)):
            check_fit(own, folder.value_head, f"{KEY}={folder.path}: {VALUE_HEAD_FILE}")
            copy_into(own.__getitem__, folder.value_head, folder.path)


def described(settings: LoraSettings) -> LoraSettings:
    """The same without ``path``: rank, scale and layers are those of its folder.

    Raises:
        UserError: as :func:`~embodied_rl.models.weights.adapters.read_folder`.
    """
    return settings if settings.path is None else _as_in(read_folder(settings.path), settings)


def merge_adapters(policy: Policy) -> None:
    """Add every adapter to the weights under it and take it out: the policy has the names that it has without."""
    root = policy.adapter_root()
    for name, layer in [(name, module) for name, module in root.named_modules() if isinstance(module, LoraLayer)]:
        layer.merge()
        base = layer.get_base_layer()
        assert isinstance(base, nn.Module)
        root.set_submodule(name, base)


def save_adapters(policy: Policy, settings: LoraSettings, base: str, directory: Path) -> None:
    """Write the adapters alone, and the value head, where ``model.lora.path`` and peft can read them.

    Args:
        settings: those that the adapters were made with.
        base: the folder or hub name of the weights under them.
    """
    root = policy.adapter_root()
    end = f".{ADAPTER}.weight"
    weights = {name.removesuffix(end): p for name, p in root.named_parameters() if ".lora_" in name}
    config = _peft_config(settings, sorted({name.rpartition(".")[0] for name in weights}))
    config.base_model_name_or_path, config.inference_mode = base, True
    write_folder(directory, config, weights, _value_head(policy))


def base_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The policy's tensors under and beside the adapters, with the names that they have without adapters."""
    own = {id(p) for p in policy.value_parameters()}
    for name, tensor in policy.state_dict(keep_vars=True).items():
        if ".lora_" not in name and id(tensor) not in own:
            yield name.replace(".base_layer.", "."), tensor.detach()


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


def _value_head(policy: Policy) -> dict[str, nn.Parameter]:
    """Parameters by their names in the head."""
    own = {id(p) for p in policy.value_parameters()}
    return {name.removeprefix(_VALUE_HEAD): p for name, p in policy.named_parameters() if id(p) in own}


def _peft_config(settings: LoraSettings, targets: list[str]) -> LoraConfig:
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        use_rslora=settings.use_rslora,
        init_lora_weights=True if settings.init_lora_weights == "default" else settings.init_lora_weights,
    )


def _as_in(folder: AdapterFolder, settings: LoraSettings) -> LoraSettings:
    return replace(
        settings,
        path=None,
        rank=folder.rank,
        alpha=folder.alpha,
        target_modules=folder.layers,
        use_rslora=folder.use_rslora,
        init_lora_weights="default",
    )


def _check_layers(policy: Policy, root: nn.Module, folder: AdapterFolder) -> None:
    """Refuse adapters of another model, or not whole, saying how they differ."""
    linear, left_out = _linear_layers(policy, root), _left_out(policy, root, head=True)
    problems = [f"{name} is no linear layer of this model" for name in folder.layers if name not in linear]
    problems += [
        f"{name}.{part} is missing"
        for name in folder.layers
        for part in ("lora_A", "lora_B")
        if f"{name}.{part}" not in folder.weights
    ]
    problems += [
        f"{name} has no adapter, which its configuration asks for" for name in folder.lacking(linear - left_out)
    ]
    if problems:
        raise UserError(
            f"model.lora.path={folder.path}: the adapters do not fit the model: {listed(problems, 3, '; ')}"
        )


def _linear_layers(policy: Policy, root: nn.Module) -> set[str]:
    """Those that may have adapters."""
    value_head = {id(p) for p in policy.value_parameters()}
    return {
        name
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in value_head
    }


def _targets(policy: Policy, root: nn.Module, settings: LoraSettings) -> list[str]:
    linear = _linear_layers(policy, root)
    if settings.target_modules == "all-linear":
        return sorted(linear - _left_out(policy, root, head=True))
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
    read = targets - _left_out(policy, root, head=False)
    if not read:
        raise UserError(
            f"model.lora.target_modules: got {', '.join(wanted)}, layers that nothing reads in this model, so adapters "
            "there would never be trained; expected all-linear or other layers"
        )
    return sorted(read)


def _left_out(policy: Policy, root: nn.Module, *, head: bool) -> set[str]:
    """Names of the linear layers that nothing reads, and with ``head`` that of the output head."""
    parameters = [p for module in policy.unread_modules() for p in module.parameters()]
    own = {id(p) for p in [*parameters, *(policy.head_parameters() if head else [])]}
    return {name for name in _linear_layers(policy, root) if id(root.get_submodule(name).weight) in own}


def _parts(root: nn.Module, names: set[str] | None = None) -> str:
    """The last parts of modules' names, for a message."""
    names = {name for name, _ in root.named_modules() if name} if names is None else names
    return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
