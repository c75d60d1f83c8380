"""Drawers, doors and levers: closed fingers push a part along its joint, or drag it by its handle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from embodied_rl.envs.libero.expert.geometry import (
    CLOSE,
    FINGERTIP,
    GRIPPER_OUTLINE,
    Command,
    Vector,
    about,
    nearest_half_turn,
)
from embodied_rl.envs.libero.expert.skills import Arm, Skill, approach, retreat, straight
from embodied_rl.envs.libero.expert.world import World

_TOP = 0.02
"""Metres below a part's top within which its shape is what the fingers push."""
_DEPTH = 0.014
"""Metres that the grip site is below the top, ..."""
_DEEP = 0.018
"""... and that it is for a part's whole way, at its end."""
_FINGER = 0.012
"""Metres from the grip site to the side of the closed fingers that pushes."""
_OUTER = 0.85
"""The point at which a door or lever is pushed, as a share of its length, ..."""
_FROM_END = 0.02
"""... and metres that it is from the end at least: the knob of a stove has but 5 cm, and a hand comes within one."""
_BACK = 0.025
"""Metres before the contact at which the approach ends."""
_AHEAD = 0.07
"""Metres that the hand's target is ahead of the contact."""
_AHEAD_TURN = 0.5
"""Radians that it is ahead at most: farther round a short lever it would push across it."""
_LEANS = (0.4, 0.8, 0.0)
"""Radians by which the hand may lean back from what it pushes against, so that the forearm stays clear of it."""
_ABOVE = 0.016
"""Metres above a handle at which the approach ends: from 0 to 0.03 the fingers come down on it."""
_IN_FRONT = 0.06
"""Metres before it from where the fingers come, since another handle may be above it."""
_BEHIND = 0.011
"""Metres from its middle to where they press, half way between falling off its front and off its back."""
_TOUCHING = 0.004
"""Metres above it at which they touch it."""
_STRAIGHT = 15
"""Control steps for the last centimetres."""
_TOUCHED = 0.004
"""Metres from their end at which they are over."""
_PRESS = 0.03
"""Metres that the hand's target is below a handle's top: what it presses with."""
_DRAG = 0.02
"""Metres that it is ahead, less than would slip."""
_MOVED = 0.001
"""Metres or radians that count as motion of a joint."""
_IDLE = 15
"""Control steps without such motion after which the fingers have slipped off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """The way of a point on a part that a joint moves."""

    contact: Vector
    """[3], the point."""
    direction: Vector
    """[3], where it goes at first."""
    anchor: Vector
    """[3], on the joint's axis."""
    axis: Vector
    """[3], so that positive ways are those wanted."""
    hinge: bool

    def after(self, way: float) -> tuple[Vector, Vector]:
        """The point and its direction after ``way`` (rad or m)."""
        if not self.hinge:
            return self.contact + way * self.axis, self.direction
        turn = about(self.axis, way)
        return self.anchor + turn @ (self.contact - self.anchor), turn @ self.direction

    @property
    def reach(self) -> float:
        """Metres that the point goes for a rad or m of the joint."""
        return float(np.linalg.norm((self.contact - self.anchor)[:2])) if self.hinge else 1.0


def push(arm: Arm, joint: str, toward: float, done: Callable[[], bool], *, at_end: bool = False) -> Skill:
    """Push a joint's part to greater (``toward`` 1) or lesser (-1) positions with closed fingers until ``done``.

    Args:
        at_end: at the end of a door or knob, where it takes the least force. Otherwise farther in, where it matters
            least if the hand is off.
    """
    world = arm.world
    start, path = world.joint(joint), _path(world, joint, toward, _contact_at_end if at_end else _contact)
    contact, direction = path.contact, path.direction
    end, _ = path.after(abs(_left(world, joint, start, toward)))
    rotation = _stance(world, joint, direction, end - direction * _FINGER)
    ready = yield from approach(arm, contact - direction * (_FINGER + _BACK), rotation)
    furthest, idle = 0.0, 0 if ready else _IDLE
    while idle < _IDLE:
        if done():
            return True
        way = (arm.world.joint(joint) - start) * toward
        furthest, idle = (way, 0) if way > furthest + _MOVED else (furthest, idle + 1)
        point, along = path.after(way + min(_AHEAD / path.reach, _AHEAD_TURN))
        yield Command(position=point - along * _FINGER, rotation=rotation, gripper=CLOSE)
    yield from retreat(arm)
    return False


