"""Low-rank adapters (LoRA, arXiv:2106.09685) in any policy, with peft: the base stays, small matrices are trained.

They are put into the policy in place, so that acting, evaluating, sharding, saving and weight sync need not know.

Folders of adapters have peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``, whose tensors are
named ``base_model.model.<layer>.lora_A.weight`` and ``...lora_B.weight``. A value head and a noise head, which peft
knows nothing of, are in files of their own beside them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn

from embodied_rl.errors import UserError, listed
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.folder import NOISE_HEAD_FILE, VALUE_HEAD_FILE, check_fit, read_tensors, write_tensors
from embodied_rl.models.weights.look import read_json
from embodied_rl.models.weights.stored import settle, wanted
from embodied_rl.schema import LoraSettings

ADAPTER: Final = "default"
_OF_THE_BASE: Final = ("pissa", "olora")
"""Initialisations that are computed from the weights under the adapters, and change those."""
CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
KEY: Final = "model.lora.path"
_PREFIX: Final = "base_model.model."
_HEADS: Final[Mapping[str, str]] = {"value_head.": VALUE_HEAD_FILE, "noise_head.": NOISE_HEAD_FILE}
"""Beginning of the names of a policy's parameters that are in no base -> their file beside the adapters."""
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others are relative to a base that the initialisation changed.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values that a field may have, where the folder has it."""
_OFF: Final = (
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
"""Fields that must be false or empty: each makes another computation of the same tensors, or has tensors of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """Adapters as they are on the disk."""

    path: Path
    rank: int
    alpha: int
    use_rslora: bool
    targets: Mapping[str, Any]
    """The fields that say which layers are adapted."""
    weights: Mapping[str, Tensor]
    """``<layer>.lora_A`` [rank, in], ``<layer>.lora_B`` [out, rank]."""
    heads: Mapping[str, Mapping[str, Tensor]]
    """File -> a head's tensors by their names in it; those that there are."""

    @property
    def layers(self) -> list[str]:
        """Full names of the adapted layers."""
        return sorted({name.rpartition(".")[0] for name in self.weights})

    def lacking(self, linear: Iterable[str]) -> list[str]:
        """Linear layers of a model that should be adapted, by the folder's configuration, and are not."""
        wanted = self.targets.get("target_modules")
        if not wanted or wanted == "all-linear":
            return []
        config, adapted = LoraConfig(**self.targets), set(self.layers)
        return sorted(n for n in linear if n not in adapted and check_target_module_exists(config, n) is True)


def add_adapters(policy: Policy, settings: LoraSettings) -> None:
    """Put adapters into the policy's linear layers; they, the value head and ``modules_to_save`` stay trainable.

    What nothing reads stays as it is: adapters of ``path`` that are of such layers are left out. Adapters and value
    head are float32 whatever the base is, unless ``modules_to_save`` trains parts of it: FSDP2 trains one type alone.

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
    policy.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # the head is no target
        with _typed(policy, root, settings, targets):
            inject_adapter_in_model(_peft_config(settings, targets), root, adapter_name=ADAPTER)
    for parameter in [*policy.value_parameters(), *_saved_whole(policy, root, settings.modules_to_save)]:
        parameter.requires_grad_(True)
    if folder is not None:
        weights = {name: tensor for name, tensor in folder.weights.items() if name.rpartition(".")[0] in targets}
        own = {name: root.get_parameter(f"{name}.{ADAPTER}.weight") for name in weights}
        _copy(own, weights, f"{KEY}={folder.path}")
        for file, head in _heads(policy).items():
            if file in folder.heads:
                _copy(head, folder.heads[file], f"{KEY}={folder.path}: {file}")


def described(settings: LoraSettings) -> LoraSettings:
    """The same without ``path``: rank, scale and layers are those of its folder.

    Raises:
        UserError: as :func:`read_folder`.
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
    """Write the adapters alone, and the heads that no base has, where ``model.lora.path`` and peft can read them.

    Args:
        settings: those that the adapters were made with.
        base: the folder or hub name of the weights under them.
    """
    root = policy.adapter_root()
    end = f".{ADAPTER}.weight"
    weights = {name.removesuffix(end): p for name, p in root.named_parameters() if ".lora_" in name}
    config = _peft_config(settings, sorted({name.rpartition(".")[0] for name in weights}))
    config.base_model_name_or_path, config.inference_mode = base, True
    write_folder(directory, config, weights, _heads(policy))


def base_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The policy's tensors under and beside the adapters, with the names that they have without adapters."""
    own = {parameter for head in _heads(policy).values() for parameter in _ids(head.values())}
    for name, tensor in policy.state_dict(keep_vars=True).items():
        if ".lora_" not in name and id(tensor) not in own:
            yield name.replace(".base_layer.", "."), tensor.detach()


def has_adapters(policy: Policy) -> bool:
    return any(isinstance(module, LoraLayer) for module in policy.modules())


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


def read_folder(directory: str) -> AdapterFolder:
    """Read adapters.

    Raises:
        UserError: not such a folder, or one of adapters that are computed in another way.
    """
    path = Path(directory)
    config = read_json(path / CONFIG_FILE, key=KEY)
    problems = [
        f"{name} is {config[name]!r}" for name, known in _PLAIN.items() if config.get(name, known[0]) not in known
    ]
    problems += [f"{name} is {config[name]!r}" for name in _OFF if config.get(name)]
    problems += [f"{name} is missing" for name in ("r", "lora_alpha") if name not in config]
    if problems:
        raise UserError(
            f"{KEY}={path}: its {CONFIG_FILE} describes no plain LoRA adapters: {'; '.join(problems)}. Merge them into "
            "their base with peft (PeftModel.merge_and_unload), and use that with model.path"
        )
    weights = {_own_name(name, path): tensor for name, tensor in read_tensors(path / WEIGHTS_FILE, key=KEY).items()}
    heads = [file for file in _HEADS.values() if (path / file).exists()]
    names = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    return AdapterFolder(
        path=path,
        rank=config["r"],
        alpha=config["lora_alpha"],
        use_rslora=bool(config.get("use_rslora")),
        targets={name: config[name] for name in names if config.get(name) is not None},
        weights=weights,
        heads={file: read_tensors(path / file, key=KEY) for file in heads},
    )


