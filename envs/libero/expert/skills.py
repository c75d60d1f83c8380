"""Skills of the hand, as generators of :class:`Command`: each is resumed once a control step, with the world as it is
then."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from embodied_rl.envs.libero.expert.geometry import (
    CLOSE,
    FINGERTIP,
    GRIPPER_OUTLINE,
    OPEN,
    Boxes,
    Command,
    Vector,
    about,
    nearest_half_turn,
    pointing_down,
    turn_between,
    yaw_of,
)
from embodied_rl.envs.libero.expert.pick_and_place import Grasp, Placement
from embodied_rl.envs.libero.expert.world import Frame, World

Skill = Generator[Command, None, bool]
"""Yields commands; returns whether it worked."""

_FINGER_REACH = 0.07
"""Metres from the grip site to the outer sides of the open fingers."""
_MARGIN = 0.012
"""Metres between what moves and what it passes over."""
_LOOK_AHEAD = 0.04
"""Metres ahead that must be free before the hand moves sideways."""
_PATIENCE = 150
"""Control steps after which a motion is given up."""
_OVERHANG_REACH = 0.15
"""Metres above a held object in which something may hang over it."""
_SETTLE = 30
"""Control steps that falling objects get."""
_AT_REST = 0.03
"""Metres a second below which objects do not fall or tip over any more."""
_PUSHED = 0.02
"""Metres that an object moves when the hand hits it; a grasp planned before does not fit any more."""
_STUCK = 8
"""Control steps without motion that mean a collision."""
_TOP = 0.02
"""Metres below a part's top within which its shape is what the fingers push."""
_DEPTH = 0.018
"""Metres that the grip site is below the top."""
_FINGER = 0.012
"""Metres from the grip site to the side of the closed fingers that pushes."""
_OUTER = 0.85
"""The point at which a lever is pushed, as a share of its length."""
_BACK = 0.025
"""Metres before the contact at which the approach ends."""
_AHEAD = 0.04
"""Metres that the hand's target is ahead of the contact."""
_LEANS = (0.4, 0.8, 0.0)
"""Radians by which the hand may lean back from what it pushes against, so that the forearm stays clear of it."""
_PUSH_PATIENCE = 80
"""Control steps after which a push is given up."""


class Arm:
    """One slot's hand: the world now, and how fast the hand moves."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._last: Frame | None = None
        self.velocity: Vector = np.zeros(3)
        """Metres in the last control step."""
        self.turning = 0.0
        """Radians in the last control step."""

    @property
    def world(self) -> World:
        assert self._world is not None
        return self._world

    def see(self, world: World) -> None:
        now, last = world.hand, self._last or world.hand
        self.velocity = now.position - last.position
        self.turning = turn_between(now.rotation, last.rotation)
        self._world, self._last = world, now

    @property
    def still(self) -> bool:
        """It hardly moved in the last control step."""
        return bool(np.abs(self.velocity).max() < 0.001 and self.turning < 0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The end of a motion, which may change on the way."""

    position: Vector
    """[3], of the grip site."""
    hang: float
    """Metres from the grip site down to the lowest point of what moves."""
    center: Vector
    """[2], the middle of what moves, less the grip site."""
    radius: float
    """Metres around the middle that must be free."""


def settle(arm: Arm) -> Skill:
    """Wait until nothing falls any more: some of LIBERO's initial states drop objects onto the table."""
    hand = arm.world.hand
    for _ in range(_SETTLE):
        if arm.world.speed() < _AT_REST:
            break
        yield Command(position=hand.position, rotation=hand.rotation, gripper=OPEN)
    return True


def travel(
    arm: Arm,
    aim: Callable[[], Aim],
    rotation: Vector,
    gripper: float,
    obstacles: Boxes,
    *,
    arrived: Callable[[Aim], bool],
    align: float = 0.012,
) -> Skill:
    """Up over what is in the way, across, and straight down at the end. Sideways only where the way ahead is free."""
    still = 0
    for _ in range(_PATIENCE):
        now, hand = aim(), arm.world.hand
        if arrived(now):
            return True
        gap = (now.position - hand.position)[:2]
        distance = float(np.linalg.norm(gap))
        turn = turn_between(rotation, hand.rotation)
        still = still + 1 if arm.still else 0
        if still == _STUCK:
            return False
        target = now.position.copy()
        slack = 0.0
        if distance > align or turn > 0.15:
            middle = hand.position[:2] + now.center
            ahead = middle + gap * min(1.0, _LOOK_AHEAD / max(distance, 1e-6))
            highest = obstacles.top_along(middle, middle + gap, now.radius)
            target[2] = max(highest + now.hang + _MARGIN, now.position[2])
            low = hand.position[2] - now.hang
            if low < obstacles.top_along(middle, ahead, now.radius) + 0.3 * _MARGIN:
                target[:2] = hand.position[:2]
            elif distance > 2 * _LOOK_AHEAD:
                slack = 1.0
        yield Command(position=target, rotation=rotation, gripper=gripper, slack=slack)
    return False


