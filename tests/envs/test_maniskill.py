from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embodied_rl.envs.chunked import ChunkedEnv
from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams
from embodied_rl.errors import UserError
from embodied_rl.params import parse_params

pytest.importorskip("mani_skill", reason="the maniskill extra is not installed")
from tests.fakes import seen_after

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning:mani_skill")

PUSH = ManiSkillParams(env_id="PushCube-v1", num_reset_states=500)
TCP, GOAL, CUBE = slice(18, 21), slice(25, 28), slice(28, 31)
"""Places in PushCube's state, after 9 joint positions and 9 velocities."""


@pytest.fixture(scope="module")
def env() -> Iterator[ManiSkillEnv]:
    env = ManiSkillEnv(3, PUSH, seed=7)
    yield env
    env.close()


def random_actions(seed: int, n: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-1, 1, (n, 4)).astype(np.float32)


def play(env: ManiSkillEnv, slot: int, reset_state_id: int, actions: NDArray[np.float32]) -> NDArray[np.float32]:
    """[1+n,S+1]: the states, and the reward level (0 at the start)."""
    env.reset([slot], [reset_state_id])
    rows = [np.append(env.observe([slot]).state[0], 0)]
    for action in actions:
        outcome = env.step([slot], action[None])
        rows.append(np.append(env.observe([slot]).state[0], outcome.rewards[0]))
    return np.stack(rows)


