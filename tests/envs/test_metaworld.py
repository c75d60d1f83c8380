"""Meta-World's tasks, their experts, and what they look like."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.commands.env_checks import Subject, determinism, episodes, groups, level_at_start, lone_slots, sizes
from embodied_rl.composition import config_of
from embodied_rl.demonstrations.expert import make_expert
from embodied_rl.envs import metaworld
from embodied_rl.envs.metaworld import INSTRUCTIONS, MT10, TASKS, MetaworldEnv, MetaworldExpert, MetaworldParams
from embodied_rl.errors import UserError
from embodied_rl.launch import run
from embodied_rl.params import parse_params
from embodied_rl.schema import EmbodiedConfig

pytest.importorskip("metaworld", reason="the metaworld extra is not installed")
STATES = {"cameras": (), "object_state": True}
FEW = ("window-close", "drawer-close", "push", "assembly", "stick-push")


def make(task: str | tuple[str, ...], slots: int = 1, seed: int = 0, **params: Any) -> MetaworldEnv:
    return MetaworldEnv(slots, MetaworldParams(task=task, **{**STATES, **params}), seed)


@pytest.fixture
def door() -> Iterator[MetaworldEnv]:
    env = make("door-open", 2)
    yield env
    env.close()


def test_fifty_tasks_in_four_levels() -> None:
    assert {level: len(tasks) for level, tasks in INSTRUCTIONS.items()} == {
        "easy": 28,
        "medium": 11,
        "hard": 6,
        "very_hard": 5,
    }
    known = make("mt50")._classes
    assert {f"{task}-v3" for task in TASKS} == set(known)
    from metaworld.env_dict import MT10_V3  # pyright: ignore[reportMissingImports]

    assert [f"{task}-v3" for task in MT10] == list(MT10_V3)


def test_tasks_are_numbered_and_have_words() -> None:
    env = make("mt10", states_per_task=7)
    assert env.num_reset_states == 70
    second, last = env.task(7), env.task(69)
    assert (second.task_id, second.instruction, second.suite) == (1, "Push the puck to a goal", "hard")
    assert (last.task_id, last.instruction, last.suite) == (9, "Push and close a window", "easy")


def test_a_state_does_not_depend_on_the_other_tasks() -> None:
    alone, among = make("push"), make("mt10")
    alone.reset([0], [3])
    among.reset([0], [1003])
    np.testing.assert_array_equal(alone.observe([0]).state, among.observe([0]).state)


def test_another_seed_is_another_start() -> None:
    states = []
    for seed in (0, 1):
        env = make("push", seed=seed)
        env.reset([0], [0])
        states.append(env.observe([0]).state)
    assert not np.array_equal(*states)


def test_the_goal_is_in_the_whole_state_and_not_in_the_hands(door: MetaworldEnv) -> None:
    door.reset([0], [0])
    whole = door.observe([0]).state
    assert whole.shape == (1, 39) and np.abs(whole[0, -3:]).max() > 0.1
    hand = make("door-open", object_state=False)
    hand.reset([0], [0])
    np.testing.assert_array_equal(hand.observe([0]).state, whole[:, :4])


def test_scenes_change_hands_between_tasks() -> None:
    env = make(("push", "reach"), 2)
    env.reset([0], [0])
    assert env._slots[0] is not None
    pushing = env._slots[0].scene
    env.reset([0, 1], [1000, 5])
    assert env._slots[1] is not None and env._slots[1].scene is pushing, "no second one was built"


def test_no_more_scenes_wait_than_there_are_slots() -> None:
    """All of fifty tasks for each slot would fill a machine's memory."""
    env = make(("push", "reach", "door-open"))
    for task in (0, 1, 2):
        env.reset([0], [1000 * task])
    assert [task for task, _ in env._idle] == ["reach"]
    [(_, waiting)] = env._idle
    env.reset([0], [1001])
    assert env._slots[0] is not None and env._slots[0].scene is waiting


def test_long_episodes_do_not_end_by_themselves(door: MetaworldEnv) -> None:
    door.reset([0], [0])
    for _ in range(510):  # Meta-World raises after 500
        step = door.step([0], np.zeros((1, 4), np.float32))
    assert step.truncated is None and np.isfinite(door.observe([0]).state).all()


@pytest.mark.parametrize("task", [*FEW, *(pytest.param(t, marks=pytest.mark.slow) for t in TASKS if t not in FEW)])
def test_protocol(task: str) -> None:
    params = MetaworldParams(task=task, cameras=(), object_state=True)
    sim = MetaworldEnv(2, params, 0)
    about: dict[str, Any] = {"params": params, "seed": 0, "horizon": 60, "relative": True, "steps": 20}
    subject = Subject(sim=sim, states=(0, 1, 2), **about)
    parts = (sizes, determinism, groups, lone_slots, level_at_start, episodes)
    assert [finding for part in parts for finding in part(subject) if finding.status != "ok"] == []


def solved(task: str, states: int, *, noise: bool = False) -> int:
    env = make(task)
    expert = make_expert(env, "metaworld", None, {})
    count = 0
    for state in range(states):
        env.reset([0], [state])
        expert.reset(0)
        generator = np.random.default_rng(state) if noise else None
        count += any(env.step([0], expert.act(0, generator)[None]).success[0] for _ in range(300))
    return count


@pytest.mark.parametrize("task", FEW)
def test_experts_solve_their_tasks(task: str) -> None:
    assert solved(task, 2) == 2
    assert solved(task, 2, noise=True) >= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_expert_solves_its_task() -> None:
    failed = [task for task in TASKS if solved(task, 2) < 1]
    assert failed == []


