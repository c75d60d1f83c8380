from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.envs.libero.expert.geometry import CLOSE, OPEN, Command, Vector, about, action_toward, steps_to

DOWN = np.diag([1.0, -1.0, -1.0])


def action(to: list[float], *, rotation: Vector = DOWN, velocity: list[float] | None = None) -> Vector:
    command = Command(position=np.array(to), rotation=rotation, gripper=CLOSE)
    return action_toward(command, np.zeros(3), DOWN, np.array(velocity or [0.0, 0.0, 0.0]))


def test_an_action_points_to_the_target_and_brakes() -> None:
    # 3 * 5 mm / 5 cm; moving on at 2.5 mm a step takes 4 * 2.5 mm / 5 cm off.
    assert np.allclose(action([0.005, 0.0, -0.005]), [0.3, 0, -0.3, 0, 0, 0, CLOSE])
    assert np.allclose(action([0.005, 0.0, -0.005], velocity=[0.0025, 0.0, 0.0]), [0.1, 0, -0.3, 0, 0, 0, CLOSE])


def test_actions_are_bounded() -> None:
    turned = about(np.array([0.0, 0.0, 1.0]), 1.5) @ DOWN
    assert np.allclose(action([1.0, -1.0, 0.0], rotation=turned), [1, -1, 0, 0, 0, 1, CLOSE])


def test_a_turn_is_about_the_world_axes() -> None:
    # 2 * 0.1 rad / 0.5 rad, about the vertical although the hand points down.
    turned = about(np.array([0.0, 0.0, 1.0]), 0.1) @ DOWN
    assert np.allclose(action([0.0, 0.0, 0.0], rotation=turned), [0, 0, 0, 0, 0, 0.4, CLOSE])


@pytest.mark.parametrize(("move", "turn", "expected"), [([0.105, -0.02, 0], 0.0, 10), ([0.0105, 0, 0], -0.65, 10)])
def test_steps_of_a_motion(move: list[float], turn: float, expected: float) -> None:
    assert steps_to(np.array(move), turn) == pytest.approx(expected)


def test_the_gripper_command_is_passed_on() -> None:
    command = Command(position=np.zeros(3), rotation=DOWN, gripper=OPEN)
    assert action_toward(command, np.zeros(3), DOWN, np.zeros(3)).tolist() == [0, 0, 0, 0, 0, 0, OPEN]
