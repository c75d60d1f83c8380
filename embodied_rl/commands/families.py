"""Published layouts: what their ``config.json`` says, which of our models they are for, and what must be there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from embodied_rl.models.registry import MODELS

_TOKENIZER: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One layout."""

    title: str
    models: tuple[str, ...]
    """Our names, the likeliest first; empty: it cannot be used here."""
    files: Mapping[tuple[str, ...], str]
    """Patterns of which one must match -> what the file is for."""
    wanted: Mapping[tuple[str, ...], str]
    """The same for what is no must; the text says what happens without."""


_OPENVLA: Final = Family(
    title="OpenVLA",
    models=("openvla", "openvla_oft"),
    files={
        ("preprocessor_config.json",): "means and deviations of the image encoders",
        ("tokenizer.json",): "the tokenizer",
    },
    wanted={},
)
_OPENVLA_OFT: Final = Family(
    title="OpenVLA-OFT",
    models=("openvla_oft", "openvla"),
    files=_OPENVLA.files,
    wanted={
        ("action_head--*_checkpoint.pt",): "no L1 head, so actions are the language model's tokens",
        ("proprio_projector--*_checkpoint.pt",): "no proprio_projector, so the policy does not see the robot's state",
    },
)
_OF_LEROBOT: Final[Mapping[tuple[str, ...], str]] = {
    ("policy_preprocessor.json",): "no preprocessor, so statistics must be with the weights (lerobot until 0.3)",
    ("policy_postprocessor.json",): "no postprocessor, so statistics must be with the weights (lerobot until 0.3)",
    _TOKENIZER: "no tokenizer: it is loaded from the hub, or from the folder in model.params.tokenizer",
}
_CAUSAL_LM: Final = Family(
    title="causal language model of Hugging Face",
    models=("causal_lm",),
    files={_TOKENIZER: "the tokenizer"},
    wanted={},
)


def family_of(folder: Path, config: Mapping[str, Any]) -> Family | None:
    """The layout that a folder with this ``config.json`` has; None: one that is not known."""
    if "policy" in config and "spec" in config:
        own = [name for name, place in MODELS.items() if place.endswith(f":{config['policy']}")]
        return Family(title=f"this project's own, of {config['policy']}", models=tuple(own), files={}, wanted={})
    kind, lerobot = config.get("model_type"), config.get("type")
    if kind == "openvla":
        return _OPENVLA_OFT if any(folder.glob("*--*_checkpoint.pt")) else _OPENVLA
    if lerobot in ("pi0", "smolvla"):
        return Family(title=f"{lerobot} of lerobot", models=(lerobot,), files={}, wanted=_OF_LEROBOT)
    if kind == "pi0":
        return Family(title="π0 of transformers", models=("pi0",), files={}, wanted={_TOKENIZER: "no tokenizer"})
    if lerobot is not None:
        return Family(title=f"{lerobot} of lerobot", models=(), files={}, wanted={})
    if any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ()):
        return _CAUSAL_LM
    return None
