"""Making room: what an open drawer would cover is put aside before it is opened."""

from __future__ import annotations

from itertools import islice, product

import numpy as np

from embodied_rl.envs.libero.expert.geometry import Boxes, Vector
from embodied_rl.envs.libero.expert.pick_and_place import Placement, find_grasps, too_flat
from embodied_rl.envs.libero.expert.skills import Arm, Skill, carry, close_gripper, reach, release, retreat
from embodied_rl.envs.libero.expert.world import Goal, World

_ATTEMPTS = 3
_APART = 0.02
"""Metres to anything else, where it is put."""
_LEVEL = 0.005
"""Metres by which what an object stands on may be uneven."""
_WAYS = np.linspace(-0.2, 0.2, 21)
"""Metres that an object is moved in x and in y."""
_LOOKED_AT = 20
"""So many vacant places are looked at for one where the hand can take the object: some 0.2 s each."""
_OUTWARD = 0.5
"""Metres nearer that a metre the way the drawer opens counts: what imitates sees alike states put aside alike."""


def make_room(arm: Arm, goal: Goal) -> Skill:
    """Put ``goal.subject`` where the hand can still take it once the drawer ``goal.target`` is open.

    False after the last attempt, which may have failed.
    """
    assert goal.target is not None
    for _ in range(_ATTEMPTS):
        spot = _spot_aside(arm.world, goal)
        if spot is None:
            return True
        grasp = find_grasps(arm.world, goal)[0]
        if not (yield from reach(arm, goal.subject, grasp)):
            yield from retreat(arm)
        elif not (yield from close_gripper(arm, grasp)):
            yield from release(arm)
        else:
            placement = Placement(spot=spot, turn=0.0, support=float(arm.world.shape(goal.subject).low[2]))
            yield from carry(arm, goal.subject, placement, lambda: False)
            yield from release(arm)
            yield from retreat(arm)
    return False


def _spot_aside(world: World, goal: Goal) -> Vector | None:
    """[2], the nearest place for the object's origin where the hand can take it, rather the way the drawer opens; None
    where it may stay, or must."""
    assert goal.target is not None
    joints = [joint for joint in world.joints(goal.target) if not world.is_hinge(joint)]
    if not joints or too_flat(world, goal.subject):
        return None
    drawer = world.opened_shape(joints[0])
    out = (drawer.centers - world.link_shape(joints[0]).centers)[0, :2]
    out /= max(float(np.linalg.norm(out)), 1e-9)
    if _is_free(world, goal, drawer) or not _is_free(world, goal):
        return None
    shape, obstacles = world.shape(goal.subject), world.surroundings(goal.subject) | drawer
    radius = float((shape.high - shape.low)[:2].max()) / 2 + _APART
    middle, floor = (shape.low + shape.high)[:2] / 2, shape.low[2] + _LEVEL
    ways = sorted(product(_WAYS, _WAYS), key=lambda way: float(np.hypot(*way) - _OUTWARD * np.dot(way, out)))
    vacant = (way for way in ways if obstacles.top_along(middle + way, middle + way, radius) < floor)
    for way in islice(vacant, _LOOKED_AT):
        if _is_free(world, goal, drawer, way):
            return world.frame(goal.subject).position[:2] + way
    return None


def _is_free(world: World, goal: Goal, besides: Boxes | None = None, way: tuple[float, float] = (0.0, 0.0)) -> bool:
    return any(grasp.free for grasp in find_grasps(world, goal, besides, way))
