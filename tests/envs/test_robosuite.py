from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embodied_rl.commands.env_checks import (
    Subject,
    agents,
    determinism,
    episodes,
    groups,
    level_at_start,
    lone_slots,
    observations,
    sizes,
)
from embodied_rl.envs.chunked import ChunkedEnv
from embodied_rl.envs.rendering import SimulatorMissingError, explain_missing
from embodied_rl.envs.robosuite import INSTRUCTIONS, RobosuiteEnv, RobosuiteParams
from embodied_rl.errors import UserError
from embodied_rl.params import parse_params

pytest.importorskip("robosuite", reason="the robosuite extra is not installed")

from tests.fakes import seen_after

LIFT = RobosuiteParams(task="Lift", num_reset_states=500)
EEF, CUBE = slice(21, 24), slice(32, 35)
"""Places in Lift's state: 32 numbers of the robot, then the cube."""


@pytest.fixture(scope="module")
def env() -> Iterator[RobosuiteEnv]:
    env = RobosuiteEnv(3, LIFT, seed=7)
    yield env
    env.close()


def random_actions(seed: int, n: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-1, 1, (n, 7)).astype(np.float32)


def play(env: RobosuiteEnv, slot: int, reset_state_id: int, actions: NDArray[np.float32]) -> NDArray[np.float32]:
    """[1+n,S+1]: the states, and the reward level (0 at the start)."""
    env.reset([slot], [reset_state_id])
    rows = [np.append(env.observe([slot]).state[0], np.float32(0))]
    for action in actions:
        outcome = env.step([slot], action[None])
        rows.append(np.append(env.observe([slot]).state[0], outcome.rewards[0]))
    return np.stack(rows)


def lift(env: RobosuiteEnv, slot: int, steps: int) -> list[tuple[float, bool]]:
    """Above the cube, down, close, up. ±1 of an action is ±5 cm. Returns (reward level, success) of every step."""
    outcomes = []
    closing = 0
    for _ in range(steps):
        state = env.observe([slot]).state[0]
        eef, cube = state[EEF], state[CUBE]
        aside = np.linalg.norm(eef[:2] - cube[:2])
        target = cube + np.array([0, 0, 0.06 if aside > 0.015 and eef[2] > cube[2] + 0.03 else 0])
        if closing or (aside < 0.02 and abs(eef[2] - cube[2]) < 0.01):
            closing += 1
        if closing > 6:
            target = eef + np.array([0, 0, 0.05])
        move = np.clip((target - eef) / 0.05, -1, 1)
        action = np.concatenate([move, [0, 0, 0, 1 if closing else -1]]).astype(np.float32)
        outcome = env.step([slot], action[None])
        outcomes.append((float(outcome.rewards[0]), bool(outcome.success[0])))
    return outcomes


def test_what_the_env_says_of_itself(env: RobosuiteEnv) -> None:
    assert (env.action_dim, env.state_dim, env.control_hz, env.batched) == (7, 42, 20.0, False)
    assert env.image_shapes == {}
    assert (env.task(499).task_id, env.task(0).instruction, env.task(0).suite) == (0, "lift the red cube", "robosuite")
    for wrong in (-1, 500):
        with pytest.raises(ValueError, match="expected 0 to 499"):
            env.task(wrong)


def test_episode_is_a_function_of_seed_reset_state_and_actions(env: RobosuiteEnv) -> None:
    """Whatever was played before (with the gripper closed, too), in whichever slot, in whichever instance."""
    actions = random_actions(0, 15)
    first = play(env, 0, 3, actions)
    other = play(env, 0, 4, np.ones((15, 7), np.float32))
    np.testing.assert_array_equal(play(env, 0, 3, actions), first)
    np.testing.assert_array_equal(play(env, 2, 3, actions), first)
    again, reseeded = RobosuiteEnv(1, LIFT, seed=7), RobosuiteEnv(1, LIFT, seed=8)
    np.testing.assert_array_equal(play(again, 0, 3, actions), first)
    assert abs(other[0] - first[0])[CUBE].max() > 1e-3
    assert abs(play(reseeded, 0, 3, actions)[0] - first[0])[CUBE].max() > 1e-3
    again.close()
    reseeded.close()


def test_interleaved_slots_do_not_touch_each_other(env: RobosuiteEnv) -> None:
    actions = random_actions(2, 6)
    alone = play(env, 0, 11, actions)
    env.reset([0, 2], [11, 12])
    for action in actions:
        both = env.step([2, 0], np.stack([-action, action]))
    np.testing.assert_array_equal(env.observe([0]).state[0], alone[-1, :-1])
    assert both.rewards[1] == alone[-1, -1]


