"""Pushing what moves on a joint: drawers, doors and levers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from embodied_rl.envs.libero.expert.controller import CLOSE, Command
from embodied_rl.envs.libero.expert.geometry import FINGERTIP, GRIPPER_OUTLINE, Vector, about, nearest_half_turn
from embodied_rl.envs.libero.expert.skills import Aim, Arm, Skill, travel
from embodied_rl.envs.libero.expert.world import World

_TOP = 0.02
"""Metres below a part's top within which its shape is what the fingers push."""
_DEPTH = 0.018
"""Metres that the grip site is below the top."""
_FINGER = 0.012
"""Metres from the grip site to the side of the closed fingers that pushes."""
_OUTER = 0.85
"""Where a lever is pushed, as a share of its length."""
_BACK = 0.025
"""Metres before the contact at which the approach ends."""
_AHEAD = 0.04
"""Metres that the hand's target is ahead of the contact."""
_LEANS = (0.4, 0.8, 0.0)
"""Radians by which the hand may lean back from what it pushes against, so that the forearm stays clear of it."""
_PATIENCE = 80


def push(arm: Arm, joint: str, toward: float, done: Callable[[], bool]) -> Skill:
    """Push a joint's part to greater (``toward`` 1) or lesser (-1) positions with closed fingers until ``done``."""
    world = arm.world
    anchor, axis = world.joint_axis(joint)
    axis = axis * toward
    hinge, start = world.is_hinge(joint), world.joint(joint)
    contact, direction = _contact(world, joint, anchor, axis)

    def moved(way: float) -> tuple[Vector, Vector]:
        """The contact and the direction after ``way`` (rad or m)."""
        if not hinge:
            return contact + way * axis, direction
        turn = about(axis, way)
        return anchor + turn @ (contact - anchor), turn @ direction

    reach = float(np.linalg.norm((contact - anchor)[:2])) if hinge else 1.0
    end, _ = moved(abs(_left(world, joint, start, toward)))
    rotation = _stance(world, joint, direction, end)
    before = contact - direction * (_FINGER + _BACK)
    obstacles = world.surroundings()
    aim = Aim(position=before, hang=FINGERTIP, center=np.zeros(2), radius=0.035)

    def arrived(_: Aim) -> bool:
        return bool(np.abs(before - arm.world.hand.position).max() < 0.012)

    if not (yield from travel(arm, lambda: aim, rotation, CLOSE, obstacles, arrived=arrived)):
        return False
    still = 0
    for _ in range(_PATIENCE):
        if done():
            return True
        way = (arm.world.joint(joint) - start) * toward
        point, along = moved(way + _AHEAD / reach)
        still = still + 1 if np.abs(arm.velocity).max() < 0.0007 else 0
        if still > 8:
            return False
        yield Command(position=point - along * _FINGER, rotation=rotation, gripper=CLOSE)
    return False


def _left(world: World, joint: str, position: float, toward: float) -> float:
    low, high = world.joint_range(joint)
    return (high if toward > 0 else low) - position


def _contact(world: World, joint: str, anchor: Vector, axis: Vector) -> tuple[Vector, Vector]:
    """Where the fingers touch [3] and the direction [3] that they push there."""
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
        point = anchor + outward * _OUTER * np.linalg.norm(end) + direction * behind
        return np.array([*point[:2], corners[:, 2].max() - _DEPTH]), direction
    behind = boxes.reshape(-1, 3) @ axis
    face = boxes[(boxes @ axis).min(axis=1) < behind.min() + 0.003].reshape(-1, 3)
    middle = (face.min(axis=0) + face.max(axis=0)) / 2
    return middle + axis * float(behind.min() - middle @ axis), axis


def _stance(world: World, joint: str, direction: Vector, end: Vector) -> Vector:
    """[3,3], the hand's turn: the thin side of the fingers ahead, with the first lean that fits at the end of the
    push."""
    across = np.cross([0.0, 0.0, 1.0], direction)
    down = np.stack([across, np.cross([0.0, 0.0, -1.0], across), [0.0, 0.0, -1.0]], axis=1)
    upright = nearest_half_turn(down, world.hand.rotation)
    fixed = world.surroundings_of_link(joint)
    counts = []
    for lean in _LEANS:
        rotation = about(across, -lean) @ upright
        at = end - direction * _FINGER
        counts.append(np.sum(fixed.near(at, 0.3).clearance(at + GRIPPER_OUTLINE @ rotation.T) < 0.002))
        if counts[-1] == 0:
            return rotation
    return about(across, -_LEANS[int(np.argmin(counts))]) @ upright