def push(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """Behind the cube, down, and forward. ±1 of an action is ±10 cm."""
    tcp, cube = state[TCP], state[CUBE]
    behind = cube + np.array([-0.07, 0, 0])
    if (tcp[0] > cube[0] - 0.05 and tcp[2] > 0.06) or abs(tcp[1] - cube[1]) > 0.03:
        target = behind + np.array([0, 0, 0.1])
    elif tcp[2] > 0.035:
        target = behind
    else:
        target = np.array([tcp[0] + 0.05, cube[1], 0.02])
    return np.append(np.clip((target - tcp) / 0.1, -1, 1), -1).astype(np.float32)


def test_what_the_env_says_of_itself(env: ManiSkillEnv) -> None:
    assert (env.action_dim, env.state_dim, env.control_hz, env.batched) == (4, 35, 20.0, False)
    assert env.image_shapes == {}
    assert env.num_reset_states == 500
    assert (env.task(499).task_id, env.task(0).instruction, env.task(0).suite) == (0, "push cube", "maniskill")
    for wrong in (-1, 500):
        with pytest.raises(ValueError, match="expected 0 to 499"):
            env.task(wrong)


def test_episode_is_a_function_of_seed_reset_state_and_actions(env: ManiSkillEnv) -> None:
    """Whatever was played before, in whichever slot, in whichever instance."""
    actions = random_actions(0, 20)
    first = play(env, 0, 3, actions)
    other = play(env, 0, 4, random_actions(1, 20))
    np.testing.assert_array_equal(play(env, 0, 3, actions), first)
    np.testing.assert_array_equal(play(env, 2, 3, actions), first)
    again, reseeded = ManiSkillEnv(1, PUSH, seed=7), ManiSkillEnv(1, PUSH, seed=8)
    np.testing.assert_array_equal(play(again, 0, 3, actions), first)
    assert abs(other[0] - first[0])[CUBE].max() > 1e-3
    assert abs(play(reseeded, 0, 3, actions)[0] - first[0])[CUBE].max() > 1e-3
    again.close()
    reseeded.close()


def test_interleaved_slots_do_not_touch_each_other(env: ManiSkillEnv) -> None:
    actions = random_actions(2, 10)
    alone = play(env, 0, 11, actions)
    env.reset([0, 2], [11, 12])
    for action in actions:
        both = env.step([2, 0], np.stack([-action, action]))
    np.testing.assert_array_equal(env.observe([0]).state[0], alone[-1, :-1])
    assert both.rewards[1] == alone[-1, -1]


def test_global_random_generators_are_left_alone(env: ManiSkillEnv) -> None:
    np.random.seed(3)
    torch.manual_seed(3)
    expected = np.random.rand(), torch.rand(1)
    np.random.seed(3)
    torch.manual_seed(3)
    play(env, 0, 5, random_actions(0, 2))
    assert (np.random.rand(), torch.rand(1)) == expected


def test_reward_level_counts_from_the_initial_state(env: ManiSkillEnv) -> None:
    """ManiSkill's normalised reward is 1 in the goal; before, here, (1 - tanh(5 d)) / 4 with d to the pushing place."""
    env.reset([0], [3])
    state = env.observe([0]).state[0]

    def reaching(state: NDArray[np.float32]) -> float:
        return (1 - np.tanh(5 * np.linalg.norm(state[CUBE] - [0.025, 0, 0] - state[TCP]))) / 4

    start = reaching(state)
    outcome = env.step([0], np.array([[-0.5, 0, 0.5, -1]], np.float32))
    after = reaching(env.observe([0]).state[0])
    assert outcome.rewards[0] == pytest.approx(after - start, abs=1e-5)
    assert abs(after - start) > 1e-3
    for _ in range(50):
        outcome = env.step([0], push(env.observe([0]).state[0])[None])
        if outcome.success[0]:
            break
    assert outcome.success[0]
    assert outcome.rewards[0] == pytest.approx(1 - start, abs=1e-5)
    final = env.observe([0]).state[0]
    assert np.linalg.norm(final[CUBE][:2] - final[GOAL][:2]) < 0.1


def test_actions_are_clipped_and_their_shape_is_checked(env: ManiSkillEnv) -> None:
    wide, narrow = np.full((5, 4), 3.0, np.float32), np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(play(env, 0, 0, wide), play(env, 0, 0, narrow))
    with pytest.raises(ValueError, match=r"got actions \[2, 3\], expected \[2, 4\]"):
        env.step([0, 1], np.zeros((2, 3), np.float32))


def test_a_rollout_in_chunks_with_success_and_truncation(env: ManiSkillEnv) -> None:
    """Envs 0 and 1 are a group: one start. Env 0 pushes, env 1 and 2 stand still until the horizon."""
    chunked = ChunkedEnv(
        env,
        env_ids=[0, 1, 2],
        num_action_chunks=2,
        max_episode_steps=39,
        auto_reset=False,
        ignore_terminations=False,
        use_rel_reward=True,
        reward_coef=2.0,
    )
    obs = chunked.reset([3, 3, 4])
    assert obs.state[0].equal(obs.state[1])
    assert not obs.state[0].equal(obs.state[2])
    start, done = obs.state.clone(), None
    while not chunked.all_done:
        # An open loop of two steps is fine for pushing: half of it twice.
        actions = torch.zeros(3, 2, 4)
        actions[0] = torch.from_numpy(push(obs.state[0].numpy())) * torch.tensor([0.5, 0.5, 0.5, 1.0])
        result = chunked.chunk_step(actions)
        obs = seen_after(result)
        if result.terminated[0].any():
            done = result
    assert done is not None
    assert done.valid[0].tolist() in ([True, False], [True, True])
    pushed, still, other = sorted(chunked.drain_episodes(), key=lambda record: record.env_id)
    assert (pushed.success, still.success, other.success) == (True, False, False)
    assert pushed.episode_length < 39 == still.episode_length
    first = (1 - np.tanh(5 * np.linalg.norm(start[0, CUBE].numpy() - [0.025, 0, 0] - start[0, TCP].numpy()))) / 4
    assert pushed.episode_return == pytest.approx(2 * (1 - first), abs=1e-4)
    assert result.truncated[1].tolist() == [True, False]


def test_joint_limits_are_mapped_to_unit_actions() -> None:
    """pd_joint_pos takes joint angles: the middle of the limits is 0."""
    params = ManiSkillParams(env_id="PushCube-v1", control_mode="pd_joint_pos", num_reset_states=1)
    env = ManiSkillEnv(1, params, seed=0)
    assert env.action_dim == 8
    env.reset([0], [0])
    for _ in range(60):
        env.step([0], np.zeros((1, 8), np.float32))
    # Panda's joints 4 and 6 may turn by -3.07..-0.07 and -0.02..3.75 rad.
    np.testing.assert_allclose(env.observe([0]).state[0][[3, 5]], [-1.571, 1.868], atol=0.05)
    env.close()


def test_other_tasks_and_rewards() -> None:
    sparse = ManiSkillParams(env_id="PickCube-v1", reward_mode="sparse", instruction="lift it", num_reset_states=9)
    env = ManiSkillEnv(1, sparse, seed=0)
    env.reset([0], [8])
    outcome = env.step([0], np.zeros((1, 4), np.float32))
    assert (outcome.rewards.tolist(), outcome.success.tolist()) == ([0.0], [False])
    assert env.task(0).instruction == "lift it"
    env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "PushCub-v1"}, "no task 'PushCub-v1'. Did you mean 'PushCube-v1'"),
        ({"env_id": "PickSingleYCB-v1"}, "python -m mani_skill.utils.download_asset PickSingleYCB-v1"),
        ({"env_id": "OpenCabinetDoor-v1"}, "needs something that is not here: Partnet Mobility dataset not found"),
        ({"env_id": "ReplicaCAD_SceneManipulation-v1"}, "needs something that is not here: .*--list scene"),
        ({"env_id": "TwoRobotPickCube-v1"}, "which has 2 robots, expected a task with one"),
        ({"control_mode": "pd_ee_delta"}, r"PushCube-v1 has no 'pd_ee_delta', only \['pd_joint_delta_pos'"),
        ({"sim_backend": "physx_cuda"}, "torch finds no CUDA device"),
    ],
)
def test_what_cannot_be_built(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MS_ASSET_DIR", "/nonexistent")
    with pytest.raises(UserError, match=message):
        ManiSkillEnv(1, ManiSkillParams(**{"env_id": "PushCube-v1", **arguments}), seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"obs_mode": "pixels"}, "obs_mode: got 'pixels'"),
        ({"camera_height": 0}, "camera_height: got 0"),
        ({"sim_backend": "cuda"}, "got 'cuda', expected 'physx_cpu', 'physx_cuda'"),
        ({"env": "PushCube-v1"}, "Did you mean 'env.init_params.env_id'"),
    ],
)
def test_wrong_parameters(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_params(ManiSkillParams, {"env_id": "PushCube-v1", **arguments}, "env.init_params")


def test_images_are_the_tasks_cameras_or_one_clear_message(env: ManiSkillEnv) -> None:
    from embodied_rl.envs.maniskill import can_render

    params = ManiSkillParams(env_id="PushCube-v1", obs_mode="rgb", camera_height=48, camera_width=64)
    env.reset([0], [0])
    if not can_render():
        with pytest.raises(UserError, match="no usable Vulkan driver"):
            ManiSkillEnv(1, params, seed=0)
        with pytest.raises(UserError, match=r"env.eval.video_cfg.save_video=false"):
            env.render([0])
        return
    assert env.render([0]).shape == (1, 256, 256, 3)
    seeing = ManiSkillEnv(2, params, seed=7)
    assert seeing.image_shapes == {"base_camera": (48, 64)}
    assert seeing.state_dim == 25  # Without the cube and the goal.
    seeing.reset([0, 1], [0, 1])
    before = seeing.observe([1, 0])
    assert before.images["base_camera"].shape == (2, 48, 64, 3)
    assert before.images["base_camera"].std() > 10
    np.testing.assert_array_equal(before.state[1], env.observe([0]).state[0][:25])
    for _ in range(5):
        seeing.step([0], np.array([[1, 0, 0, 1]], np.float32))
    after = seeing.observe([1, 0])
    np.testing.assert_array_equal(after.images["base_camera"][0], before.images["base_camera"][0])
    assert (after.images["base_camera"][1] != before.images["base_camera"][1]).any()
    seeing.close()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with nothing on standard input."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        check=False,
    )


