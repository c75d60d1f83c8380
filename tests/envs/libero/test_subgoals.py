from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams, _scenes
from embodied_rl.envs.libero.subgoals import SubGoals, nearness

pytest.importorskip("libero", reason="the libero extra is not installed")

from embodied_rl.envs.libero.expert import LiberoExpert

IN_BASKET, STOVE_AND_POT, BOWL_IN_DRAWER = 0, 2, 3
"""Tasks of libero_10."""
CLOSE_AND_PUT_ON_TOP = 1
"""Of libero_90."""
SHUT = 0.001
"""Metres: 0 does not count as closed."""


@pytest.fixture(scope="module", autouse=True)
def free_scenes() -> Iterator[None]:
    yield
    _scenes.clear()


def env_at(task: int, suite: str = "libero_10") -> LiberoEnv:
    params = LiberoParams(task_suite_name=suite, cameras=(), reward="subgoals")
    env = LiberoEnv(1, params, seed=0)
    env.reset([0], [50 * task])
    return env


def moved(simulation: Any, joint: str, position: float) -> None:
    simulation.sim.data.set_joint_qpos(joint, position)
    simulation.sim.forward()


def carried(simulation: Any, name: str, to: np.ndarray) -> None:
    """An object's origin is at ``to`` [3]."""
    pose = simulation.sim.data.get_joint_qpos(f"{name}_joint0").copy()
    pose[:3] = to
    simulation.sim.data.set_joint_qpos(f"{name}_joint0", pose)
    simulation.sim.forward()


def position(simulation: Any, name: str) -> np.ndarray:
    return simulation.sim.data.body_xpos[simulation.obj_body_id[name]].copy()


def hand_of(simulation: Any) -> np.ndarray:
    return simulation.sim.data.site_xpos[simulation.robots[0].eef_site_id]


def test_nearness_by_hand() -> None:
    assert nearness(0.0) == 1.0
    assert nearness(0.1) == pytest.approx(1 - (0.761594 + 0.197375) / 2, abs=1e-6)
    assert nearness(np.inf) == 0.0


@given(near=st.floats(0.0, 0.9), farther=st.floats(0.01, 0.1))
def test_every_centimetre_nearer_pays(near: float, farther: float) -> None:
    assert nearness(near) - nearness(near + farther) > 1e-4


def test_level_by_hand() -> None:
    """Two objects that nobody holds: the hand's nearness to the nearer one, and that of each to the basket."""
    env = env_at(IN_BASKET)
    simulation = env.privileged(0)
    basket = simulation.sim.data.get_site_xpos("basket_1_contain_region")
    objects = [position(simulation, name) for name in ("alphabet_soup_1", "tomato_sauce_1")]
    reach = min(np.linalg.norm(hand_of(simulation) - at) for at in objects)
    place = [0.4 * nearness(float(np.linalg.norm(at - basket))) for at in objects]
    assert SubGoals(simulation).level() == pytest.approx((sum(place) + 0.2 * nearness(float(reach))) / 2)
    env.close()


def test_the_second_object_draws_the_hand_from_afar() -> None:
    env = env_at(IN_BASKET)
    simulation = env.privileged(0)
    level = SubGoals(simulation)
    carried(simulation, "alphabet_soup_1", simulation.sim.data.get_site_xpos("basket_1_contain_region"))
    sauce = position(simulation, "tomato_sauce_1")
    assert simulation._eval_predicate(["in", "alphabet_soup_1", "basket_1_contain_region"])

    def at(distance: float) -> float:
        carried(simulation, "tomato_sauce_1", hand_of(simulation) + np.array([distance, 0.0, 0.0]))
        return level.level() - 0.4 * nearness(apart()) / 2

    def apart() -> float:
        basket = simulation.sim.data.get_site_xpos("basket_1_contain_region")
        return float(np.linalg.norm(position(simulation, "tomato_sauce_1") - basket))

    assert at(0.4) == pytest.approx(0.5 + 0.1 * nearness(0.4), abs=1e-6)
    assert at(0.3) - at(0.4) > 0.005
    carried(simulation, "tomato_sauce_1", sauce)
    env.close()


