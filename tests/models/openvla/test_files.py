from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from embodied_rl.errors import UserError
from embodied_rl.models.openvla.files import (
    find_part,
    read_folder,
    read_part,
    write_folder,
    write_shards,
)
from embodied_rl.models.openvla.policy import OpenVlaPolicy
from embodied_rl.models.registry import build_policy
from embodied_rl.models.weights.folder import check_fit, read_weights
from tests.models.openvla.golden_inputs import ACTION
from tests.models.openvla.published import spec, write_checkpoint


def build(folder: Path, **params: Any) -> None:
    build_policy("openvla_oft", spec(), params, str(folder))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_what_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "modeling_prismatic.py").write_text("# remote code\n")
    folder = read_folder(tmp_path)
    assert list(folder.norm_stats) == ["libero_10_no_noops"]
    assert folder.means == ((0.5, 0.4, 0.3), (0.5, 0.5, 0.5))
    assert sorted(folder.companions) == ["modeling_prismatic.py", "preprocessor_config.json", "tokenizer.json"]
    (tmp_path / "dataset_statistics.json").unlink()
    assert read_folder(tmp_path).norm_stats == {"bridge_orig": {"action": ACTION}}


def test_shards(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((4,), float(i)) for i in range(5)}
    write_shards(tmp_path / ".", weights, shard_bytes=32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 80
    assert index["weight_map"]["w0"] == index["weight_map"]["w1"] == "model-00001-of-00003.safetensors"
    assert index["weight_map"]["w4"] == "model-00003-of-00003.safetensors"
    found = read_weights(tmp_path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_which_part(tmp_path: Path) -> None:
    assert find_part(tmp_path, "action_head") is None
    for step, value in (("5000", 1.0), ("150000", 2.0)):
        torch.save({"module.w": torch.tensor(value)}, tmp_path / f"action_head--{step}_checkpoint.pt")
    assert read_part(tmp_path, "action_head")["w"] == 2.0
    torch.save({"w": torch.tensor(3.0)}, tmp_path / "action_head--latest_checkpoint.pt")
    assert read_part(tmp_path, "action_head")["w"] == 3.0
    assert find_part(tmp_path, "proprio_projector") is None
    (tmp_path / "action_head--latest_checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"action_head--latest_checkpoint.pt cannot be read \(.*copy it again"):
        read_part(tmp_path, "action_head")


def test_weights_that_do_not_fit() -> None:
    layer = nn.Linear(2, 3)
    with pytest.raises(UserError) as error:
        check_fit(layer.state_dict(), {"weight": torch.zeros(2, 3), "other": torch.zeros(1)}, "model.path=here")
    assert str(error.value) == (
        "model.path=here: the weights do not fit the model: bias is missing; other is unexpected; weight is [2, 3], "
        "expected [3, 2]"
    )


def test_one_message_for_what_is_wrong_with_the_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=1)
    [path] = tmp_path.glob("model-*.safetensors")
    weights = load_file(path)
    del weights["projector.fc1.bias"]
    weights["extra"] = torch.zeros(1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(weights, path.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(weights, path)
    with pytest.raises(UserError, match=r"projector\.fc1\.bias is missing; extra is unexpected$"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"config\.json does not exist; the folder holds"),
        ("preprocessor_config.json", r"preprocessor_config\.json does not exist"),
        ("tokenizer.json", r"tokenizer\.json does not exist"),
        ("model-00002-of-00002.safetensors", r"model-00002-of-00002\.safetensors does not exist"),
    ],
)
def test_a_missing_file(tmp_path: Path, name: str, message: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=message):
        build(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("config.json", {"model_type": "llava"}, r"says model_type 'llava', expected 'openvla'"),
        ("config.json", {"text_config": None}, r"lacks text_config; expected the config of a published OpenVLA"),
        ("config.json", {"timm_model_ids": ["one"]}, r"lacks a second image encoder"),
        ("preprocessor_config.json", {"means": 3}, r"has no means and stds of two image encoders"),
        ("tokenizer.json", {"model": {"type": "nonsense"}}, r"tokenizer\.json is no tokenizer"),
        ("dataset_statistics.json", {"libero_10_no_noops": {"action": {"mean": []}}}, r"have no q01 and no q99"),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, name: str, fields: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path)
    edit(tmp_path / name, **fields)
    with pytest.raises(UserError, match=message):
        build(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give a folder of weights"):
        build(tmp_path / "missing")


def test_no_code_is_named_that_is_not_there(tmp_path: Path) -> None:
    """transformers imports what ``auto_map`` names from the folder, or from the repository before ``--``."""
    source = tmp_path / "source"
    write_checkpoint(source)
    names = {
        "AutoConfig": "configuration_prismatic.OpenVLAConfig",
        "AutoModelForVision2Seq": "modeling_prismatic.OpenVLAForActionPrediction",
        "AutoProcessor": "openvla/openvla-7b--processing_prismatic.PrismaticProcessor",
    }
    edit(source / "config.json", auto_map=names)
    (source / "modeling_prismatic.py").write_text("# remote code\n")
    write_folder(tmp_path / "copy", read_folder(source), {"w": torch.zeros(1)}, {})
    del names["AutoConfig"]
    assert json.loads((tmp_path / "copy/config.json").read_text())["auto_map"] == names
    OpenVlaPolicy.write_tiny(tmp_path / "tiny")
    assert "auto_map" not in json.loads((tmp_path / "tiny/config.json").read_text())