def reach(arm: Arm, name: str, grasp: Grasp) -> Skill:
    """Bring the open gripper to a grasp of the object ``name``. False if it was pushed away."""
    obstacles, origin = arm.world.surroundings(), arm.world.frame(name).position
    aim = Aim(position=grasp.position, hang=FINGERTIP, center=np.zeros(2), radius=_FINGER_REACH)

    def moved() -> bool:
        return bool(np.linalg.norm(arm.world.frame(name).position - origin) > _PUSHED)

    def arrived(_: Aim) -> bool:
        hand = arm.world.hand
        error = np.abs(grasp.position - hand.position)
        turn = turn_between(grasp.rotation, hand.rotation)
        return moved() or bool(error[:2].max() < 0.006 and error[2] < 0.008 and turn < 0.1)

    return (yield from travel(arm, lambda: aim, grasp.rotation, OPEN, obstacles, arrived=arrived)) and not moved()


def close_gripper(arm: Arm, grasp: Grasp) -> Skill:
    """Close until the fingers stop. False if there is nothing between them."""
    last = arm.world.opening
    still = 0
    for step in range(14):
        yield Command(position=grasp.position, rotation=grasp.rotation, gripper=CLOSE)
        opening = arm.world.opening
        still = still + 1 if last - opening < 0.0008 and step >= 2 else 0
        last = opening
        if still == 2:
            break
    return last > 0.003


def carry(arm: Arm, name: str, placement: Placement, done: Callable[[], bool]) -> Skill:
    """Take the held object where it belongs. Ends early as soon as ``done``, or if the object slips."""
    obstacles = arm.world.surroundings(name)
    hand, origin, shape = arm.world.hand, arm.world.frame(name).position, arm.world.shape(name)
    radius = float(np.linalg.norm((shape.high - shape.low)[:2])) / 2 * 0.75
    held_at = float(np.linalg.norm(origin - hand.position))
    upright = pointing_down(yaw_of(hand.rotation))
    end, rotation, _ = placement.hand_above(hand.position, upright, origin, shape.low[2], obstacles)
    yield from _from_below(arm, obstacles.overhang(shape.low, shape.high, _OVERHANG_REACH))

    def aim() -> Aim:
        world = arm.world
        hand, origin, shape = world.hand, world.frame(name).position, world.shape(name)
        hang = hand.position[2] - min(shape.low[2], hand.position[2] - FINGERTIP)
        return Aim(
            position=np.array([*placement.spot + (hand.position - origin)[:2], end[2] - 0.004]),
            hang=hang,
            center=((shape.low + shape.high) / 2 - hand.position)[:2],
            radius=radius,
        )

    def slipped() -> bool:
        distance = np.linalg.norm(arm.world.frame(name).position - arm.world.hand.position)
        return bool(abs(distance - held_at) > 0.03)

    def arrived(now: Aim) -> bool:
        if done() or slipped():
            return True
        error = now.position - arm.world.hand.position
        low = bool(error[2] > -0.006) or bool(error[2] > -0.025 and abs(arm.velocity[2]) < 0.001)
        return low and bool(np.linalg.norm(error[:2]) < 0.015)

    yield from travel(arm, aim, rotation, CLOSE, obstacles, arrived=arrived)
    return not slipped()


def _from_below(arm: Arm, aside: Vector) -> Skill:
    """Pull what is held out from under something, by ``aside`` [2]."""
    if not aside.any():
        return True
    hand = arm.world.hand
    target = hand.position + np.array([*aside, 0.004])
    for step in range(20):
        left = np.linalg.norm((target - arm.world.hand.position)[:2])
        if left < 0.006 or (step > 4 and np.abs(arm.velocity).max() < 0.0015):
            break
        yield Command(position=target, rotation=hand.rotation, gripper=CLOSE)
    return True


def release(arm: Arm) -> Skill:
    """Open the gripper where it is."""
    hand = arm.world.hand
    start = arm.world.opening
    for _ in range(10):
        if arm.world.opening > min(start + 0.02, 0.07):
            break
        yield Command(position=hand.position, rotation=hand.rotation, gripper=OPEN)
    return True


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
    for _ in range(_PUSH_PATIENCE):
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
