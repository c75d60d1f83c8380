"""Folders of language models whose files are damaged: one message that names the folder, never a traceback."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.causal_lm import CausalLMParams, CausalLMPolicy

SPEC = PolicySpec(action_dim=1, num_action_chunks=8, state_dim=0, image_shapes={}, values_per_chunk=0)
WEIGHTS, CONFIG = "model.safetensors", "config.json"
Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    CausalLMPolicy.write_tiny(folder)
    return folder


def config_with(**changes: object) -> Damage:
    return lambda content: json.dumps(json.loads(content) | changes).encode()


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        pytest.param(WEIGHTS, lambda content: content[: len(content) // 2], id="truncated"),
        pytest.param(WEIGHTS, lambda content: b"", id="empty"),
        pytest.param(WEIGHTS, lambda content: pickle.dumps({"a": 1}), id="pickle"),
        pytest.param(WEIGHTS, lambda content: struct.pack("<Q", 2**62) + content[8:], id="huge header"),
        pytest.param(CONFIG, lambda content: b"{", id="config cut"),
        pytest.param(CONFIG, lambda content: b"[]", id="config of another kind"),
        pytest.param(CONFIG, lambda content: b"[" * 100_000, id="config nested"),
        pytest.param(CONFIG, config_with(hidden_size="x"), id="size is a word"),
        pytest.param(CONFIG, config_with(num_hidden_layers=-1), id="negative layers"),
        pytest.param(CONFIG, config_with(num_attention_heads=0), id="no heads"),
        pytest.param("tokenizer.json", lambda content: b"{}", id="tokenizer empty"),
        pytest.param("tokenizer_config.json", lambda content: b"[]", id="tokenizer config of another kind"),
        pytest.param("generation_config.json", lambda content: b"[3]", id="generation config of another kind"),
    ],
)
def test_a_damaged_file(whole: Path, tmp_path: Path, file: str, damage: Damage) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    (folder / file).write_bytes(damage((folder / file).read_bytes()))
    with pytest.raises(UserError, match=r"model.path=.*damaged"):
        CausalLMPolicy.from_pretrained(str(folder), SPEC, CausalLMParams())


@pytest.mark.parametrize(
    ("value", "message"), [("shape", r"is \[3, 5\], expected \["), ("nan", "NaN in model.*; copy")]
)
def test_damaged_numbers(whole: Path, tmp_path: Path, value: str, message: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    weights = load_file(folder / WEIGHTS)
    name = next(name for name in weights if "gate_proj" in name)
    weights[name] = torch.zeros(3, 5) if value == "shape" else torch.full_like(weights[name], torch.nan)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        CausalLMPolicy.from_pretrained(str(folder), SPEC, CausalLMParams())
