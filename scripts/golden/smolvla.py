"""Run lerobot's SmolVLA on small inputs and store what comes out in tests/models/golden.

The tests compare this project with those files. The policy is the project's small folder, with weights and inputs from
``tests/models/openvla/golden_inputs.py``; the script itself needs no more than Python 3.12 and lerobot::

    python train.py make-tiny model=smolvla tiny
    python3.12 -m venv upstream && upstream/bin/pip install "lerobot[smolvla]==0.6.1"
    upstream/bin/python scripts/golden/smolvla.py tiny

Runs on the CPU in a minute, without network; a second run writes the same bytes (but for the date). No line of lerobot,
which is under the Apache licence 2.0, is copied: what is stored are numbers. Two things are not as in published
policies: sizes, which lerobot reads here from a folder instead of the hub, and the processor of that folder, of which
this policy asks for the ids of two tokens that it does not use.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import record
import torch

sys.path.insert(0, str(record.TESTS / "openvla"))
import golden_inputs as given

PACKAGES = ("lerobot", "numpy", "tokenizers", "torch", "transformers")
SOURCE = {
    "repository": "huggingface/lerobot",
    "commit": "7e241bd630a3719a56157a497ce5d08f244784f1",
    "licence": "Apache-2.0",
}
"""The commit of the package's version 0.6.1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiny", type=Path, help="a folder from `python train.py make-tiny model=smolvla`")
    parser.add_argument("--out", type=Path, default=record.TESTS / "golden")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as temporary:
        facts, tensors = run(arguments.tiny, Path(temporary))
    record.write(arguments.out, "smolvla", [SOURCE], PACKAGES, facts, tensors)


def run(tiny: Path, temporary: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.pi0.configuration_pi0 import PI0Config
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    folder = temporary / "policy"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = json.loads((folder / "architecture.json").read_text())
    config |= {"vlm_model_name": str(_write_vlm(config, sizes, temporary / "vlm")), "device": "cpu"}
    (folder / "config.json").write_text(json.dumps(config))
    processor = SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=0, global_image_token_id=0))
    with mock.patch("transformers.AutoProcessor.from_pretrained", return_value=processor):
        policy = SmolVLAPolicy(PreTrainedConfig.from_pretrained(folder)).eval()
    shapes = {name: list(tensor.shape) for name, tensor in policy.state_dict().items()}
    policy.load_state_dict({name: torch.from_numpy(given.weight(name, tuple(s))) for name, s in shapes.items()})
    before, after = make_pre_post_processors(
        policy.config,
        pretrained_path=str(folder),
        preprocessor_overrides={"tokenizer_processor": {"tokenizer_name": str(folder)}},
    )
    found: dict[str, list[Any]] = {}

    def keep(**values: Any) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(np.asarray(value))

    for row, task in enumerate(given.INSTRUCTIONS[:2]):
        batch = before(observation(row, task))
        noise = torch.from_numpy(given.noise(row, policy.config.chunk_size, policy.config.max_action_dim))[None]
        images, masks = policy.prepare_images(batch)
        assert all(bool(mask.all()) for mask in masks)
        keep(
            image=images[0][0, :, ::3, ::3],
            image2=images[1][0, :, ::3, ::3],
            state=policy.prepare_state(batch)[0],
            tokens=batch["observation.language.tokens"][0],
            token_mask=batch["observation.language.attention_mask"][0],
        )
        chunk = policy.predict_action_chunk(batch, noise=noise)
        keep(chunk=chunk[0], actions=after(chunk)[0])
    kinds = {"smolvla": SmolVLAConfig, "pi0": PI0Config, "pi05": PI05Config}
    keys = {name: sorted(field.name for field in dataclasses.fields(kind)) for name, kind in kinds.items()}
    return {"layout": shapes, "config_keys": keys}, {name: np.stack(values) for name, values in found.items()}


def observation(row: int, task: str) -> dict[str, Any]:
    """As lerobot's data sets and envs give it."""
    pictures = {name: torch.from_numpy(given.picture(f"{name} {row}", *size)) for name, size in given.LEROBOT.items()}
    return {
        **{f"observation.images.{name}": x.permute(2, 0, 1).float() / 255.0 for name, x in pictures.items()},
        "observation.state": torch.from_numpy(given.state(row)),
        "task": task,
    }


def _write_vlm(config: dict[str, Any], sizes: dict[str, Any], folder: Path) -> Path:
    """The vision-language model's sizes, as on the hub."""
    from transformers import SmolVLMConfig

    text = {
        "model_type": "llama",
        "num_hidden_layers": config["num_vlm_layers"],
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
    }
    SmolVLMConfig(
        text_config={**text, **sizes["text"]},
        vision_config=sizes["vision"],
        scale_factor=sizes["scale_factor"],
        image_token_id=0,
        pad_token_id=None,
    ).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