def test_the_expert_needs_its_env_and_an_episode(door: MetaworldEnv) -> None:
    from embodied_rl.envs.dummy import DummyEnv, DummyParams

    with pytest.raises(UserError, match="expected a MetaworldEnv"):
        MetaworldExpert(DummyEnv(1, DummyParams(), 0))
    with pytest.raises(RuntimeError, match=r"call reset\(1\) first"):
        MetaworldExpert(door).act(1, None)


def test_success_alone_may_be_the_reward() -> None:
    env = make("drawer-close", reward="success")
    expert = MetaworldExpert(env)
    env.reset([0], [0])
    expert.reset(0)
    steps = [env.step([0], expert.act(0, None)[None]) for _ in range(150)]
    assert {float(step.rewards[0]) for step in steps} == {0.0, 1.0}
    assert all(bool(step.rewards[0]) == bool(step.success[0]) for step in steps)


def test_the_level_is_higher_while_the_goal_holds() -> None:
    plain, higher = make("drawer-close"), make("drawer-close", success_bonus=0.5)
    expert = MetaworldExpert(plain)
    for env in (plain, higher):
        env.reset([0], [0])
    expert.reset(0)
    gains = set()
    for _ in range(100):
        action = expert.act(0, None)[None]
        without, with_bonus = plain.step([0], action), higher.step([0], action)
        gains.add((bool(without.success[0]), round(float(with_bonus.rewards[0] - without.rewards[0]), 5)))
    assert gains == {(False, 0.0), (True, 0.5)}


def test_pictures_are_upright_and_drafts_alike() -> None:
    """The table is below, the wall above; a draft differs in shadows and edges alone."""
    pictures = {}
    for draft in (True, False):
        env = make("drawer-close", cameras=("corner2",), draft=draft)
        env.reset([0], [0])
        pictures[draft] = env.observe([0]).images["corner2"][0].astype(float)
        assert env.render([0]).shape == (1, 256, 256, 3)
        env.release()
        assert not env._painters
        np.testing.assert_array_equal(env.observe([0]).images["corner2"][0], pictures[draft])
        env.close()
    top, table = pictures[True][:10, 100:].mean(axis=(0, 1)), pictures[True][-20:, 64:].mean(axis=(0, 1))
    assert np.ptp(top) < 10, "a grey wall"
    assert table[0] - table[2] > 15, "a brown table"
    assert 0 < np.abs(pictures[True] - pictures[False]).mean() < 25


def test_what_makes_room_for_another_picture_spoils_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts number their objects alike, and closing one frees them in whichever is current."""
    monkeypatch.setattr(metaworld, "_MAX_PAINTERS", 2)
    env = MetaworldEnv(2, MetaworldParams(task=("reach", "push"), camera_height=32, camera_width=32), seed=0)
    try:
        env.reset([0, 1], [0, 1000])
        first, second = (env.observe([slot]).images["corner2"] for slot in (0, 1))
        video = env.render([1])  # a third picture: the first one's context goes
        np.testing.assert_array_equal(env.observe([1]).images["corner2"], second)
        np.testing.assert_array_equal(env.observe([0]).images["corner2"], first)
        np.testing.assert_array_equal(env.render([1]), video)
    finally:
        env.close()


def test_an_env_that_nobody_closed_says_nothing_at_exit() -> None:
    """Nor does it spoil the pictures of another one when it goes."""
    code = """
from embodied_rl.envs.metaworld import MetaworldEnv, MetaworldParams
envs = [MetaworldEnv(1, MetaworldParams(task="reach", camera_height=32, camera_width=32), seed=0) for _ in range(2)]
for env in envs:
    env.reset([0], [0])
    env.observe([0])
before = env.observe([0]).images["corner2"]
envs.pop(0)
print((env.observe([0]).images["corner2"] == before).all())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "door-opn"}, "Did you mean 'door-open'"),
        ({"task": ["push", "push"]}, "each at most once"),
        ({"task": []}, "expected a task, several, mt10 or mt50"),
        ({"task": "push", "cameras": ["corner4"]}, "expected one of corner2"),
        ({"task": "push", "success_bonus": -1}, "greater than or equal to 0"),
        ({"task": "push", "success_bonus": 1, "reward": "success"}, "set 0, or reward=dense"),
    ],
)
def test_wrong_parameters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_params(MetaworldParams, given, "env.init_params")


def test_a_task_is_chosen_by_name() -> None:
    config = config_of("env=metaworld", "env.init_params.task=door-open")
    assert isinstance(config, EmbodiedConfig) and config.env.name == "metaworld_door-open"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("simulator")
def test_demonstrations_and_imitation(tmp_path: Path) -> None:
    """Collect from the experts of two tasks, imitate, and evaluate by level."""
    env = ["env=metaworld", "env.init_params.task=[drawer-close,push]", "env.name=two", "cluster=serial"]
    out = f"runner.output_dir={tmp_path}"
    run(config_of("task=collect", *env, out, "collect.episodes_per_task=2", f"collect.path={tmp_path}/demos"))
    sizes = ["actor.micro_batch_size=8", "runner.max_steps=2", "runner.val_check_interval=-1"]
    few = ["env.eval.episodes_per_task=1", "env.eval.total_num_envs=4", "env.eval.max_episode_steps=16"]
    run(config_of("task=embodied_sft", *env, out, *sizes, *few, f"data.path={tmp_path}/demos"))
    [found] = (
        (tmp_path / "sft_two").rglob("eval.json") if (tmp_path / "sft_two").exists() else tmp_path.rglob("eval.json")
    )
    content = json.loads(found.read_text())
    assert [row["suite"] for row in content["per_suite"]] == ["easy", "hard"]
