"""Skills of the hand, as generators of :class:`Command`: each is resumed once a control step, with the world as it is
then."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from embodied_rl.envs.libero.expert.geometry import (
    CLOSE,
    FINGERTIP,
    OPEN,
    WAY_DOWN,
    Boxes,
    Command,
    Vector,
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
_SLID = 0.005
"""Metres from its place at which an object is there."""
_SLIPPED = 0.055
"""Metres from its middle at which the fingers have left it behind."""
_PRESS = 0.02
"""Metres that the hand's target is below a flat object's top: what it presses with."""
_DRAG = 0.015
"""Metres that it is ahead."""
_RETREAT = 0.12
"""Metres that a jammed hand goes up."""
_RETREAT_PATIENCE = 25
"""Control steps that it has for that."""
_STUCK = 8
"""Control steps without motion that mean a collision."""
_JAMMED = 12
"""Control steps just above its place, no lower than before, after which what is held is let go of."""
_JUST_ABOVE = 0.07
"""Metres."""


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


def reach(arm: Arm, name: str, grasp: Grasp, *, slack: float = 1.0) -> Skill:
    """Bring the open gripper to a grasp of the object ``name``. False if it was pushed away.

    Args:
        slack: so many times less exactly than a grasp asks for, on the way to one.
    """
    obstacles, origin = arm.world.surroundings(), arm.world.frame(name).position
    aim = Aim(position=grasp.position, hang=FINGERTIP, center=np.zeros(2), radius=_FINGER_REACH)

    def moved() -> bool:
        return bool(np.linalg.norm(arm.world.frame(name).position - origin) > _PUSHED)

    def arrived(_: Aim) -> bool:
        hand = arm.world.hand
        error = np.abs(grasp.position - hand.position)
        turn = turn_between(grasp.rotation, hand.rotation)
        near = error[:2].max() < 0.006 * slack and error[2] < 0.008 * slack and turn < 0.1 * slack
        return moved() or bool(near)

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

    lowest, waited = np.inf, 0

    def arrived(now: Aim) -> bool:
        nonlocal lowest, waited
        if done() or slipped():
            return True
        height, error = arm.world.hand.position[2], now.position - arm.world.hand.position
        low = bool(error[2] > -0.006) or bool(error[2] > -0.025 and abs(arm.velocity[2]) < 0.001)
        above = bool(np.linalg.norm(error[:2]) < 0.015)
        # Noise keeps a hand that presses on something from being still.
        pressing = above and error[2] > -_JUST_ABOVE
        lowest, waited = (height, 0) if height < lowest - 0.001 else (lowest, waited + pressing)
        return above and (low or waited > _JAMMED)

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


def approach(arm: Arm, at: Vector, rotation: Vector) -> Skill:
    """Bring closed fingers to a place [3]."""
    aim = Aim(position=at, hang=FINGERTIP, center=np.zeros(2), radius=0.035)

    def arrived(_: Aim) -> bool:
        return bool(np.abs(at - arm.world.hand.position).max() < 0.012)

    return (yield from travel(arm, lambda: aim, rotation, CLOSE, arm.world.surroundings(), arrived=arrived))


def straight(
    arm: Arm,
    at: Vector,
    rotation: Vector,
    gripper: float,
    *,
    within: float,
    patience: int,
    stuck: int | None = None,
) -> Skill:
    """Bring the hand to a place [3] nearby, whatever is between.

    Args:
        within: metres from it, along each axis, that are near enough.
        patience: control steps after which it stays where it is.
        stuck: control steps without motion after which it does so, too.
    """
    still = 0
    for _ in range(patience):
        still = still + 1 if arm.still else 0
        if np.abs(at - arm.world.hand.position).max() < within:
            return True
        if still == stuck:
            return False
        yield Command(position=at, rotation=rotation, gripper=gripper)
    return False


def slide(arm: Arm, name: str, placement: Placement, done: Callable[[], bool]) -> Skill:
    """Press on a flat object with closed fingers and drag it where it belongs, until ``done``."""
    shape = arm.world.shape(name)
    middle = (shape.low + shape.high) / 2
    above = np.array([*middle[:2], shape.high[2] + FINGERTIP])
    rotation = _roomiest(arm, above)
    ready = yield from approach(arm, above, rotation)
    for _ in range(_PATIENCE if ready else 0):
        gap = placement.spot - arm.world.frame(name).position[:2]
        lag = arm.world.hand.position[:2] - arm.world.frame(name).position[:2]
        if done() or np.linalg.norm(gap) < _SLID or np.linalg.norm(lag) > _SLIPPED:
            break
        ahead = gap * min(1.0, _DRAG / float(np.linalg.norm(gap)))
        target = arm.world.hand.position[:2] + ahead
        yield Command(position=np.array([*target, above[2] - _PRESS]), rotation=rotation, gripper=CLOSE)
    yield from retreat(arm)
    return done()


def _roomiest(arm: Arm, at: Vector) -> Vector:
    """[3,3], the turn of a hand that points down ``at`` [3] with the most room for palm and wrist, the least one."""
    near, hand = arm.world.surroundings().near(at, 0.3), arm.world.hand.rotation
    turns = [nearest_half_turn(pointing_down(float(yaw)), hand) for yaw in np.arange(8) * np.pi / 8]
    room = [(np.sum(near.clearance(at + WAY_DOWN @ turn.T) < _MARGIN), turn_between(turn, hand)) for turn in turns]
    return turns[min(range(len(turns)), key=room.__getitem__)]


def release(arm: Arm) -> Skill:
    """Open the gripper where it is."""
    hand = arm.world.hand
    start = arm.world.opening
    for _ in range(10):
        if arm.world.opening > min(start + 0.02, 0.07):
            break
        yield Command(position=hand.position, rotation=hand.rotation, gripper=OPEN)
    return True


def retreat(arm: Arm) -> Skill:
    """Straight up and upright, away from what the hand is jammed against."""
    hand = arm.world.hand
    above, rotation = hand.position + np.array([0.0, 0.0, _RETREAT]), pointing_down(yaw_of(hand.rotation))
    for _ in range(_RETREAT_PATIENCE):
        if arm.world.hand.position[2] > above[2] - _MARGIN:
            return True
        yield Command(position=above, rotation=rotation, gripper=OPEN)
    return False
