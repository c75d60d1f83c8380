from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.models.flow.lerobot_folder import (
    TINY_STATISTICS,
    LerobotFolder,
    camera_map,
    normalizer,
    read_config,
    read_folder,
    tiny_tokenizer,
)
from embodied_rl.models.smolvla import VLM_NAME, SmolVlaPolicy
from embodied_rl.models.weights.folder import read_weights

STATISTICS: dict[str, list[float]] = {
    "mean": [1.0, 2.0],
    "std": [0.5, 2.0],
    "min": [-1.0, 3.0],
    "max": [3.0, 3.0],
    "q01": [0.0, -1.0],
    "q99": [2.0, 1.0],
}


def folder(mode: str = "MEAN_STD", statistics: dict[str, Tensor] | None = None) -> LerobotFolder:
    if statistics is None:
        statistics = {f"action.{name}": torch.tensor(values) for name, values in STATISTICS.items()}
    cameras = ("image", "image2", "empty_camera_0")
    return LerobotFolder(
        path="somewhere",
        config={"input_features": {f"observation.images.{name}": {"type": "VISUAL"} for name in cameras}},
        modes={"STATE": mode, "ACTION": mode},
        statistics=statistics,
        tokenizer=tiny_tokenizer(None, "<eos>", "<pad>"),
        tokenizer_name="some/tokenizer",
        max_prompt_length=48,
    )


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("MEAN_STD", [2.0, 0.0], [2.0, -1.0]),
        ("MIN_MAX", [2.0, 3.0], [0.5, -1.0]),  # the second is constant in the data
        ("QUANTILES", [0.5, 1.5], [-0.5, 1.5]),
        ("IDENTITY", [0.5, 1.5], [0.5, 1.5]),
    ],
)
def test_normalisation_by_hand(mode: str, value: list[float], expected: list[float]) -> None:
    action = normalizer(folder(mode), "action", 2)
    assert action.normalize(torch.tensor(value)).tolist() == pytest.approx(expected, abs=1e-5)
    assert action.unnormalize(torch.tensor(expected)).tolist() == pytest.approx(value, abs=1e-5)
    assert action.state_dict() == {}


def test_statistics_that_are_missing_or_of_another_size_are_named() -> None:
    with pytest.raises(UserError, match=r"normalised by QUANTILE10 and its statistics q10 and q90 are missing; .*q01"):
        normalizer(folder("QUANTILE10"), "action", 2)
    with pytest.raises(UserError, match="has 2 dimensions and the env's 7"):
        normalizer(folder(), "action", 7)
    with pytest.raises(UserError, match="normalised by 'MEDIAN', expected one of IDENTITY, MEAN_STD"):
        normalizer(folder("MEDIAN"), "action", 2)


def test_cameras_are_found_by_name_or_as_told() -> None:
    both = ["agentview", "wrist"]
    assert camera_map(folder(), {}, both) == {"image": "agentview", "image2": "wrist", "empty_camera_0": None}
    told = camera_map(folder(), {"image2": None, "empty_camera_0": "wrist"}, both)
    assert told == {"image": "agentview", "image2": None, "empty_camera_0": "wrist"}
    with pytest.raises(UserError, match=r"got 'imagee'.* Did you mean 'image'\?"):
        camera_map(folder(), {"imagee": "wrist"}, both)
    with pytest.raises(UserError, match=r"sees a camera 'image2', and the env has agentview; .*cameras=\{image2: "):
        camera_map(folder(), {}, ["agentview"])
    with pytest.raises(UserError, match="none of its cameras"):
        camera_map(folder(), {"image": None, "image2": None}, both)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    SmolVlaPolicy.write_tiny(tmp_path)
    return tmp_path


def read(path: Path, tokenizer: str | None = None) -> LerobotFolder:
    return read_folder(path, read_config(path), read_weights(path), tokenizer, VLM_NAME)


def test_a_folder_is_read_as_it_was_written(tiny: Path) -> None:
    found = read(tiny)
    assert found.modes == {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    assert found.visual_features() == ["image", "image2"]
    assert found.tokenizer_name == VLM_NAME
    expected = {name: torch.tensor(numbers) for name, numbers in TINY_STATISTICS.items()}
    assert found.statistics.keys() == expected.keys()
    assert all(torch.equal(found.statistics[name], expected[name]) for name in expected)
    # lerobot finds a step's state under this name.
    steps = json.loads((tiny / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps if "state_file" in step] == ["normalizer_processor"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registry_name": "delta_actions_processor", "config": {}}, "has a step 'delta_actions_processor'"),
        ({"registry_name": "normalizer_processor", "config": {"norm_map": {"VISUAL": "MEAN_STD"}}}, "images are norm"),
    ],
)
def test_steps_that_are_not_done_here_are_refused(tiny: Path, change: dict[str, object], message: str) -> None:
    path = tiny / "policy_preprocessor.json"
    pipeline = json.loads(path.read_text())
    path.write_text(json.dumps({**pipeline, "steps": [*pipeline["steps"], change]}))
    with pytest.raises(UserError, match=message):
        read(tiny)


def test_a_missing_tokenizer_is_asked_for(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    elsewhere = tmp_path_factory.mktemp("tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tiny / file).rename(elsewhere / file)
    with pytest.raises(UserError, match=r"set model.params.tokenizer to a folder with the files of HuggingFaceTB"):
        read(tiny)
    again = read(tiny, str(elsewhere))
    assert again.tokenizer("open the drawer\n")["input_ids"] == folder().tokenizer("open the drawer\n")["input_ids"]


def test_a_folder_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        folder().path = "elsewhere"  # pyright: ignore[reportAttributeAccessIssue]