def test_import_needs_neither_torch_nor_the_simulator() -> None:
    done = run_python(
        """
        import sys
        from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams
        ManiSkillParams(env_id="PushCube-v1")
        print(sorted({"torch", "sapien", "mani_skill", "gymnasium"} & set(sys.modules)))
        """
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_missing_simulator_is_named_with_the_command() -> None:
    done = run_python(
        """
        import sys
        sys.modules["mani_skill"] = None
        from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams
        ManiSkillEnv(1, ManiSkillParams(env_id="PushCube-v1"), seed=0)
        """
    )
    assert "pip install 'mani-skill==3.0.1'" in done.stderr.splitlines()[-1]


def test_states_need_no_graphics_driver_and_nothing_is_printed() -> None:
    """Where Vulkan finds no driver at all the states are the same."""
    done = run_python(
        """
        import numpy as np
        from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams
        from embodied_rl.envs.maniskill import can_render
        env = ManiSkillEnv(1, ManiSkillParams(env_id="PushCube-v1"), seed=7)
        env.reset([0], [3])
        for _ in range(3):
            env.step([0], np.full((1, 4), 0.5, np.float32))
        assert not can_render()
        print(env.observe([0]).state.tobytes().hex())
        """,
        VK_ICD_FILENAMES="/nonexistent.json",
        VK_DRIVER_FILES="/nonexistent.json",
    )
    env = ManiSkillEnv(1, PUSH, seed=7)
    expected = play(env, 0, 3, np.full((3, 4), 0.5, np.float32))[-1, :-1].astype(np.float32)
    env.close()
    assert done.stdout.strip() == expected.tobytes().hex(), done.stderr
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.xdist_group("simulator")
@pytest.mark.timeout(1800)
def test_ppo_learns_to_push_from_scratch(tmp_path: Path) -> None:
    """The first third of the shipped recipe, at its rates; three seeds reached 84 to 94 % there, random actions 5 %."""
    steps = ["runner.max_steps=40", "actor.lr_sched.lr_decay_iters=120"]
    # The same trajectories as in processes, for less: a message takes longer than a step of these envs.
    steps += ["runner.val_check_interval=-1", "runner.save_interval=-1", "cluster=serial"]
    done = subprocess.run(
        [sys.executable, "train.py", "experiment=push_cube_ppo", f"runner.output_dir={tmp_path}", *steps],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (report,) = tmp_path.glob("*/*/eval_step_000040/eval.json")
    assert json.loads(report.read_text())["overall"]["pc_success"] >= 50
