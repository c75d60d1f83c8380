"""Where the gripper can take hold of an object, the quickest place first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from embodied_rl.envs.libero.expert.categories import Facts
from embodied_rl.envs.libero.expert.controller import SPEED, steps_to
from embodied_rl.envs.libero.expert.geometry import (
    FINGERTIP,
    GRIPPER_OUTLINE,
    Boxes,
    Vector,
    nearest_half_turn,
    pointing_down,
    tilt_of,
    turn_between,
    yaw_of,
)
from embodied_rl.envs.libero.expert.placements import Placement
from embodied_rl.envs.libero.expert.world import Frame

_ANGLES = 48
_MAX_WIDTH = 0.074
"""Metres between the open fingers, less a little."""
_BLOCKED = 25.0
"""Steps that a way round is worth, for each point of the gripper's outline inside something."""
_CLOSE = 2.0
"""The same for points that pass something by less than :data:`_CLEARANCE`."""
_TOUCH = 0.001
_CLEARANCE = 0.008
"""Metres; the hand comes down within a centimetre of where it should."""
_DROP = 200.0
"""Steps that a metre of free fall is worth."""
_CLOSER_LOOK = 32
"""So many candidates are followed up to where the object goes."""
_DEPTHS = ((1.0, 0.0), (0.7, 8.0), (0.45, 25.0))
"""Shares of the usual depth at which a rim can be taken where the palm has no room, and their penalties in steps."""
_ALONG = ((0.0, 0.0), (-0.5, 3.0), (0.5, 3.0), (-0.9, 6.0), (0.9, 6.0))
"""Shares of an object's half length at which it can be taken beside its middle, and their penalties in steps."""
_FINGER_HALF_WIDTH = 0.011
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
    shape: Boxes,
    frame: Frame,
    facts: Facts,
    surroundings: Boxes,
    hand: Frame,
    placement: Placement,
    others: Boxes,
) -> list[Grasp]:
    """Candidates, best first.

    Args:
        shape: the object's boxes.
        frame: where the object is.
        surroundings: all boxes, the object's too.
        hand: where the grip site is.
        placement: where the object shall go.
        others: all boxes but the object's.
    """
    styles = {"rim": _rim, "span": _span, "knob": _knob}
    near = surroundings.near((shape.low + shape.high) / 2, 0.3)
    onward = steps_to(np.array([*placement.spot, frame.position[2]]) - frame.position, placement.turn)
    grasps = []
    for at, turned, detour in styles[facts.grasp](shape, frame.rotation, facts):
        reached = nearest_half_turn(turned, hand.rotation)
        room = near.near(at, 0.15).clearance(at + GRIPPER_OUTLINE @ reached.T)
        blocked, close = np.sum(room < _TOUCH), np.sum((room >= _TOUCH) & (room < _CLEARANCE))
        move = at - hand.position
        cost = steps_to(move, turn_between(reached, hand.rotation))
        # The plain distance decides among places that take as many steps: the way round is the longer one.
        cost += onward + 0.5 * float(np.abs(move)[:2].sum()) / SPEED
        grasps.append(
            Grasp(position=at, rotation=reached, cost=cost + detour + float(_BLOCKED * blocked + _CLOSE * close))
        )
    grasps.sort(key=lambda grasp: grasp.cost)
    low = float(shape.low[2])
    return sorted(
        (_with_drop(grasp, frame.position, low, placement, others) for grasp in grasps[:_CLOSER_LOOK]), key=_cost
    )


def _cost(grasp: Grasp) -> float:
    return grasp.cost


def _with_drop(grasp: Grasp, origin: Vector, low: float, placement: Placement, others: Boxes) -> Grasp:
    """Where the palm finds no room at the end, the object must fall."""
    upright = pointing_down(yaw_of(grasp.rotation))
    *_, drop = placement.hand_above(grasp.position, upright, origin, low, others)
    return replace(grasp, cost=grasp.cost + _DROP * drop)


_Place = tuple[Vector, Vector, float]
"""Position [3] and rotation [3,3] of the grip site, and a penalty in steps."""


def _span(shape: Boxes, _: Vector, facts: Facts) -> list[_Place]:
    corners, low, high = shape.corners, shape.low, shape.high
    places, widths = [], []
    for angle in np.arange(_ANGLES // 2) * 2 * np.pi / _ANGLES:
        across = np.array([np.cos(angle), np.sin(angle)])
        along = np.array([-across[1], across[0]])
        u, v = corners[:, :2] @ across, corners[:, :2] @ along
        height = max((low[2] + high[2]) / 2, high[2] - facts.depth, low[2] + FINGERTIP + _GROUND)
        for share, detour in _ALONG:
            aside = share * max(np.ptp(v) / 2 - _FINGER_HALF_WIDTH, 0.0)
            xy = across * (u.min() + u.max()) / 2 + along * ((v.min() + v.max()) / 2 + aside)
            places.append((np.array([*xy, height]), pointing_down(float(angle)), detour))
            widths.append(np.ptp(u))
    # Only near the narrowest does the object turn into the fingers rather than out of them.
    limit = min(max(_MAX_WIDTH, min(widths) + 0.001), min(widths) + 0.012)
    return [place for place, width in zip(places, widths, strict=True) if width <= limit]


def _knob(shape: Boxes, frame: Vector, facts: Facts) -> list[_Place]:
    tops = shape.corners.reshape(-1, 8, 3)[..., 2].max(axis=1)
    return _span(shape.only(tops > tops.max() - 0.005), frame, facts)


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
