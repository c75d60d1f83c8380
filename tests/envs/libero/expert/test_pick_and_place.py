from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied_rl.envs.libero.expert.geometry import Boxes, about, pointing_down, yaw_of
from embodied_rl.envs.libero.expert.pick_and_place import Placement, _fitting_turn, find_grasps
from embodied_rl.envs.libero.expert.world import Frame, Goal

BOOK = np.array([[x, y, 0.0] for x in (-0.05, 0.05) for y in (-0.015, 0.015)])
"""Corners [4,3] of a book of 10 by 3 cm."""


@pytest.mark.parametrize(
    ("lies_at", "half", "turn"),
    [
        pytest.param(22.5, (0.0615, 0.0615), 7.5, id="10.4 of 12.3 cm as it lies, 10.2 after a turn"),
        pytest.param(0.0, (0.0615, 0.0615), 0.0, id="it lies well"),
        pytest.param(0.0, (0.02, 0.06), 90.0, id="only a turn lets it in"),
        pytest.param(0.0, (0.02, 0.02), 0.0, id="it never fits"),
    ],
)
def test_a_compartment_leaves_room_where_it_can(lies_at: float, half: tuple[float, float], turn: float) -> None:
    corners = BOOK @ about(np.array([0.0, 0.0, 1.0]), np.radians(lies_at)).T
    assert np.degrees(_fitting_turn(corners, np.array(half))) == pytest.approx(turn)


@pytest.mark.parametrize("askew", [-3.0, 3.0])
@pytest.mark.parametrize(("lies_at", "half", "turn"), [(0.0, (0.015, 0.06), 90.0), (45.0, (0.03, 0.03), 45.0)])
def test_of_two_turns_as_wide_the_left_one_is_taken(
    lies_at: float, half: tuple[float, float], turn: float, askew: float
) -> None:
    """A long box is held across after a quarter turn to either side, a square one that stands on edge after half as
    much. Which of the two is a few degrees shorter nobody can see."""
    lies = about(np.array([0.0, 0.0, 1.0]), np.radians(lies_at + askew))
    size = np.array([[*half, 0.02]])
    box = Boxes(centers=np.array([[0.1, 0.0, 0.02]]), rotations=lies[None], half_sizes=size)
    nothing = Boxes(centers=np.zeros((0, 3)), rotations=np.zeros((0, 3, 3)), half_sizes=np.zeros((0, 3)))
    hand = Frame(position=np.array([0.0, 0.0, 0.3]), rotation=pointing_down(np.pi / 2))
    places = {
        "box": Frame(position=box.centers[0], rotation=lies),
        "plate": Frame(position=np.zeros(3), rotation=np.eye(3)),
    }
    world: Any = SimpleNamespace(
        hand=hand,
        shape=lambda name: box,
        frame=places.__getitem__,
        category=lambda name: name,
        surroundings=lambda without=None: nothing if without else box,
        is_region=lambda name: False,
    )
    best = find_grasps(world, Goal(predicate="on", subject="box", target="plate"))[0]
    turned = (yaw_of(best.rotation) - yaw_of(hand.rotation) + np.pi) % (2 * np.pi) - np.pi
    assert turn - 20 < np.degrees(turned) < turn + 20


@pytest.mark.parametrize(("beside", "falls"), [(0.0, 0.03), (0.05, 0.0)])
def test_fingers_need_room_too(beside: float, falls: float) -> None:
    """A bowl held at its rim goes into a drawer whose front the palm clears and the fingers do not."""
    front = Boxes(
        centers=np.array([[0.0, -0.05 - beside, 0.03]]),
        rotations=np.eye(3)[None],
        half_sizes=np.array([[0.2, 0.005, 0.035]]),
    )
    placement = Placement(spot=np.zeros(2), turn=0.0, support=0.0)
    rim, bowl = np.array([0.3, -0.05, 0.54]), np.array([0.3, 0.0, 0.5])
    position, _, fall = placement.hand_above(rim, pointing_down(np.pi / 2), bowl, 0.5, front)
    assert fall == pytest.approx(falls)
    assert position == pytest.approx([0.0, -0.05, 0.04 + falls])
