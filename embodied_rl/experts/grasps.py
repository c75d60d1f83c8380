"""Where the gripper can take hold of an object, the quickest place first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied_rl.experts.categories import Facts
from embodied_rl.experts.controller import SPEED, steps_to
from embodied_rl.experts.geometry import (
    FINGERTIP,
    GRIPPER_OUTLINE,
    Boxes,
    Vector,
    nearest_half_turn,
    pointing_down,
    rotation_vector,
    tilt_of,
)

_ANGLES = 32
_MAX_WIDTH = 0.074
"""Metres between the open fingers, less a little."""
_BLOCKED = 25.0
"""Steps that a way round is worth, for each point of the gripper's outline inside something."""
_DEPTHS = ((1.0, 0.0), (0.7, 4.0), (0.45, 8.0))
"""Shares of the usual depth at which a rim can be taken where the palm has no room, and their penalties in steps."""
_GROUND = 0.002
"""Metres between the fingertips and what the object stands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grasp:
    """The grip site's pose when the fingers close."""

    position: Vector
    """[3]."""
    rotation: Vector
    """[3,3]."""
    cost: float
    """Control steps to get there and on, with a penalty for obstacles."""


def find_grasps(
    shape: Boxes, frame: Vector, facts: Facts, surroundings: Boxes, position: Vector, rotation: Vector, goal: Vector
) -> list[Grasp]:
    """Candidates, best first.

    Args:
        shape: the object's boxes.
        frame: [3,3], the axes of the object.
        surroundings: all boxes, the object's too.
        position: [3], of the hand now.
        rotation: [3,3], of the hand now.
        goal: [3], where the object's middle shall go.
    """
    places = _rim(shape, frame, facts) if facts.grasp == "rim" else _span(shape, facts)
    center = (shape.low + shape.high) / 2
    near = surroundings.near(center, 0.3)
    grasps = []
    for at, turned, detour in places:
        reached = nearest_half_turn(turned, rotation)
        blocked = near.near(at, 0.15).containing(at + GRIPPER_OUTLINE @ reached.T, margin=0.001)
        move, onward = at - position, goal - center
        cost = steps_to(move, np.linalg.norm(rotation_vector(reached @ rotation.T)))
        # The plain distances decide among places that take as many steps: the way round is the longer one.
        cost += steps_to(onward, 0.0) + 0.5 * float(np.abs(move)[:2].sum()) / SPEED
        grasps.append(Grasp(position=at, rotation=reached, cost=cost + detour + _BLOCKED * blocked))
    return sorted(grasps, key=lambda grasp: grasp.cost)


_Place = tuple[Vector, Vector, float]
"""Position [3] and rotation [3,3] of the grip site, and a penalty in steps."""


def _span(shape: Boxes, facts: Facts) -> list[_Place]:
    corners, low, high = shape.corners, shape.low, shape.high
    places, widths = [], []
    for angle in np.arange(_ANGLES) * np.pi / _ANGLES:
        across = np.array([np.cos(angle), np.sin(angle)])
        along = np.array([-across[1], across[0]])
        u, v = corners[:, :2] @ across, corners[:, :2] @ along
        position = np.empty(3)
        position[:2] = across * (u.min() + u.max()) / 2 + along * (v.min() + v.max()) / 2
        position[2] = max((low[2] + high[2]) / 2, high[2] - facts.depth, low[2] + FINGERTIP + _GROUND)
        places.append((position, pointing_down(float(angle)), 0.0))
        widths.append(np.ptp(u))
    # Only near the narrowest does the object turn into the fingers rather than out of them.
    limit = min(max(_MAX_WIDTH, min(widths) + 0.001), min(widths) + 0.012)
    return [place for place, width in zip(places, widths, strict=True) if width <= limit]


def _rim(shape: Boxes, frame: Vector, facts: Facts) -> list[_Place]:
    tilt = tilt_of(frame)
    center = (shape.low + shape.high) / 2
    corners = (shape.corners - center) @ tilt  # Seen from the vessel, whose rim is level there.
    direction = np.arctan2(corners[:, 1], corners[:, 0])
    places = []
    for angle in np.arange(_ANGLES) * 2 * np.pi / _ANGLES:
        sector = corners[np.abs((direction - angle + np.pi) % (2 * np.pi) - np.pi) < 0.25]
        if len(sector) == 0:
            continue
        top = sector[:, 2].max()
        radii = np.linalg.norm(sector[sector[:, 2] > top - 0.01, :2], axis=1)
        radius = (radii.min() + radii.max()) / 2
        for share, detour in _DEPTHS:
            local = np.array([radius * np.cos(angle), radius * np.sin(angle), top - share * facts.depth])
            places.append((center + tilt @ local, tilt @ pointing_down(float(angle)), detour))
    return places