def test_a_lifted_object_pays() -> None:
    """The expert's grasp: both fingers touch the bowl, and once it is in the air nothing else does."""
    env = env_at(BOWL_IN_DRAWER)
    expert = LiberoExpert(env)
    expert.reset(0)
    level = SubGoals(env.privileged(0))

    def grasped() -> float:
        """What is left without nearness; the drawer does not count yet."""
        simulation = env.privileged(0)
        bowl, drawer = position(simulation, "akita_black_bowl_1"), "white_cabinet_1_bottom_region"
        apart = float(np.linalg.norm(bowl - simulation.sim.data.get_site_xpos(drawer)))
        reach = float(np.linalg.norm(bowl - hand_of(simulation)))
        return 2 * level.level() - 0.4 * nearness(apart) - 0.2 * nearness(reach)

    start, counts = position(env.privileged(0), "akita_black_bowl_1")[2], []
    while position(env.privileged(0), "akita_black_bowl_1")[2] < start + 0.03:
        env.step([0], expert.act(0, None)[None])
        counts.append(grasped())
    env.close()
    assert counts[0] == pytest.approx(0.0, abs=1e-9)
    assert counts[-1] == pytest.approx(0.2)
    steps = [round(count, 6) for count in counts]
    assert 0.1 in steps and steps.index(0.1) < steps.index(0.2)


def test_a_drawer_counts_by_its_way_once_the_bowl_is_in_it() -> None:
    env = env_at(BOWL_IN_DRAWER)
    simulation = env.privileged(0)
    level, joint = SubGoals(simulation), "white_cabinet_1_bottom_level"
    opened = float(simulation.sim.data.get_joint_qpos(joint))
    before = level.level()
    moved(simulation, joint, SHUT)
    assert simulation._eval_predicate(["close", "white_cabinet_1_bottom_region"])
    assert level.level() < before + 0.05, "closed before it is filled"
    moved(simulation, joint, opened)
    carried(simulation, "akita_black_bowl_1", simulation.sim.data.get_site_xpos("white_cabinet_1_bottom_region"))
    filled = level.level()
    assert 0.5 < filled < 0.7
    moved(simulation, joint, opened / 2)
    carried(simulation, "akita_black_bowl_1", simulation.sim.data.get_site_xpos("white_cabinet_1_bottom_region"))
    assert level.level() > filled + 0.1
    moved(simulation, joint, SHUT)
    carried(simulation, "akita_black_bowl_1", simulation.sim.data.get_site_xpos("white_cabinet_1_bottom_region"))
    assert level.level() == 1.0
    env.close()


def test_a_drawer_that_nothing_goes_into_counts_at_once() -> None:
    """*Close the top drawer of the cabinet and put the black bowl on top of it*."""
    env = env_at(CLOSE_AND_PUT_ON_TOP, "libero_90")
    simulation = env.privileged(0)
    assert sorted(goal[0] for goal in simulation.parsed_problem["goal_state"]) == ["close", "on"]
    level, joint = SubGoals(simulation), "wooden_cabinet_1_top_level"
    before, opened = level.level(), float(simulation.sim.data.get_joint_qpos(joint))
    moved(simulation, joint, opened / 2)
    half = level.level()
    assert half > before + 0.1
    moved(simulation, joint, SHUT)
    assert level.level() > half + 0.1
    env.close()


def test_a_knob_counts_by_its_way() -> None:
    env = env_at(STOVE_AND_POT)
    simulation = env.privileged(0)
    level, (joint,) = SubGoals(simulation), simulation.get_object("flat_stove_1").joints
    low, high = simulation.sim.model._model.joint(joint).range
    off = level.level()
    moved(simulation, joint, low + 0.2 * (high - low))
    assert not simulation._eval_predicate(["turnon", "flat_stove_1"])
    assert level.level() == pytest.approx(off + 0.6 * 0.2 / 2, abs=0.02)
    moved(simulation, joint, high)
    assert level.level() > 0.5
    env.close()
