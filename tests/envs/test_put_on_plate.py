from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.envs.put_on_plate import PutOnPlateEnv, PutOnPlateParams, places
from embodied_rl.errors import UserError

pytest.importorskip("mani_skill", reason="the maniskill extra is not installed")
from tests.envs.bridge_assets import write_bridge_assets, write_plate_assets


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("plate")
    write_bridge_assets(root)
    write_plate_assets(root / "carrot")
    command = [sys.executable, "-m", "tests.envs.plate_probe", str(root / "carrot")]
    done = subprocess.run(
        command, env={**os.environ, "MS_ASSET_DIR": str(root)}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_places_by_hand() -> None:
    """Of the 36 · 35 ordered pairs of a 3 cm grid those more than 7 cm apart; the first is from corner to corner up."""
    near = sum(
        0 < math.hypot(3 * (a - c), 3 * (b - d)) <= 7
        for a in range(6)
        for b in range(6)
        for c in range(6)
        for d in range(6)
    )
    assert len(places()) == 36 * 35 - near == 784
    assert places()[0] == (pytest.approx((-0.235, -0.075)), pytest.approx((-0.235, 0.015)))


def test_a_task_for_each_object(found: dict[str, Any]) -> None:
    assert found["count"] == 160
    assert found["tasks"] == list(range(16))
    names = [shown["names"] for shown in found["shown"]]
    assert names == [[f"{number:03}_box", "001_plate"] for number in (0, 0, 1, 15)]
    assert [shown["instruction"] for shown in found["shown"]] == [
        f"put {number:03} box on 001 plate" for number in (0, 0, 1, 15)
    ]


def test_objects_lie_where_the_state_says(found: dict[str, Any]) -> None:
    first, second, *_ = found["shown"]
    assert first["places"] != second["places"]
    for shown in found["shown"]:
        x, y, plate_x, plate_y = shown["places"]
        assert -0.25 < x < -0.07 and -0.09 < y < 0.09, "they may roll a centimetre when they fall"
        assert math.hypot(x - plate_x, y - plate_y) > 0.05
        assert shown["heights"] == pytest.approx([0.87, 0.87], abs=0.01), "on the table"


def test_episode_is_a_function_of_reset_state_and_actions(found: dict[str, Any]) -> None:
    """Whichever object the scene had before."""
    first, other, again, elsewhere = found["episodes"]
    assert first == again == elsewhere
    assert first != other


def test_what_is_tested_was_not_trained_on(found: dict[str, Any]) -> None:
    assert set(found["tables"]) <= {f"{number:03}.png" for number in range(16)}
    assert len(found["tables"]) == 16
    assert found["test"]["instructions"] == ["put 016 box on 001 plate", "put 017 box on 001 plate"]
    assert found["test"]["tables"] == ["016.png", "017.png"]


def test_success_by_the_papers_rule(found: dict[str, Any]) -> None:
    assert found["laid"] == [True, False]


def test_each_scene_has_its_own_table(found: dict[str, Any]) -> None:
    if "blues" not in found:
        pytest.skip("no Vulkan driver")
    for table, blue in found["blues"]:
        assert blue == 100 + int(table[:3])


def test_a_folder_without_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"more_carrot/model_db.json cannot be read .* checkout of the repository"):
        PutOnPlateEnv(1, PutOnPlateParams(assets=str(tmp_path)), seed=0)
    write_plate_assets(tmp_path, things=10)
    with pytest.raises(UserError, match=r"objects: got 'test', but .* has only 10 objects and 10 tables"):
        PutOnPlateEnv(1, PutOnPlateParams(assets=str(tmp_path), objects="test"), seed=0)
    for text in ("[" * 100_000, "[]", "{}"):
        (tmp_path / "more_plate" / "model_db.json").write_text(text)
        with pytest.raises(UserError, match=r"more_plate/model_db.json cannot be read \(it (is nested|holds no)"):
            PutOnPlateEnv(1, PutOnPlateParams(assets=str(tmp_path)), seed=0)


def test_the_camera_is_known_before_there_is_a_scene(found: dict[str, Any]) -> None:
    if "cameras" not in found:
        pytest.skip("no Vulkan driver")
    params = PutOnPlateParams(assets="nowhere", obs_mode="rgb", camera_height=96, camera_width=128)
    assert PutOnPlateEnv.image_shapes_of(params) == {camera: tuple(size) for camera, size in found["cameras"].items()}
