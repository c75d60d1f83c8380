"""Folders of adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Tensors are named ``base_model.model.<layer>.lora_A.weight`` and ``...lora_B.weight``. A value head, which peft knows
nothing of, is in a file of its own beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.models.weights.folder import VALUE_HEAD_FILE, read_json, read_tensors, write_tensors

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
KEY: Final = "model.lora.path"
_PREFIX: Final = "base_model.model."
_PARTS: Final = ("lora_A", "lora_B")
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others are relative to a base that the initialisation changed.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""What a field must be where the folder has it."""
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
    value_head: Mapping[str, Tensor]
    """Empty where there is none."""

    @property
    def layers(self) -> list[str]:
        """Those that are adapted, by their full names."""
        return sorted({name.rpartition(".")[0] for name in self.weights})

    def lacking(self, linear: set[str]) -> list[str]:
        """Of a model's linear layers those that should be adapted, by the folder's configuration, and are not."""
        wanted = self.targets.get("target_modules")
        if not wanted or wanted == "all-linear":
            return []
        config = LoraConfig(**self.targets)
        return sorted(name for name in linear - set(self.layers) if check_target_module_exists(config, name) is True)


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
    head = path / VALUE_HEAD_FILE
    names = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    return AdapterFolder(
        path=path,
        rank=config["r"],
        alpha=config["lora_alpha"],
        use_rslora=bool(config.get("use_rslora")),
        targets={name: config[name] for name in names if config.get(name) is not None},
        weights=weights,
        value_head=read_tensors(head, key=KEY) if head.exists() else {},
    )


def write_folder(
    directory: Path, config: LoraConfig, weights: Mapping[str, Tensor], value_head: Mapping[str, Tensor]
) -> None:
    """Write adapters; ``weights`` and ``value_head`` as in :class:`AdapterFolder`."""
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(directory))
    write_tensors(directory / WEIGHTS_FILE, {f"{_PREFIX}{name}.weight": tensor for name, tensor in weights.items()})
    if value_head:
        write_tensors(directory / VALUE_HEAD_FILE, value_head)


def copy_into(target: Callable[[str], Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy each tensor into the one that ``target`` gives for its name.

    Raises:
        UserError: one has another shape.
    """
    for name, tensor in tensors.items():
        own = target(name)
        if own.shape != tensor.shape:
            raise UserError(f"{KEY}={path}: {name} is {list(tensor.shape)}, expected {list(own.shape)}")
        own.data.copy_(tensor)


def _own_name(name: str, path: Path) -> str:
    layer = name.removeprefix(_PREFIX).removesuffix(".weight")
    if not name.startswith(_PREFIX) or not name.endswith(".weight") or layer.rpartition(".")[2] not in _PARTS:
        raise UserError(
            f"{KEY}={path}: {WEIGHTS_FILE} has the tensor {name}, expected {_PREFIX}<layer>.lora_A.weight and "
            "...lora_B.weight alone"
        )
    return layer
