"""Putting a mug into what is open to one side alone, such as a microwave: held at its handle, the hand leaning back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from embodied_rl.envs.libero.expert.geometry import (
    CLOSE,
    FINGERTIP,
    GRIPPER_OUTLINE,
    OPEN,
    Boxes,
    Vector,
    about,
    leaning_left,
    nearest_half_turn,
)
from embodied_rl.envs.libero.expert.pick_and_place import Grasp
from embodied_rl.envs.libero.expert.skills import (
    Aim,
    Arm,
    Skill,
    close_gripper,
    reach,
    release,
    retreat,
    straight,
    travel,
)
from embodied_rl.envs.libero.expert.world import Goal, World

_VERTICAL = np.array([0.0, 0.0, 1.0])
_LEANS = (0.9, 1.1, 1.3)
"""Radians that the hand may lean back, so that it finds room below what covers the place."""
_LEANING = 0.6
"""Radians above which a hand that holds the object leans back enough."""
_BEFORE = 0.15
"""Metres before a region that are free where it is open."""
_FREE = 0.02
"""Metres around the way in that are free there."""
_HANDLE = 0.025
"""Metres across that a handle has at most."""
_PAST = 0.01
"""Metres that the fingers go past the handle's outer part, and ..."""
_OVER = 0.007
"""... metres that they are above its middle: half way between missing it and pushing the body or the table."""
_LEVEL = 0.3
"""Sine of the angle from the horizontal below which a handle can be taken."""
_END = 0.012
"""Metres from an object's outer end within which its shape is the handle's."""
_ROOM = 0.006
"""Metres beside the hand on its way in."""
_ASIDE = np.linspace(-0.1, 0.1, 21)
"""Metres from a region's middle line at which it may go in."""
_BACK = 0.08
"""Metres before the handle from which the hand comes straight to it."""
_PASSING = 3.0
"""The slack there: a hand that waits until it is exact is imitated by one that waits for good."""
_SPARE = 0.005
"""Metres behind the object."""
_OVER_FLOOR = 0.012
"""Metres that what is carried in passes over the floor."""
_STAGE = 0.02
"""Metres between it and the mouth before it goes in."""
_WITHDRAWAL = 0.14
"""Metres that the hand goes back out."""
_FAR_DOWN = 0.3
"""Metres; planes are no shapes, so there may be nothing below."""
_STRAIGHT: Final[Mapping[str, Any]] = {"within": 0.006, "patience": 60, "stuck": 6}
"""When straight motions end."""
_BROUGHT = 0.012
"""Metres from before the mouth at which it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """How an object gets into a region that something covers."""

    grasp: Grasp
    """At the object's handle."""
    inward: Vector
    """[3], the way in: horizontal, of length 1."""
    middle: Vector
    """[3], of the region."""
    depth: float
    """Metres from the middle to the mouth."""
    floor: float
    """Height of what things stand on inside."""


def find_insertion(world: World, goal: Goal) -> Insertion | None:
    """None where things come in from above or at no side, and for objects without a handle."""
    if goal.predicate != "in" or goal.target is None or not world.is_region(goal.target):
        return None
    region, obstacles = world.region(goal.target), world.surroundings(goal.subject)
    middle = region.frame.position
    if obstacles.top_along(middle, middle, 0.01) < middle[2] or (grasp := _handle(world, goal.subject)) is None:
        return None
    floor = obstacles.only(obstacles.centers[:, 2] < middle[2]).top_along(middle, middle, 0.01)
    for axis in np.flatnonzero(np.abs(region.frame.rotation[2]) < 0.5):  # the horizontal ones
        for outward in (region.frame.rotation[:, axis], -region.frame.rotation[:, axis]):
            depth = float(region.half_size[axis])
            way = middle + np.linspace(0.0, depth + _BEFORE, 20)[:, None] * outward
            if obstacles.clearance(way).min() > _FREE:
                return Insertion(grasp=grasp, inward=-outward, middle=middle, depth=depth, floor=floor)
    return None


def insert(arm: Arm, goal: Goal, insertion: Insertion) -> Skill:
    """Take the object at its handle, bring it before the mouth, straight in, and let go. What is held otherwise is set
    down first."""
    holds = arm.world.holds_in_hand(goal.subject)
    if holds and np.arccos(-arm.world.hand.rotation[2, 2]) < _LEANING:
        yield from _set_down(arm, goal.subject)
        return False
    if not holds and not (yield from _take(arm, goal.subject, insertion.grasp)):
        yield from release(arm)
        yield from retreat(arm)
        return False
    world, inward = arm.world, insertion.inward
    hand, origin, obstacles = world.hand, world.frame(goal.subject).position, world.surroundings(goal.subject)
    facing = hand.rotation[:, 2]
    turn = about(_VERTICAL, float(np.arctan2(inward[1], inward[0]) - np.arctan2(facing[1], facing[0])))
    rotation, held = turn @ hand.rotation, turn @ (hand.position - origin)
    offsets = (world.shape(goal.subject).corners - origin) @ turn.T
    along, middle = offsets @ inward, insertion.middle
    # In the middle, or where what is ahead of its origin just fits.
    end = middle + inward * min(-(along.max() + along.min()) / 2, insertion.depth - along.max() - _SPARE)
    end[2] = insertion.floor + _OVER_FLOOR - offsets[:, 2].min()
    end += _aside(obstacles, inward, end + held, rotation)
    before = end - inward * ((end - middle) @ inward + insertion.depth + along.max() + _STAGE)
    yield from _bring(arm, goal.subject, before + held, rotation)
    yield from straight(arm, end + held, rotation, CLOSE, **_STRAIGHT)
    yield from straight(arm, end + held - _OVER_FLOOR * _VERTICAL, rotation, CLOSE, **_STRAIGHT)
    yield from release(arm)
    hand = arm.world.hand
    yield from straight(arm, hand.position - _WITHDRAWAL * hand.rotation[:, 2], hand.rotation, OPEN, **_STRAIGHT)
    return arm.world.holds(goal)


