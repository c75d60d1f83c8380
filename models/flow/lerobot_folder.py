"""Folders of flow policies in lerobot's layout: what is in them beside the weights.

::

    config.json                      the policy's sizes, its cameras, how inputs and outputs are normalised
    model.safetensors                weights (until lerobot 0.3 also the statistics)
    policy_preprocessor.json         steps from an observation to the network; ..._normalizer_processor.safetensors
    policy_postprocessor.json        steps from the network to actions; ..._unnormalizer_processor.safetensors
    architecture.json                of a small or overridden model alone: what lerobot has no settings for

Published folders only name their tokenizer. One of ours holds it, and so works without network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from embodied_rl.errors import UserError, first_line, suggestion
from embodied_rl.files import write_json
from embodied_rl.models.weights.folder import (
    WEIGHTS_FILE,
    read_tensors,
    write_tensors,
)
from embodied_rl.models.weights.look import CONFIG_FILE, read_json

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
STATE, ACTION = "observation.state", "action"
ARCHITECTURE = "architecture"
"""Key of a config as it is read, and name of the file that it is in: lerobot refuses a ``config.json`` with it."""
OVERRIDES = "hf_overrides"
"""Key in :data:`ARCHITECTURE` of what differs from lerobot's network: see ``model.hf_overrides``."""
CAMERA_NAMES = {"image": "agentview", "image2": "wrist", "wrist_image": "wrist"}
"""LIBERO's cameras in lerobot's data sets -> ours."""
EMPTY_CAMERA = "empty_camera_"
STATE_PROMPT_STEP = "pi05_prepare_state_tokenizer_processor_step"
"""lerobot's step that writes the normalised state into the prompt."""
_EPS = 1e-8
_RELATIVE_STEPS = ("relative_actions_processor", "absolute_actions_processor")
"""Folders of lerobot 0.5 and later have them, disabled where actions are not relative to the state."""
_KNOWN_STEPS = frozenset(
    {
        "rename_observations_processor",
        "to_batch_processor",
        "pi0_new_line_processor",
        "smolvla_new_line_processor",
        STATE_PROMPT_STEP,
        *_RELATIVE_STEPS,
        "tokenizer_processor",
        "device_processor",
        "normalizer_processor",
        "unnormalizer_processor",
    }
)
_BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
_OLD_STATISTICS = ("normalize_inputs.buffer_", "normalize_targets.buffer_", "unnormalize_outputs.buffer_")
TINY_CAMERAS = {"image": 256, "image2": 256}
"""Cameras of a small folder, as in lerobot's LIBERO data sets: name and size."""
TINY_STATISTICS = {
    "observation.state.mean": (-0.05, 0.03, 0.8, 2.9, -0.6, -0.2, 0.03, -0.03),
    "observation.state.std": (0.1, 0.15, 0.3, 0.35, 1.2, 0.4, 0.01, 0.01),
    "action.mean": (0.05, 0.06, -0.06, 0.0, 0.0, -0.01, -0.1),
    "action.std": (0.3, 0.35, 0.4, 0.04, 0.06, 0.08, 1.0),
}
"""Statistics near those of LIBERO's demonstrations."""
TINY_QUANTILES = {
    "observation.state.q01": (-0.4, -0.27, 0.5, 1.6, -3.0, -1.4, 0.001, -0.04),
    "observation.state.q99": (0.13, 0.33, 1.3, 3.6, 1.7, 0.5, 0.04, -0.001),
    "action.q01": (-0.75, -0.8, -0.94, -0.11, -0.17, -0.24, -1.0),
    "action.q99": (0.94, 0.86, 0.94, 0.14, 0.18, 0.27, 1.0),
}
"""The same as quantiles."""
_TINY_SENTENCES = (
    "put both the alphabet soup and the tomato sauce in the basket",
    "turn on the stove and put the moka pot on it",
    "put the black bowl in the bottom drawer of the cabinet and close it",
    "put the white mug on the left plate and put the yellow and white mug on the right plate",
    "pick up the book and place it in the back compartment of the caddy",
    "pick up the black bowl next to the ramekin and place it on the plate",
    "open the middle drawer of the cabinet",
    "push the plate to the front of the stove",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LerobotFolder:
    """A folder without its weights."""

    path: str
    config: Mapping[str, Any]
    """``config.json``."""
    modes: Mapping[str, str]
    """STATE and ACTION -> MEAN_STD, MIN_MAX, QUANTILES, QUANTILE10 or IDENTITY."""
    statistics: Mapping[str, Tensor]
    """Such as ``observation.state.mean``."""
    tokenizer: PreTrainedTokenizerBase
    tokenizer_name: str
    max_prompt_length: int
    """Tokens."""

    def visual_features(self) -> list[str]:
        """Names of the network's cameras, without ``observation.images.``, in its order."""
        features = self.config.get("input_features") or {}
        names = [name for name, feature in features.items() if feature["type"] == "VISUAL"]
        return [name.removeprefix("observation.").removeprefix("images.") for name in names]


class Normalizer(nn.Module):
    """An affine map of the last dimension, and back. Its buffers are of the folder, not of the weights."""

    origin: Tensor
    divisor: Tensor
    scale: Tensor

    def __init__(self, origin: Tensor, divisor: Tensor, scale: Tensor, low: float = 0.0) -> None:
        """``origin`` becomes ``low``."""
        super().__init__()
        self.low = low
        for name, tensor in (("origin", origin), ("divisor", divisor), ("scale", scale)):
            self.register_buffer(name, tensor.float().clone(), persistent=False)

    def normalize(self, x: Tensor) -> Tensor:
        return (x - self.origin) / self.divisor + self.low

    def unnormalize(self, x: Tensor) -> Tensor:
        return (x - self.low) * self.scale + self.origin


def normalizer(folder: LerobotFolder, feature: str, size: int) -> Normalizer:
    """The map of ``observation.state`` or ``action``, for the env's ``size`` dimensions.

    Raises:
        UserError: the folder lacks the statistics, or has them for another size.
    """
    mode = folder.modes["ACTION" if feature == ACTION else "STATE"]
    if mode == "IDENTITY":
        return Normalizer(torch.zeros(size), torch.ones(size), torch.ones(size))
    names = ("mean", "std") if mode == "MEAN_STD" else _BOUNDS.get(mode)
    if names is None:
        raise UserError(
            f"model.path={folder.path}: {feature} is normalised by {mode!r}, expected one of "
            f"{', '.join(('IDENTITY', 'MEAN_STD', *_BOUNDS))}"
        )
    found = [folder.statistics.get(f"{feature}.{name}") for name in names]
    if any(tensor is None for tensor in found):
        known = ", ".join(sorted(folder.statistics)) or "none"
        raise UserError(
            f"model.path={folder.path}: {feature} is normalised by {mode} and its statistics {' and '.join(names)} are "
            f"missing; the folder has: {known}. Take the {PREPROCESSOR} and {POSTPROCESSOR} files of the fine-tuned "
            "policy, too"
        )
    low, high = (tensor.float().flatten() for tensor in found if tensor is not None)
    if len(low) != size:
        raise UserError(
            f"model.path={folder.path}: its {feature} has {len(low)} dimensions and the env's {size}; use a policy "
            "that was trained for this env"
        )
    if mode == "MEAN_STD":
        return Normalizer(low, high + _EPS, high)
    half = torch.where(high == low, _EPS, high - low) / 2
    return Normalizer(low, half, half, low=-1.0)


def camera_map(
    folder: LerobotFolder, chosen: Mapping[str, str | None], available: Sequence[str]
) -> dict[str, str | None]:
    """The env's camera for each of the network's; None where it sees nothing.

    Raises:
        UserError: a camera is unknown, or nothing says which one is meant.
    """
    features = folder.visual_features()
    for name in chosen:
        if name not in features:
            raise UserError(
                f"model.params.cameras: got {name!r}, expected some of {', '.join(features)}, the cameras of "
                f"model.path={folder.path}." + suggestion(name, features)
            )
    result: dict[str, str | None] = {}
    for name in features:
        default = None if name.startswith(EMPTY_CAMERA) else CAMERA_NAMES.get(name, name)
        camera = chosen.get(name, default)
        if camera is not None and camera not in available:
            raise UserError(
                f"model.path={folder.path} sees a camera {name!r}, and the env has {', '.join(available) or 'none'}; "
                f"say which one it is with model.params.cameras={{{name}: ...}}, null if none"
            )
        result[name] = camera
    if all(camera is None for camera in result.values()):
        raise UserError(
            f"model.path={folder.path}: none of its cameras ({', '.join(features) or 'it names none'}) is one of the "
            f"env's ({', '.join(available) or 'it has none'}); set model.params.cameras"
        )
    return result


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json``, with what is in ``architecture.json`` under :data:`ARCHITECTURE`.

    Raises:
        UserError: it is missing or damaged.
    """
    config, sizes = read_json(directory / CONFIG_FILE), directory / f"{ARCHITECTURE}.json"
    return {**config, ARCHITECTURE: read_json(sizes)} if sizes.exists() else config


def read_folder(
    directory: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokenizer: str | None,
    default_name: str,
    statistics: Mapping[str, Tensor] | None = None,
) -> LerobotFolder:
    """All but the weights.

    Args:
        config: of :func:`read_config`.
        weights: may hold statistics, in an old folder.
        tokenizer: a folder, or a name on the hub, where the folder has none.
        default_name: of the published tokenizer.
        statistics: from elsewhere; the folder's files come first.

    Raises:
        UserError: a file is missing, or holds what this code does not do.
    """
    modes = dict(config.get("normalization_mapping") or {})
    found = {**(statistics or {}), **_old_statistics(weights)}
    name, max_length = default_name, int(config.get("tokenizer_max_length", 48))
    for file in (PREPROCESSOR, POSTPROCESSOR):
        if not (directory / f"{file}.json").exists():
            continue
        for step in read_json(directory / f"{file}.json")["steps"]:
            kind, options = step.get("registry_name", step.get("class")), step.get("config") or {}
            if kind not in _KNOWN_STEPS:
                raise UserError(
                    f"model.path={directory}: {file}.json has a step {kind!r}, which is not done here; expected some "
                    f"of {', '.join(sorted(_KNOWN_STEPS))}"
                )
            if kind in _RELATIVE_STEPS and options.get("enabled"):
                raise UserError(
                    f"model.path={directory}: {file}.json has {kind!r} enabled: actions relative to the state are not "
                    "done here; expected a policy of absolute ones"
                )
            if kind == "tokenizer_processor":
                name, max_length = options.get("tokenizer_name") or name, int(options.get("max_length", max_length))
            if kind in ("normalizer_processor", "unnormalizer_processor"):
                modes |= options.get("norm_map") or {}
                _require_plain_images(modes, directory)
                if "state_file" in step:
                    found |= read_tensors(directory / step["state_file"])
    _require_plain_images(modes, directory)
    return LerobotFolder(
        path=str(directory),
        config=config,
        modes={kind: modes.get(kind, "MEAN_STD") for kind in ("STATE", "ACTION")},
        statistics=found,
        tokenizer=_read_tokenizer(directory, tokenizer, name),
        tokenizer_name=name,
        max_prompt_length=max_length,
    )


def write_folder(folder: LerobotFolder, weights: Mapping[str, Tensor], directory: Path, prompt_step: str) -> None:
    """Write a folder that lerobot and :func:`read_folder` read.

    Args:
        prompt_step: lerobot's name of the step that writes the prompt.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in folder.config.items() if key != ARCHITECTURE}
    write_json(directory / CONFIG_FILE, config)
    if sizes := folder.config.get(ARCHITECTURE):
        write_json(directory / f"{ARCHITECTURE}.json", sizes)
    write_tensors(directory / WEIGHTS_FILE, weights)
    folder.tokenizer.save_pretrained(directory)
    outputs = folder.config.get("output_features") or {}
    features = {**(folder.config.get("input_features") or {}), **outputs}
    norm_map = {"VISUAL": "IDENTITY", **folder.modes}
    tokenizer = {
        "max_length": folder.max_prompt_length,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": folder.tokenizer_name,
    }
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    normalize = _normalizer_step("normalizer_processor", features, norm_map)
    # A state that the prompt holds is normalised before.
    first, last = ([normalize], []) if prompt_step == STATE_PROMPT_STEP else ([], [normalize])
    _write_pipeline(
        directory,
        PREPROCESSOR,
        [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            *first,
            {"registry_name": prompt_step, "config": {}},
            {"registry_name": "tokenizer_processor", "config": tokenizer},
            device,
            *last,
        ],
        folder.statistics,
    )
    _write_pipeline(
        directory,
        POSTPROCESSOR,
        [_normalizer_step("unnormalizer_processor", outputs, norm_map), device],
        folder.statistics,
    )


def without_statistics(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if not name.startswith(_OLD_STATISTICS)}


def prompt_tokens(folder: LerobotFolder, prompt: str) -> list[int]:
    """Ids of ``prompt``, with the tokenizer's start token where it has one.

    Raises:
        UserError: there are more than the policy was trained with.
    """
    ids: list[int] = folder.tokenizer(prompt)["input_ids"]
    if len(ids) > folder.max_prompt_length:
        raise UserError(
            f"model.path={folder.path}: the prompt {prompt!r} has {len(ids)} tokens and the policy takes "
            f"{folder.max_prompt_length} (tokenizer_max_length)"
        )
    return ids


def features(
    cameras: Mapping[str, int], state_dim: int, action_dim: int, mode: str = "MEAN_STD", max_length: int = 48
) -> dict[str, Any]:
    """The part of ``config.json`` that says what goes in and comes out.

    Args:
        cameras: name, without ``observation.images.``, and size of the square pictures.
        mode: of state and actions, as in :class:`LerobotFolder`.
        max_length: tokens of the prompt.
    """
    visual = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, size, size]} for name, size in cameras.items()
    }
    return {
        "n_obs_steps": 1,
        "input_features": {**visual, STATE: {"type": "STATE", "shape": [state_dim]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [action_dim]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "tokenizer_max_length": max_length,
    }


def tiny_features(**options: Any) -> dict[str, Any]:
    """:func:`features` of a small folder for LIBERO."""
    sizes = {name: len(TINY_STATISTICS[f"{name}.mean"]) for name in (STATE, ACTION)}
    return features(TINY_CAMERAS, sizes[STATE], sizes[ACTION], **options)


def tiny_folder(
    directory: Path, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, tokenizer_name: str
) -> LerobotFolder:
    """A small folder for LIBERO; ``config`` says how it normalises: by MEAN_STD or QUANTILES."""
    modes = {kind: config["normalization_mapping"][kind] for kind in ("STATE", "ACTION")}
    statistics = TINY_QUANTILES if "QUANTILES" in modes.values() else TINY_STATISTICS
    return LerobotFolder(
        path=str(directory),
        config=config,
        modes=modes,
        statistics={name: torch.tensor(numbers) for name, numbers in statistics.items()},
        tokenizer=tokenizer,
        tokenizer_name=tokenizer_name,
        max_prompt_length=config["tokenizer_max_length"],
    )


def tiny_tokenizer(start: str | None, end: str, padding: str) -> PreTrainedTokenizerFast:
    """Byte-pair encoding, trained on a few instructions.

    Args:
        start: put before every text; None: nothing is.
    """
    special = [token for token in (padding, end, start) if token is not None]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(_TINY_SENTENCES, trainer)
    if start is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, inner.token_to_id(start))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=start, eos_token=end, pad_token=padding)


