"""A robot that does nothing earns nothing: every dense reward level counts from the episode's start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import pytest

from embodied_rl.envs.base import SimEnv
from embodied_rl.envs.dummy import DummyEnv, DummyParams
from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams, _scenes
from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams
from embodied_rl.envs.robosuite import RobosuiteEnv, RobosuiteParams

STILL = 0.003
"""What objects that come to rest may earn in a second: LIBERO's bowls slide a little on what they stand on."""


@pytest.fixture(scope="module", autouse=True)
def free_scenes() -> Iterator[None]:
    yield
    _scenes.clear()


def libero(suite: str, *rewards: Literal["progress", "subgoals"]) -> list[SimEnv]:
    """An env for each reward; they share their scenes."""
    pytest.importorskip("libero", reason="the libero extra is not installed")
    return [
        LiberoEnv(1, LiberoParams(task_suite_name=suite, cameras=(), reward=reward, max_cached_scenes=1), seed=0)
        for reward in rewards
    ]


def libero_spatial(suite: str) -> list[SimEnv]:
    return libero(suite, "progress")


def libero_10(suite: str) -> list[SimEnv]:
    return libero(suite, "progress", "subgoals")


def robosuite(task: str) -> list[SimEnv]:
    pytest.importorskip("robosuite", reason="the robosuite extra is not installed")
    return [RobosuiteEnv(1, RobosuiteParams(task=task), seed=0)]


def maniskill(task: str) -> list[SimEnv]:
    pytest.importorskip("mani_skill", reason="the maniskill extra is not installed")
    return [ManiSkillEnv(1, ManiSkillParams(env_id=task), seed=0)]


def dummy(task: str) -> list[SimEnv]:
    return [DummyEnv(1, DummyParams(), seed=0)]


FEW = [0, 1]
EVERY_TASK = [50 * task + trial for task in range(10) for trial in range(0, 50, 13)]


@pytest.mark.parametrize(
    ("make", "task", "states"),
    [
        (dummy, "", FEW),
        (libero_10, "libero_10", [0, 100, 400, 401]),
        pytest.param(libero_10, "libero_10", EVERY_TASK, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(libero_spatial, "libero_spatial", EVERY_TASK, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        *((robosuite, task, FEW) for task in ("Lift", "Stack", "Door", "PickPlaceCan")),
        *((maniskill, task, FEW) for task in ("PushCube-v1", "PickCube-v1", "StackCube-v1")),
    ],
)
def test_idling_pays_nothing(make: Callable[[str], list[SimEnv]], task: str, states: Sequence[int]) -> None:
    envs = make(task)
    idle = np.zeros((1, envs[0].action_dim), dtype=np.float32)
    earned = {}
    for state in states:
        for number, env in enumerate(envs):
            env.reset([0], [state])
            earned[state, number] = max(abs(float(env.step([0], idle).rewards[0])) for _ in range(20))
    for env in envs:
        env.close()
    assert {key: level for key, level in earned.items() if level > STILL} == {}
