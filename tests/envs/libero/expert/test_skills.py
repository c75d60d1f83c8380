"""Skills with a hand that answers as it likes: no simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied_rl.envs.libero.expert.geometry import Boxes, pointing_down
from embodied_rl.envs.libero.expert.pick_and_place import Placement
from embodied_rl.envs.libero.expert.skills import Arm, carry
from embodied_rl.envs.libero.expert.world import Frame

NOTHING = Boxes(centers=np.zeros((0, 3)), rotations=np.zeros((0, 3, 3)), half_sizes=np.zeros((0, 3)))


def world_with(hand: np.ndarray) -> Any:
    """An object of 4 cm hangs 3 cm below the hand."""
    held = hand - [0.0, 0.0, 0.03]
    shape = Boxes(centers=held[None], rotations=np.eye(3)[None], half_sizes=np.full((1, 3), 0.02))
    return SimpleNamespace(
        hand=Frame(position=hand, rotation=pointing_down(0.0)),
        frame=lambda name: Frame(position=held, rotation=np.eye(3)),
        shape=lambda name: shape,
        surroundings=lambda *without: NOTHING,
    )


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_hand_that_is_jammed_above_the_place_lets_go_soon(noise: float) -> None:
    """Also where noise keeps it from being still: what would imitate it must not learn to wait there."""
    generator, arm = np.random.default_rng(0), Arm()
    at = np.array([0.0, 0.0, 0.09])  # the object's lower side is 4 cm above its place
    arm.see(world_with(at))
    skill = carry(arm, "mug", Placement(spot=np.zeros(2), turn=0.0, support=0.0), lambda: False)
    steps = 0
    for command in skill:
        assert command.position[2] < at[2] - 0.03, "it presses down"
        arm.see(world_with(at + generator.normal(0.0, 1.0, 3) * [noise, noise, noise / 4]))
        steps += 1
    assert 5 < steps < 30
