"""Folders of weights and data that others made cannot run code: what could is refused by name and not opened."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.faults.exploding import Exploding
from embodied_rl.commands.doctor import folder_findings
from embodied_rl.commands.make_tiny import make_tiny
from embodied_rl.errors import UserError
from embodied_rl.language.rewards.reward_model import RewardModel
from embodied_rl.models.openvla.files import read_part
from embodied_rl.models.registry import build_policy, policy_of
from embodied_rl.models.weights.lora import read_folder
from tests.models.small import IMAGES, MODELS, model_config


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    path = tmp_path / "it ran"
    torch.save(Exploding(path), tmp_path / "bomb")
    torch.load(tmp_path / "bomb", weights_only=False)
    assert path.is_dir(), "it does explode"
    path.rmdir()
    return path


def plant(file: Path, marker: Path, *, plain: bool = False) -> None:
    if plain:
        file.write_bytes(pickle.dumps(Exploding(marker)))
    else:
        torch.save({"weight": Exploding(marker)}, file)


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    make_tiny("causal_lm", tmp_path / "lm")
    return tmp_path / "lm"


def as_policy(folder: Path) -> None:
    policy_of(model_config("causal_lm", path=str(folder)), MODELS["causal_lm"][0])


def as_reward(folder: Path) -> None:
    RewardModel({"path": str(folder)}, "cpu")


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("read", [as_policy, as_reward])
def test_a_language_model_of_pickles(
    read: Callable[[Path], None], plain: bool, language_model: Path, marker: Path
) -> None:
    (language_model / "model.safetensors").unlink()
    plant(language_model / "pytorch_model.bin", marker, plain=plain)
    with pytest.raises(UserError, match=r"path=.*has no model\.safetensors, only pytorch_model\.bin.*was not opened"):
        read(language_model)
    assert any("pytorch_model.bin" in f.text + f.advice for f in folder_findings(language_model))
    assert not marker.exists(), "it ran"


@pytest.mark.parametrize("read", [as_policy, as_reward])
def test_a_language_model_with_code_of_its_own(
    read: Callable[[Path], None], language_model: Path, marker: Path
) -> None:
    config = json.loads((language_model / "config.json").read_text())
    names = {name: "theirs.Theirs" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    config |= {"model_type": "theirs", "auto_map": names | {"AutoModelForSequenceClassification": "theirs.Theirs"}}
    (language_model / "config.json").write_text(json.dumps(config))
    (language_model / "theirs.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Theirs: pass\n")
    with pytest.raises(UserError, match=str(language_model)):
        read(language_model)
    assert not marker.exists(), "it ran"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("model", ["openvla", "pi0", "pi05", "smolvla"])
def test_a_vision_language_action_model_of_pickles(model: str, plain: bool, tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "vla"
    make_tiny(model, folder)
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    plant(folder / "pytorch_model.bin", marker, plain=plain)
    spec = replace(IMAGES, num_action_chunks=1, values_per_chunk=0, image_shapes={"agentview": (32, 32)})
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        build_policy(model, spec, {}, path=str(folder))
    assert not marker.exists(), "it ran"


@pytest.mark.parametrize("plain", [False, True])
def test_a_part_of_openvla_oft(plain: bool, tmp_path: Path, marker: Path) -> None:
    """Published as a pickle: only its tensors are read."""
    plant(tmp_path / "action_head--latest_checkpoint.pt", marker, plain=plain)
    with pytest.raises(UserError, match=r"action_head--latest_checkpoint\.pt cannot be read"):
        read_part(tmp_path, "action_head")
    assert not marker.exists(), "it ran"


@pytest.mark.parametrize("plain", [False, True])
def test_adapters(plain: bool, tmp_path: Path, marker: Path) -> None:
    (tmp_path / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["0"]}
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    plant(tmp_path / "lora/adapter_model.bin", marker, plain=plain)
    with pytest.raises(UserError, match=r"adapter_model\.bin"):
        read_folder(str(tmp_path / "lora"))
    assert any("adapter_model" in f.text + f.advice for f in folder_findings(tmp_path / "lora"))
    assert not marker.exists(), "it ran"
