from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.envs import maniskill_twins
from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams, build
from embodied_rl.errors import UserError

pytest.importorskip("mani_skill", reason="the maniskill extra is not installed")
from tests.envs.bridge_assets import write_bridge_assets, write_plate_assets


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("maniskill")
    write_bridge_assets(root)
    return root


@pytest.fixture(scope="module")
def found(assets: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.envs.twin_probe"]
    done = subprocess.run(
        command, env={**os.environ, "MS_ASSET_DIR": str(assets)}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_batch_is_refused(assets: Path) -> None:
    """A reset of one slot moves what is in all."""
    from mani_skill.utils.registration import REGISTERED_ENVS

    params = ManiSkillParams(env_id="PutCarrotOnPlateInScene-v1", sim_backend="physx_cuda")
    with pytest.raises(UserError, match=r"sim_backend: got 'physx_cuda'.*lets the whole batch settle.*'physx_cpu'"):
        build(params, 2, REGISTERED_ENVS[params.env_id].cls)


def test_what_the_twin_says_of_itself(found: dict[str, Any]) -> None:
    assert found["spaces"] == [24, 7, 5.0, "put carrot on plate"]


def test_initial_states_are_the_published_24(found: dict[str, Any]) -> None:
    """Two of four corners of a square of 15 cm about (-0.16, 0), and two turns of the carrot each."""
    assert found["starts"][0] == pytest.approx([-0.235, -0.075, -0.235, 0.075], abs=2e-3)
    assert found["starts"][23] == pytest.approx([-0.085, 0.075, -0.085, -0.075], abs=2e-3)
    corners = {tuple(round(x, 2) for x in start) for start in found["starts"]}
    assert len(corners) == 12


def test_episode_is_a_function_of_reset_state_and_actions(found: dict[str, Any]) -> None:
    first, other, again, elsewhere = found["episodes"]
    assert first == again == elsewhere
    assert first != other


def test_metres_of_the_data_are_metres_of_the_hand(found: dict[str, Any]) -> None:
    """Five actions of 2 cm; the gripper's 1 opens it to 38 mm a finger."""
    assert found["forward"]["metres"] == pytest.approx([0.1, 0, 0], abs=5e-3)
    assert found["forward"]["radians"] == pytest.approx([0, 0, 0], abs=0.02)
    assert found["forward"]["fingers"] == pytest.approx([0.038, 0.038], abs=2e-3)


def test_radians_of_the_data_are_radians_of_the_hand(found: dict[str, Any]) -> None:
    """Five actions of 0.05 rad about the vertical (its sine is 0.247); the gripper's 0 closes it to 14 mm."""
    assert found["yaw"]["metres"] == pytest.approx([0, 0, 0], abs=5e-3)
    assert found["yaw"]["radians"] == pytest.approx([0, 0, 0.2474], abs=0.02)
    assert found["yaw"]["fingers"] == pytest.approx([0.014, 0.014], abs=2e-3)


def test_success_and_rewards(found: dict[str, Any]) -> None:
    """A carrot that nobody grasped may lie on the plate; that is success, but not earned."""
    assert found["rewards"] == {"first": [False, 0.0], "laid": [True, 0.0], "carried": [True, pytest.approx(1.1)]}


@pytest.mark.parametrize(
    ("env_id", "states", "instruction", "distances"),
    [
        ("PutSpoonOnTableClothInScene-v1", 24, "put the spoon on the towel", (0.15, 0.213)),
        ("StackGreenCubeOnYellowCubeBakedTexInScene-v1", 24, "stack the green block on the yellow block", (0.1, 0.284)),
        ("PutEggplantInBasketScene-v1", 64, "put eggplant into yellow basket", (0.165, 0.198)),
    ],
)
def test_siblings(
    found: dict[str, Any], env_id: str, states: int, instruction: str, distances: tuple[float, float]
) -> None:
    """Each listed start is played: object and target are as far apart as the list has it, but for the object's fall."""
    sibling = found["siblings"][env_id]
    assert sibling["said"][:3] == [states, 7, instruction]
    assert sibling["outcome"] == [False, 0.0]
    apart = [math.dist(start[:2], start[2:]) for start in sibling["starts"]]
    fall = 0.015
    assert distances[0] - fall < min(apart) < max(apart) < distances[1] + fall
    assert len(apart) == states and max(apart) - min(apart) > 0.01


class Bare:
    """What ManiSkill's digital twins offer."""

    SUPPORTED_OBS_MODES = ("rgb+segmentation",)
    SUPPORTED_REWARD_MODES = ("none",)


def test_rewards_by_hand() -> None:
    yes, no = torch.tensor([True]), torch.tensor([False])
    cases = {(no, no, no): 0.0, (yes, no, no): 0.1, (yes, yes, no): 0.2, (yes, yes, yes): 1.2, (no, no, yes): 0.0}
    for (grasped, held, success), reward in cases.items():
        info = {"is_src_obj_grasped": grasped, "consecutive_grasp": held, "success": success}
        twin = maniskill_twins.with_states(Bare, can_render=True)()
        assert twin.compute_dense_reward(obs=None, action=None, info=info).tolist() == pytest.approx([reward])
        normalized = twin.compute_normalized_dense_reward(obs=None, action=None, info=info)
        assert normalized.tolist() == pytest.approx([reward / 1.2])


def test_pictures_show_the_scene_before_the_photograph(found: dict[str, Any]) -> None:
    """The photograph here is one colour; arm, carrot and plate stand before it."""
    if "pictures" not in found:
        pytest.skip("no Vulkan driver")
    assert found["pictures"] == [["3rd_view_camera"], [1, 96, 128, 3], [20, 90, 200]]
    assert found["frame"] == [1, 256, 256, 3]
    assert found["colours"] > 20


def test_missing_assets_are_named_with_the_command() -> None:
    with pytest.raises(UserError, match=r"bridge_v2_real2sim.*download_asset PutCarrotOnPlateInScene-v1"):
        ManiSkillEnv(1, ManiSkillParams(env_id="PutCarrotOnPlateInScene-v1"), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["maniskill_bridge", "put_on_plate"])
def test_twins_keep_what_training_takes_for_granted(env: str, assets: Path, tmp_path: Path) -> None:
    write_plate_assets(tmp_path / "carrot")
    command = [sys.executable, "train.py", "check-env", f"env={env}", "model=mlp", "env.init_params.obs_mode=state"]
    command += ["--resets", "20", "--steps", "20", "--picture", str(tmp_path / "seen.png")]
    if env == "put_on_plate":
        command += [f"env.init_params.assets={tmp_path}/carrot"]
    done = subprocess.run(
        command, env={**os.environ, "MS_ASSET_DIR": str(assets)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_policy_trains_on_a_twin_from_its_state(assets: Path, tmp_path: Path) -> None:
    """Wherever this runs: states need no renderer."""
    command = [
        sys.executable, "train.py", "env=maniskill_bridge", "env.init_params.obs_mode=state", "model=mlp",
        "algorithm=ppo", "cluster=serial", "runner.max_steps=2", "env.train.total_num_envs=4",
        "env.train.max_episode_steps=8", "algorithm.n_minibatches=2", "runner.val_check_interval=-1",
        "runner.eval_at_end=false", "runner.report=false", "env.eval.video_cfg.save_video=false",
        f"runner.output_dir={tmp_path}/results",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "MS_ASSET_DIR": str(assets)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (tmp_path / "results").rglob("metrics.jsonl")
    steps = [row for row in map(json.loads, path.read_text().splitlines()) if "actor/grad_norm" in row]
    assert len(steps) == 2 and all(row["actor/grad_norm"] > 0 for row in steps)


@pytest.mark.slow
def test_openvla_trains_on_a_twin(assets: Path, tmp_path: Path) -> None:
    """The experiment, with a tiny checkpoint; where nothing can render it says so."""
    from embodied_rl.envs.maniskill import can_render, import_maniskill

    run = [sys.executable, "train.py"]
    subprocess.run([*run, "make-tiny", "model=openvla", str(tmp_path / "tiny")], check=True, timeout=100)
    command = [
        *run, "experiment=put_carrot_ppo", f"model.path={tmp_path}/tiny", "cluster=serial", "runner.max_steps=1",
        "env.train.total_num_envs=4", "env.train.max_episode_steps=4", "algorithm.n_minibatches=2",
        "env.eval.total_num_envs=4", "env.eval.max_episode_steps=4", "env.eval.episodes_per_task=4",
        f"runner.output_dir={tmp_path}/results", f"env.eval.video_cfg.video_base_dir={tmp_path}/videos",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "MS_ASSET_DIR": str(assets)}, capture_output=True, text=True, timeout=280
    )
    import_maniskill()
    if not can_render():
        assert done.returncode == 2
        assert "ManiSkill cannot render: no usable Vulkan driver" in done.stderr
        assert "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "put carrot on plate" in done.stdout
    assert list(tmp_path.glob("videos/**/*.mp4"))
