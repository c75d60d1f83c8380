"""Models of transformers with all of their weights, from folders that cannot run code.

transformers itself fills what is missing with random numbers, opens pickles, and asks on the console whether to run a
folder's code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from transformers import PreTrainedModel

from embodied_rl.errors import UserError
from embodied_rl.models.weights.folder import INDEX_FILE, WEIGHTS_FILE, refuse_misfit, weight_files

LOADING_ERRORS: Final = (OSError, ValueError, SafetensorError)
"""What :func:`load_model` raises where there is no such model, or a file is damaged."""
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def load_model(
    auto_class: Any, path: str, *, key: str = "model.path", expected: str | None = None, **options: Any
) -> PreTrainedModel:
    """Load a model whose weights are exactly those of ``path``.

    A tensor that is tied to another (an output head to the embeddings, by ``tie_word_embeddings``) may be missing, or
    equal to it.

    Args:
        auto_class: one of transformers' ``AutoModelFor...``.
        path: a folder, or a name on the hub.
        key: the configuration's that gave the path.
        expected: what its weights should be of, for the message.
        options: of ``from_pretrained``.

    Raises:
        UserError: a tensor is missing or too many, or has another shape, the index of shards is damaged, or the weights
            are pickles.
        OSError, ValueError, SafetensorError: there is no such model, or a file is damaged (:data:`LOADING_ERRORS`).
    """
    refuse_pickled_weights(Path(path), key=key)
    weight_files(Path(path), key=key)
    safe = {"use_safetensors": True, "trust_remote_code": False}
    # With ignore_mismatched_sizes shapes are reported like the rest; without, they are an error that names none.
    model, report = auto_class.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, **safe, **options
    )
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    problems += [f"{name} is unexpected" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"{name} is {list(found)}, expected {list(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    problems += [str(message) for message in report["error_msgs"]]
    if not problems:
        problems = [
            f"{name} differs from {other}, to which config.json ties it"
            for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items()
            if model.get_parameter(name) is not model.get_parameter(other)
        ]
    refuse_misfit(problems, f"{key}={path}" if expected is None else f"{key}={path}: no {expected}")
    return model


def refuse_pickled_weights(folder: Path, *, key: str = "model.path") -> None:
    """See that a folder's weights are safetensors; a name on the hub is left to transformers.

    Raises:
        UserError: they are pickles, which are not opened.
    """
    if (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists():
        return
    if pickled := sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern)):
        raise UserError(
            f"{key}={folder}: has no {WEIGHTS_FILE}, only {', '.join(pickled[:3])}: reading a pickle can run code, so "
            "it was not opened; use the weights as safetensors, or convert them where you trust the file "
            "(torch.load(..., weights_only=True), then safetensors.torch.save_file)"
        )