def test_numpys_generator_is_left_alone(env: RobosuiteEnv) -> None:
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    RobosuiteEnv(1, LIFT, seed=1).close()
    env.reset([0], [5])
    assert np.random.rand() == expected


def test_lifting_succeeds_and_the_reward_counts_from_the_initial_state(env: RobosuiteEnv) -> None:
    """robosuite's reward is 1 when lifted; before, (1 - tanh(10 d) + 0.25 if it grasps) / 2.25."""
    env.reset([1], [4])
    state = env.observe([1]).state[0]
    start = (1 - np.tanh(10 * np.linalg.norm(state[EEF] - state[CUBE]))) / 2.25
    outcomes = lift(env, 1, 45)
    assert not outcomes[0][1]
    assert outcomes[-1][1]
    assert outcomes[-1][0] == pytest.approx(1 - start, abs=1e-4)
    assert outcomes[0][0] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(("task", "dimensions"), [("Stack", 55), ("Door", 46)])
def test_other_tasks(task: str, dimensions: int) -> None:
    env = RobosuiteEnv(1, RobosuiteParams(task=task, reward_shaping=False), seed=0)
    assert env.state_dim == dimensions
    first = play(env, 0, 0, random_actions(0, 5))
    play(env, 0, 1, random_actions(1, 5))
    np.testing.assert_array_equal(play(env, 0, 0, random_actions(0, 5)), first)
    assert not first[:, -1].any()
    env.close()


def test_a_rollout_in_chunks_is_cut_at_the_horizon(env: RobosuiteEnv) -> None:
    chunked = ChunkedEnv(
        env,
        env_ids=[0, 1, 2],
        num_action_chunks=4,
        max_episode_steps=6,
        auto_reset=False,
        ignore_terminations=False,
        use_rel_reward=True,
        reward_coef=1.0,
    )
    obs = chunked.reset([3, 3, 4])
    assert obs.state[0].equal(obs.state[1])
    assert not obs.state[0].equal(obs.state[2])
    chunked.chunk_step(torch.zeros(3, 4, 7))
    result = chunked.chunk_step(torch.zeros(3, 4, 7))
    assert result.valid.int().tolist() == [[1, 1, 0, 0]] * 3
    assert result.truncated.int().tolist() == [[0, 1, 0, 0]] * 3
    assert seen_after(result).state[0].equal(seen_after(result).state[1])
    assert [record.success for record in chunked.drain_episodes()] == [False] * 3


def test_actions_are_clipped_and_their_shape_is_checked(env: RobosuiteEnv) -> None:
    wide, narrow = np.full((3, 7), 3.0, np.float32), np.ones((3, 7), np.float32)
    np.testing.assert_array_equal(play(env, 0, 0, wide), play(env, 0, 0, narrow))
    with pytest.raises(ValueError, match=r"got actions \[2, 6\], expected \[2, 7\]"):
        env.step([0, 1], np.zeros((2, 6), np.float32))


def test_cameras() -> None:
    """Each slot has a rendering context of its own; the robot's own view moves with it; the arm is above the table."""
    params = RobosuiteParams(
        task="Lift",
        cameras=("agentview", "wrist"),
        object_state=False,
        camera_height=48,
        camera_width=64,
        render_height=32,
        render_width=32,
    )
    env = RobosuiteEnv(2, params, seed=7)
    assert env.image_shapes == {"agentview": (48, 64), "wrist": (48, 64)}
    assert env.state_dim == 32
    env.reset([0, 1], [0, 1])
    before = env.observe([1, 0]).images
    assert before["wrist"].shape == (2, 48, 64, 3)
    for _ in range(6):
        env.step([0], np.array([[1, 0, -1, 0, 0, 0, 1]], np.float32))
    after = env.observe([1, 0]).images
    for camera in ("agentview", "wrist"):
        np.testing.assert_array_equal(after[camera][0], before[camera][0])
        assert (after[camera][1] != before[camera][1]).mean() > 0.02
    env.release()
    assert all(each.sim._render_context_offscreen is None for each in env._envs)
    for camera, images in env.observe([1, 0]).images.items():
        np.testing.assert_array_equal(images, after[camera], err_msg="as before they were released")
    actions = random_actions(0, 6)
    played = play(env, 0, 0, actions)[4:, :-1]
    play(env, 0, 0, actions[:3])
    env.release()
    env.observe([0])
    states = []
    for action in actions[3:]:
        env.step([0], action[None])
        states.append(env.observe([0]).state[0])
    np.testing.assert_array_equal(states, played, err_msg="the episode goes on to the same bits")
    assert env.render([0, 1]).shape == (2, 32, 32, 3)
    # Upright: the white table fills the lower half, the wall and the robot's base the upper.
    assert after["agentview"][0, 30:].mean() > after["agentview"][0, :15].mean() + 20
    env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "Wipe"}, "task: Wipe needs a gripper that wipes. Take one of Lift, "),
        ({"task": "Lfit"}, "task: got 'Lfit', expected one of Lift, Stack, Door, NutAssembly, .* Did you mean 'Lift'"),
        ({"cameras": ["agentviw"]}, "Did you mean 'agentview'"),
        ({"cameras": ["wrist", "wrist"]}, "at most once"),
        ({"camera_width": 0}, "camera_width: got 0"),
    ],
)
def test_wrong_parameters(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_params(RobosuiteParams, {"task": "Lift", **arguments}, "env.init_params")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with nothing on standard input."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "MUJOCO_GL": "egl"},
        check=False,
    )


