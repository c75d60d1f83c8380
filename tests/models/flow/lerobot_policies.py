"""Runs in ``.venv-lerobot``, not in the tests' process: what lerobot makes of a folder of ours, which stays as it is.

::

    lerobot_policies.py act <folder> <given.safetensors> <instruction> <out.safetensors>
    lerobot_policies.py shapes <pi0 or pi05> <out.json>

lerobot has no settings for a small network's sizes, which are in our ``architecture.json``, and takes SmolVLM's
configuration and processor from the hub. So the sizes are put in their place here, and so is the processor, of which
lerobot asks for two ids that it does not use.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lerobot.configs.policies import PreTrainedConfig  # type: ignore[import-not-found]
from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # type: ignore[import-not-found]
from lerobot.policies.pi0 import modeling_pi0  # type: ignore[import-not-found]
from lerobot.policies.pi05 import modeling_pi05  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file


def act(folder: Path, given: Path, instruction: str, out: Path) -> None:
    """One observation through lerobot's pipelines and policy, from given noise."""
    torch.set_num_threads(1)
    config = PreTrainedConfig.from_pretrained(folder)
    sizes = json.loads((folder / "architecture.json").read_text())
    with tempfile.TemporaryDirectory() as temporary, SMALL[config.type](config, sizes, Path(temporary)):
        policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True).eval()
    weights, state = load_file(folder / "model.safetensors"), policy.state_dict()
    assert weights.keys() == state.keys() - TIED, sorted(weights.keys() ^ state.keys())
    differing = [name for name, tensor in weights.items() if not torch.equal(tensor, state[name])]
    assert not differing, f"lerobot did not take {differing[:5]}"  # its π0 says so and goes on
    before, after = make_pre_post_processors(
        config,
        pretrained_path=str(folder),
        preprocessor_overrides={"tokenizer_processor": {"tokenizer_name": str(folder)}},  # instead of the hub's
    )
    tensors = load_file(given)
    noise = tensors.pop("noise")[None]
    with torch.no_grad():
        chunk = policy.predict_action_chunk(before({**tensors, "task": instruction}), noise=noise)
    save_file({"actions": after(chunk)[0].contiguous()}, out)


def shapes(kind: str, out: Path) -> None:
    """Names and shapes of the weights of π0 or π0.5 at its published size."""
    with torch.device("meta"):
        if kind == "pi0":
            network: Any = modeling_pi0.PI0Pytorch(modeling_pi0.PI0Config(device="cpu"))
        else:
            network = modeling_pi05.PI05Pytorch(modeling_pi05.PI05Config(device="cpu"))
    out.write_text(json.dumps({f"model.{name}": list(t.shape) for name, t in network.state_dict().items()}))


TIED = {"model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"}
"""Of π0 and π0.5; one with the output layer."""


@contextlib.contextmanager
def _small_smolvla(config: Any, sizes: dict[str, Any], temporary: Path) -> Iterator[None]:
    from transformers import SmolVLMConfig

    text = {"model_type": "llama", "num_hidden_layers": config.num_vlm_layers, "rms_norm_eps": 1e-5}
    SmolVLMConfig(
        text_config={**text, "pad_token_id": None, **sizes["text"]},
        vision_config=sizes["vision"],
        scale_factor=sizes["scale_factor"],
        image_token_id=0,
        pad_token_id=None,
    ).save_pretrained(temporary)
    config.vlm_model_name = str(temporary)
    processor = SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=0, global_image_token_id=0))
    with mock.patch("transformers.AutoProcessor.from_pretrained", return_value=processor):
        yield


@contextlib.contextmanager
def _small_pi(config: Any, sizes: dict[str, Any], temporary: Path) -> Iterator[None]:
    del temporary
    module: Any = {"pi0": modeling_pi0, "pi05": modeling_pi05}[config.type]
    parts = {"gemma_2b": sizes["paligemma"], "gemma_300m": sizes["expert"]}
    published, build_vlm = module.get_gemma_config, module.PaliGemmaForConditionalGenerationWithPiGemma
    build_expert = module.PiGemmaForCausalLM
    names = {"hidden_size": "width", "num_hidden_layers": "depth", "intermediate_size": "mlp_dim"}
    names |= {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}

    def variant(name: str) -> Any:
        found = published(name)
        for key, value in parts[name].items():
            setattr(found, names[key], value)
        return found

    def vlm(config: Any) -> Any:
        for key, value in sizes["vision"].items():
            setattr(config.vision_config, key, value)
        config.vision_config.projection_dim = config.projection_dim = sizes["paligemma"]["hidden_size"]
        config.text_config.vocab_size = config.image_token_index = sizes["vocab_size"]
        return build_vlm(config=config)

    def expert(config: Any) -> Any:
        config.vocab_size = sizes["vocab_size"]
        return build_expert(config=config)

    with (
        mock.patch.object(module, "get_gemma_config", variant),
        mock.patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", vlm),
        mock.patch.object(module, "PiGemmaForCausalLM", expert),
    ):
        yield


SMALL = {"smolvla": _small_smolvla, "pi0": _small_pi, "pi05": _small_pi}

if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "act":
        folder, given, instruction, out = arguments
        act(Path(folder), Path(given), instruction, Path(out))
    else:
        shapes(arguments[0], Path(arguments[1]))
