"""Where something with a handle gets in: a box that is open to one side, a mug made of two boxes; no simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied_rl.envs.libero.expert.geometry import Boxes, Vector, about, pointing_down
from embodied_rl.envs.libero.expert.insertion import find_insertion
from embodied_rl.envs.libero.expert.world import Frame, Goal, Region

UPRIGHT = np.eye(3)
ON_ITS_SIDE = about(np.array([0.0, 1.0, 0.0]), np.pi / 2)
"""The handle down."""
INTO = Goal(predicate="in", subject="mug", target="inside")


def boxes(*middles_and_halves: tuple[tuple[float, float, float], tuple[float, float, float]]) -> Boxes:
    middles, halves = (np.array(values) for values in zip(*middles_and_halves, strict=True))
    return Boxes(centers=middles, rotations=np.broadcast_to(np.eye(3), (len(middles), 3, 3)), half_sizes=halves)


def world_with(mug: Vector, *, roof: bool = True, handle: bool = True) -> Any:
    """A box of 24 by 20 by 16 cm around (0, 0.4, 0.08), open towards -y; the mug at the origin, its handle along x."""
    walls = [((0.0, 0.51, 0.08), (0.12, 0.01, 0.08)), ((-0.13, 0.4, 0.08), (0.01, 0.1, 0.08))]
    walls += [((0.13, 0.4, 0.08), (0.01, 0.1, 0.08)), ((0.0, 0.4, -0.01), (0.12, 0.1, 0.01))]
    walls += [((0.0, 0.4, 0.17), (0.12, 0.1, 0.01))] if roof else []
    parts = [((0.0, 0.0, 0.0), (0.04, 0.04, 0.05))] + ([((0.06, 0.0, 0.0), (0.005, 0.008, 0.03))] if handle else [])
    shape = boxes(*parts)
    shape = Boxes(centers=shape.centers @ mug.T, rotations=mug @ shape.rotations, half_sizes=shape.half_sizes)
    around = boxes(*walls)
    middle = np.array([0.0, 0.4, 0.08])
    region = Region(frame=Frame(position=middle, rotation=np.eye(3)), half_size=np.full(3, 0.07), owner="box")
    return SimpleNamespace(
        is_region=lambda name: True,
        region=lambda name: region,
        surroundings=lambda *without: around,
        shape=lambda name: shape,
        frame=lambda name: Frame(position=np.zeros(3), rotation=mug),
        hand=Frame(position=np.array([0.0, 0.0, 0.3]), rotation=pointing_down(np.pi / 2)),
    )


@pytest.mark.parametrize("yaw", [0.0, 0.6, -1.5])
def test_the_hand_takes_the_handle_and_points_at_the_body(yaw: float) -> None:
    found = find_insertion(world_with(about(np.array([0.0, 0.0, 1.0]), yaw)), INTO)
    assert found is not None
    assert found.inward == pytest.approx([0.0, 1.0, 0.0])
    assert found.floor == pytest.approx(0.0)
    outward = np.array([np.cos(yaw), np.sin(yaw), 0.0])
    assert found.grasp.position @ outward == pytest.approx(0.055, abs=0.005), "1 cm past its outer part"
    pointing = found.grasp.rotation[:, 2]
    assert pointing @ outward < -0.7 and pointing[2] < -0.2, "inwards and down"
    assert abs(found.grasp.rotation[:, 0] @ outward) < 1e-6, "the fingers close across the handle"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("mug", "options"),
    [
        pytest.param(ON_ITS_SIDE, {}, id="it has fallen over"),
        pytest.param(UPRIGHT, {"roof": False}, id="open above"),
        pytest.param(UPRIGHT, {"handle": False}, id="no handle"),
    ],
)
def test_there_is_no_such_way(mug: Vector, options: dict[str, bool]) -> None:
    assert find_insertion(world_with(mug, **options), INTO) is None
