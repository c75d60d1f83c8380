"""Pushing a drawer that moves as the test says; the hand is where it should be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from embodied_rl.envs.libero.expert import articulation
from embodied_rl.envs.libero.expert.geometry import Boxes, Vector, pointing_down
from embodied_rl.envs.libero.expert.skills import Arm, Skill
from embodied_rl.envs.libero.expert.world import Frame


class Drawer:
    """A world of one slide along y, half a metre long."""

    position = 0.0
    hand = Frame(position=np.zeros(3), rotation=pointing_down(0.0))

    def joint(self, name: str) -> float:
        return self.position

    def joint_range(self, name: str) -> tuple[float, float]:
        return 0.0, 0.5

    def joint_axis(self, name: str) -> tuple[Vector, Vector]:
        return np.zeros(3), np.array([0.0, 1.0, 0.0])

    def is_hinge(self, name: str) -> bool:
        return False

    def link_shape(self, name: str) -> Boxes:
        return Boxes(centers=np.zeros((1, 3)), rotations=np.eye(3)[None], half_sizes=np.full((1, 3), 0.05))

    def surroundings_of_link(self, name: str) -> Boxes:
        return self.link_shape(name).only(np.array([False]))


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    def approach(arm: Arm, at: Vector, rotation: Vector) -> Skill:
        return True
        yield

    monkeypatch.setattr(articulation, "approach", approach)


@pytest.mark.parametrize(
    ("skill", "millimetres", "opened"),
    [
        (articulation.push, 0.9, True),
        (articulation.pull, 0.9, True),
        (articulation.push, 0.0, False),
        (articulation.pull, 0.0, False),
    ],
)
@pytest.mark.usefixtures("arrived")
def test_slow_motion_is_no_slip(skill: Callable[..., Skill], millimetres: float, opened: bool) -> None:
    """Less than a millimetre a step adds up; no motion at all means that the fingers have slipped off."""
    world, arm = Drawer(), Arm()
    arm.see(world)  # type: ignore[arg-type]

    def watched() -> Skill:
        outcome.append((yield from skill(arm, "drawer", 1.0, lambda: world.position > 0.05)))
        return True

    outcome: list[bool] = []
    for _ in zip(range(150), watched(), strict=False):
        world.position += millimetres / 1000
    assert outcome == [opened]