def pull(arm: Arm, joint: str, toward: float, done: Callable[[], bool]) -> Skill:
    """The same against the way that the part is faced: press on its handle from above and drag it along.

    Friction does it, since no finger fits behind the handles of LIBERO's drawers, whose joints resist by damping alone.
    """
    world = arm.world
    start, path = world.joint(joint), _path(world, joint, toward, _handle)
    rotation = _stance(world, joint, -path.direction, path.contact + np.array([0.0, 0.0, FINGERTIP]))
    tip = rotation[:, 2] * FINGERTIP
    above = path.contact - tip + np.array([0.0, 0.0, _ABOVE])
    before = above if path.hinge else above + path.direction * _IN_FRONT
    if not (yield from approach(arm, before, rotation)):
        yield from retreat(arm)
        return False
    yield from straight(arm, above, rotation, CLOSE, within=_TOUCHED, patience=_STRAIGHT)
    furthest, idle = 0.0, 0
    while idle < _IDLE:
        if done():
            yield from retreat(arm)
            return True
        way = (arm.world.joint(joint) - start) * toward
        furthest, idle = (way, 0) if way > furthest + _MOVED else (furthest, idle + 1)
        pressing = arm.world.hand.position[2] < path.contact[2] - tip[2] + _TOUCHING
        point, _ = path.after(way + (_DRAG / path.reach if pressing else 0.0))
        yield Command(position=point - tip - [0.0, 0.0, _PRESS], rotation=rotation, gripper=CLOSE)
    yield from retreat(arm)
    return False


def _path(
    world: World, joint: str, toward: float, touch: Callable[[World, str, Vector, Vector], tuple[Vector, Vector]]
) -> _Path:
    anchor, axis = world.joint_axis(joint)
    contact, direction = touch(world, joint, anchor, axis * toward)
    return _Path(contact=contact, direction=direction, anchor=anchor, axis=axis * toward, hinge=world.is_hinge(joint))


def _left(world: World, joint: str, position: float, toward: float) -> float:
    low, high = world.joint_range(joint)
    return (high if toward > 0 else low) - position


def _contact_at_end(world: World, joint: str, anchor: Vector, axis: Vector) -> tuple[Vector, Vector]:
    return _contact(world, joint, anchor, axis, from_end=0.0, depth=_DEEP)


def _contact(
    world: World, joint: str, anchor: Vector, axis: Vector, *, from_end: float = _FROM_END, depth: float = _DEPTH
) -> tuple[Vector, Vector]:
    """The point [3] that the fingers touch and the direction [3] in which they push it."""
    shape = world.link_shape(joint)
    boxes = shape.corners.reshape(-1, 8, 3)
    if world.is_hinge(joint):
        corners = boxes[boxes[..., 2].max(axis=1) > boxes[..., 2].max() - _TOP].reshape(-1, 3)
        arm = (corners - anchor) * [1, 1, 0]
        far = arm[np.argmax(np.linalg.norm(arm, axis=1))]
        # The far end's middle: corners come in pairs at both sides of a door or lever.
        end = arm[np.linalg.norm(arm, axis=1) > 0.9 * np.linalg.norm(far)].mean(axis=0)
        outward = end / np.linalg.norm(end)
        direction = np.cross(axis, outward).astype(np.float64)
        behind = ((corners - anchor) @ direction)[arm @ outward > 0.5 * np.linalg.norm(far)].min()
        length = float(np.linalg.norm(end))
        point = anchor + outward * min(_OUTER * length, length - from_end) + direction * behind
        return np.array([*point[:2], corners[:, 2].max() - depth]), direction
    behind = boxes.reshape(-1, 3) @ axis
    face = boxes[(boxes @ axis).min(axis=1) < behind.min() + 0.003].reshape(-1, 3)
    middle = (face.min(axis=0) + face.max(axis=0)) / 2
    return middle + axis * float(behind.min() - middle @ axis), axis


def _handle(world: World, joint: str, anchor: Vector, axis: Vector) -> tuple[Vector, Vector]:
    """The middle [3] of the handle's top and the direction [3] in which it is dragged: a handle is what stands out."""
    shape = world.link_shape(joint)
    boxes, direction = shape.corners.reshape(-1, 8, 3), axis
    if world.is_hinge(joint):
        direction = np.cross(axis, (shape.low + shape.high) / 2 - anchor)
        direction /= np.linalg.norm(direction)
    ahead = (boxes @ direction).max(axis=1)
    corners = boxes[ahead > ahead.max() - 0.003].reshape(-1, 3)
    low, high = corners.min(axis=0), corners.max(axis=0)
    # Behind the middle: what slips off there falls between the handle and the part.
    return np.array([*(low + high)[:2] / 2, high[2]]) - direction * _BEHIND, direction


def _stance(world: World, joint: str, direction: Vector, at: Vector) -> Vector:
    """[3,3], the hand's turn: the thin side of the fingers ahead, with the first lean that fits ``at`` [3], where the
    part is touched."""
    across = np.cross([0.0, 0.0, 1.0], direction)
    down = np.stack([across, np.cross([0.0, 0.0, -1.0], across), [0.0, 0.0, -1.0]], axis=1)
    upright = nearest_half_turn(down, world.hand.rotation)
    fixed = world.surroundings_of_link(joint)
    counts = []
    for lean in _LEANS:
        rotation = about(across, -lean) @ upright
        counts.append(np.sum(fixed.near(at, 0.3).clearance(at + GRIPPER_OUTLINE @ rotation.T) < 0.002))
        if counts[-1] == 0:
            return rotation
    return about(across, -_LEANS[int(np.argmin(counts))]) @ upright