def _take(arm: Arm, name: str, grasp: Grasp) -> Skill:
    """Take hold along the way that the hand points, which leaves the object room until the end."""
    back = replace(grasp, position=grasp.position - _BACK * grasp.rotation[:, 2])
    return (
        (yield from reach(arm, name, back, slack=_PASSING))
        and (yield from straight(arm, grasp.position, grasp.rotation, OPEN, **_STRAIGHT))
        and (yield from close_gripper(arm, grasp))
    )


def _handle(world: World, name: str) -> Grasp | None:
    """The hand points at the body of what it takes, as steep as there is room for; None without a handle."""
    shape, frame = world.shape(name), world.frame(name)
    boxes = shape.corners.reshape(-1, 8, 3)
    found = []
    for axis in np.flatnonzero(np.abs(frame.rotation[2]) < _LEVEL):
        for outward in (frame.rotation[:, axis], -frame.rotation[:, axis]):
            end = shape.only((boxes @ outward).min(axis=1) > (boxes @ outward).max() - _END)
            across = np.cross(_VERTICAL, outward)
            found.append((float(np.ptp(end.corners @ across)) if len(end.centers) else np.inf, end, outward, across))
    if not found or min(width for width, *_ in found) > _HANDLE:
        return None
    _, end, outward, across = min(found, key=lambda candidate: candidate[0])
    down = np.stack([across, np.cross(-_VERTICAL, across), -_VERTICAL], axis=1)
    upright = nearest_half_turn(down, leaning_left(world.hand.rotation))
    middle, inner = (end.low + end.high) / 2, float((end.corners @ outward).min())
    near = world.surroundings(name).near(middle, 0.3)
    grasps = []
    for lean in _LEANS:
        rotation = about(across, lean) @ upright
        at = middle + outward * (inner - _PAST - middle @ outward + FINGERTIP * np.sin(lean)) + _OVER * _VERTICAL
        blocked = np.sum(near.clearance(at + GRIPPER_OUTLINE @ rotation.T) < 0.002)
        grasps.append(Grasp(position=at, rotation=rotation, cost=float(blocked)))
    return min(grasps, key=lambda grasp: grasp.cost)


def _aside(obstacles: Boxes, inward: Vector, at: Vector, rotation: Vector) -> Vector:
    """[3], the least way aside after which the hand has room ``at`` [3] and on its way there."""
    sideways, near, outline = np.cross(_VERTICAL, inward), obstacles.near(at, 0.4), GRIPPER_OUTLINE @ rotation.T
    way = np.concatenate([at - back * inward + outline for back in (0.0, 0.05, 0.1)])

    def price(aside: float) -> tuple[int, float]:
        return int(np.sum(near.clearance(way + aside * sideways) < _ROOM)), abs(aside)

    return min(_ASIDE, key=price) * sideways


def _bring(arm: Arm, name: str, at: Vector, rotation: Vector) -> Skill:
    """Carry what is held over what is in the way, until the hand is ``at`` [3]."""
    size = arm.world.shape(name).high - arm.world.shape(name).low
    radius = float(np.linalg.norm(size[:2])) / 2 * 0.75

    def aim() -> Aim:
        hand, shape = arm.world.hand.position, arm.world.shape(name)
        center = ((shape.low + shape.high) / 2 - hand)[:2]
        return Aim(position=at, hang=float(hand[2] - shape.low[2]), center=center, radius=radius)

    def arrived(_: Aim) -> bool:
        return bool(np.abs(at - arm.world.hand.position).max() < _BROUGHT)

    return (yield from travel(arm, aim, rotation, CLOSE, arm.world.surroundings(name), arrived=arrived))


def _set_down(arm: Arm, name: str) -> Skill:
    hand, shape = arm.world.hand, arm.world.shape(name)
    below = arm.world.surroundings(name).top_along(hand.position, hand.position, 0.03)
    way = min(float(shape.low[2]) - below, _FAR_DOWN)
    yield from straight(arm, hand.position - way * _VERTICAL, hand.rotation, CLOSE, **_STRAIGHT)
    yield from release(arm)
    return (yield from retreat(arm))