def test_import_needs_neither_torch_nor_the_simulator() -> None:
    done = run_python(
        """
        import sys
        from embodied_rl.envs.robosuite import INSTRUCTIONS, RobosuiteEnv, RobosuiteParams
        RobosuiteParams(task="Lift")
        print(sorted({"torch", "robosuite", "mujoco"} & set(sys.modules)))
        """
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_is_silent() -> None:
    done = run_python(
        """
        from embodied_rl.envs.robosuite import INSTRUCTIONS, RobosuiteEnv, RobosuiteParams
        env = RobosuiteEnv(1, RobosuiteParams(task="Lift", camera_height=8, camera_width=8), seed=0)
        env.reset([0], [0])
        env.render([0])
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            'sys.modules["robosuite"] = None',
            "env_type 'robosuite' needs the simulator robosuite, which is not installed",
        ),
        (
            'import robosuite, mujoco; robosuite.__version__ = "1.5.2"; mujoco.__version__ = "3.10.0"',
            "robosuite 1.5.2 does not run with MuJoCo 3.10.0, only with 3.3 to 3.9",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(setting: str, message: str) -> None:
    done = run_python(
        f"""
        import sys
        from embodied_rl.envs.robosuite import INSTRUCTIONS, RobosuiteEnv, RobosuiteParams
        {setting}
        RobosuiteEnv(1, RobosuiteParams(task="Lift"), seed=0)
        """
    )
    assert message in done.stderr.splitlines()[-1]


def test_a_missing_package_keeps_its_name() -> None:
    message = (
        "robosuite needs the Python package 'LIBERO_tools', which is not installed: pip install 'robosuite==1.4.0'"
    )
    with pytest.raises(SimulatorMissingError, match=re.escape(message)), explain_missing("robosuite"):
        raise ModuleNotFoundError(name="LIBERO_tools")


def test_missing_graphics_library_is_named_with_the_command() -> None:
    done = run_python(
        """
        import ctypes
        class NoEgl(ctypes.CDLL):
            def __init__(self, name, *args, **kwargs):
                if name and "EGL" in str(name):
                    raise OSError(f"{name}: cannot open shared object file")
                super().__init__(name, *args, **kwargs)
        ctypes.CDLL = NoEgl
        from embodied_rl.envs.robosuite import INSTRUCTIONS, RobosuiteEnv, RobosuiteParams
        RobosuiteEnv(1, RobosuiteParams(task="Lift", cameras=("wrist",)), seed=0)
        """
    )
    last = done.stderr.splitlines()[-1]
    assert "robosuite cannot render" in last
    assert "apt-get install -y --no-install-recommends libegl1" in last


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", [task for task in INSTRUCTIONS if task not in ("Lift", "Stack", "Door")])
def test_protocol_of_the_other_tasks(task: str) -> None:
    params = RobosuiteParams(task=task)
    sim = RobosuiteEnv(2, params, 0)
    about: dict[str, Any] = {"params": params, "seed": 0, "horizon": 40, "relative": True, "steps": 15}
    subject = Subject(sim=sim, states=(0, 1, 2), **about)
    parts = (sizes, observations, agents, determinism, groups, lone_slots, level_at_start, episodes)
    assert [finding for part in parts for finding in part(subject) if finding.status != "ok"] == []
    sim.close()