def write_folder(
    directory: Path, config: LoraConfig, weights: Mapping[str, Tensor], heads: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write adapters; ``weights`` and ``heads`` as in :class:`AdapterFolder`."""
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(directory))
    write_tensors(directory / WEIGHTS_FILE, {f"{_PREFIX}{name}.weight": tensor for name, tensor in weights.items()})
    for file, head in heads.items():
        write_tensors(directory / file, head)


@contextlib.contextmanager
def _typed(policy: Policy, root: nn.Module, settings: LoraSettings, targets: Iterable[str]) -> Iterator[None]:
    """Within, adapters are made. peft gives them the type of the weights under them, rounded from float32."""
    weights = [root.get_parameter(f"{name}.weight") for name in targets]
    if settings.init_lora_weights in _OF_THE_BASE:
        settle(root)
        held = []
    else:
        held = [(weight, weight.data) for weight in weights]
    for weight, data in held:
        # Of the right shape and type, and without memory.
        dtype = wanted(weight) if settings.modules_to_save else torch.float32
        weight.data = torch.empty(1, dtype=dtype, device=data.device).expand(data.shape)
    try:
        yield
    finally:
        for weight, data in held:
            weight.data = data
    if not settings.modules_to_save:
        adapters = [parameter for name, parameter in root.named_parameters() if ".lora_" in name]
        for parameter in [*adapters, *policy.value_parameters()]:
            parameter.data = parameter.data.float()


def _own_name(name: str, path: Path) -> str:
    layer = name.removeprefix(_PREFIX).removesuffix(".weight")
    if name != f"{_PREFIX}{layer}.weight" or not layer.endswith((".lora_A", ".lora_B")):
        raise UserError(
            f"{KEY}={path}: {WEIGHTS_FILE} has the tensor {name}, expected {_PREFIX}<layer>.lora_A.weight and "
            "...lora_B.weight alone"
        )
    return layer


def _copy(own: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    check_fit(own, found, where)
    for name, tensor in found.items():
        own[name].data.copy_(tensor)


def _ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _unread(policy: Policy) -> set[int]:
    return _ids(p for module in policy.unread_modules() for p in module.parameters())


def _heads(policy: Policy) -> dict[str, dict[str, nn.Parameter]]:
    """File -> parameters by their names in the head; of the heads that the policy has."""
    heads = {
        file: {name.removeprefix(start): p for name, p in policy.named_parameters() if name.startswith(start)}
        for start, file in _HEADS.items()
    }
    return {file: head for file, head in heads.items() if head}


def _saved_whole(policy: Policy, root: nn.Module, modules: Iterable[str]) -> list[nn.Parameter]:
    """Parameters of ``modules_to_save`` that are read."""
    unread, parameters = _unread(policy), list[nn.Parameter]()
    for name in modules:
        found = [p for key, p in root.named_parameters() if name in key.split(".") and ".lora_" not in key]
        if not found:
            raise UserError(f"model.lora.modules_to_save: got {name!r}, which is no part of {_parts(root)}")
        read = [p for p in found if id(p) not in unread]
        if not read:
            raise UserError(
                f"model.lora.modules_to_save: got {name!r}, which nothing reads in this model: leave it out"
            )
        parameters += read
    return parameters


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
    linear = _linear_layers(policy, root)
    lacking = folder.lacking(linear.keys() - _left_out(policy, linear, head=True))
    problems = [f"{name} is no linear layer of this model" for name in folder.layers if name not in linear]
    problems += [
        f"{name}.{part} is missing"
        for name in folder.layers
        for part in ("lora_A", "lora_B")
        if f"{name}.{part}" not in folder.weights
    ]
    problems += [f"{name} has no adapter, which its configuration asks for" for name in lacking]
    if problems:
        raise UserError(
            f"model.lora.path={folder.path}: the adapters do not fit the model: {listed(problems, 3, '; ')}"
        )


def _linear_layers(policy: Policy, root: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers that may have adapters."""
    value_head = _ids(policy.value_parameters())
    linear = {name: module for name, module in root.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linear.items() if id(module.weight) not in value_head}


def _targets(policy: Policy, root: nn.Module, settings: LoraSettings) -> list[str]:
    linear = _linear_layers(policy, root)
    if settings.target_modules == "all-linear":
        return sorted(linear.keys() - _left_out(policy, linear, head=True))
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
    read = targets - _left_out(policy, linear, head=False)
    if not read:
        raise UserError(
            f"model.lora.target_modules: got {', '.join(wanted)}, layers that nothing reads in this model, so adapters "
            "there would never be trained; expected all-linear or other layers"
        )
    return sorted(read)


def _left_out(policy: Policy, linear: Mapping[str, nn.Linear], *, head: bool) -> set[str]:
    """Names of the linear layers that nothing reads, and with ``head`` that of the output head."""
    own = _unread(policy) | (_ids(policy.head_parameters()) if head else set())
    return {name for name, layer in linear.items() if id(layer.weight) in own}


def _parts(root: nn.Module, names: Iterable[str] | None = None) -> str:
    """The last parts of modules' names, for a message."""
    names = {name for name, _ in root.named_modules() if name} if names is None else names
    return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