def _require_plain_images(modes: Mapping[str, str], directory: Path) -> None:
    if modes.get("VISUAL", "IDENTITY") != "IDENTITY":
        raise UserError(f"model.path={directory}: images are normalised by {modes['VISUAL']}, expected IDENTITY")


def _old_statistics(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Statistics that lerobot until 0.3 kept with the weights, by their present names."""
    names = {f"buffer_{feature.replace('.', '_')}.": f"{feature}." for feature in (STATE, ACTION)}
    return {
        new + name.rpartition(".")[2]: tensor
        for name, tensor in weights.items()
        if name.startswith(_OLD_STATISTICS)
        for old, new in names.items()
        if old in name
    }


def _read_tokenizer(directory: Path, chosen: str | None, published: str) -> PreTrainedTokenizerBase:
    try:
        if chosen is None and (directory / "tokenizer.json").exists():
            # As the file says: AutoTokenizer would go by the model's family.
            return PreTrainedTokenizerFast.from_pretrained(directory)
        return AutoTokenizer.from_pretrained(chosen or published, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path={directory}: no tokenizer in the folder, and {chosen or published!r} cannot be loaded "
            f"({first_line(error)}); set model.params.tokenizer to a folder with the files of {published}"
        ) from error


def _normalizer_step(kind: str, features: Mapping[str, Any], norm_map: Mapping[str, str]) -> dict[str, Any]:
    return {"registry_name": kind, "config": {"eps": _EPS, "features": features, "norm_map": norm_map}}


def _write_pipeline(directory: Path, name: str, steps: list[dict[str, Any]], statistics: Mapping[str, Tensor]) -> None:
    for index, step in enumerate(steps):
        if step["registry_name"].endswith("normalizer_processor") and statistics:
            step["state_file"] = f"{name}_step_{index}_{step['registry_name']}.safetensors"
            write_tensors(directory / step["state_file"], statistics)
    write_json(directory / f"{name}.json", {"name": name, "steps": steps})
