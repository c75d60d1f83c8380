"""From goals to skills: how each predicate is brought about."""

from __future__ import annotations

import numpy as np

from embodied_rl.experts.categories import facts
from embodied_rl.experts.controller import OPEN, Command
from embodied_rl.experts.geometry import Vector, pointing_down, yaw_of
from embodied_rl.experts.goals import Goal, share_of_target
from embodied_rl.experts.grasps import Grasp, find_grasps
from embodied_rl.experts.skills import Arm, Skill, carry, close_gripper, reach, release, settle

_ATTEMPTS = 8


def play(arm: Arm) -> Skill:
    """Bring about all goals of the task, then wait above."""
    goals = arm.world.goals
    yield from settle(arm)
    for _ in range(_ATTEMPTS):
        for goal in goals:
            if not arm.world.holds(goal):
                yield from place(arm, goal)
        if all(arm.world.holds(goal) for goal in goals):
            break
    rest = arm.world.hand
    while True:
        yield Command(position=rest.position, rotation=pointing_down(yaw_of(rest.rotation)), gripper=OPEN)


def place(arm: Arm, goal: Goal) -> Skill:
    """(In x y) and (On x y): pick, carry, let go."""
    assert goal.target is not None
    tried: list[Grasp] = []
    for _ in range(_ATTEMPTS):
        world = arm.world
        if world.holds(goal):
            return True
        hand = world.hand
        grasps = find_grasps(
            world.shape(goal.subject),
            world.frame(goal.subject).rotation,
            facts(world.category(goal.subject)),
            world.surroundings(),
            hand.position,
            hand.rotation,
            np.array([*spot(arm, goal), 0.0]),
        )
        fresh = [g for g in grasps if all(np.linalg.norm(g.position - t.position) > 0.02 for t in tried)]
        grasp = (fresh or grasps)[0]
        tried.append(grasp)
        if not (yield from reach(arm, grasp)):
            continue
        if not (yield from close_gripper(arm, grasp)):
            yield from release(arm)
            continue
        yield from carry(
            arm,
            goal.subject,
            pointing_down(yaw_of(grasp.rotation)),
            lambda: spot(arm, goal),
            lambda: arm.world.holds(goal),
            support(arm, goal),
        )
        yield from release(arm)
    return arm.world.holds(goal)


def spot(arm: Arm, goal: Goal) -> Vector:
    """[2], where the moved object's origin should come to."""
    assert goal.target is not None
    world = arm.world
    if not world.is_region(goal.target):
        return world.frame(goal.target).position[:2]
    region = world.region(goal.target)
    which, count = share_of_target(world.goals, goal)
    shift = ((which + 0.5) / count - 0.5) * 2 * region.half_size
    half_extents = region.frame.rotation[:2] * region.half_size
    axis = int(np.argmax(np.linalg.norm(half_extents, axis=0)))
    return region.frame.position[:2] + region.frame.rotation[:2, axis] * shift[axis] * 0.8


def support(arm: Arm, goal: Goal) -> float:
    """The height of what the object will stand on."""
    world = arm.world
    assert goal.target is not None
    others = world.surroundings(goal.subject)
    xy = spot(arm, goal)
    if world.is_region(goal.target):
        region = world.region(goal.target)
        return float(region.frame.position[2] - np.abs(region.frame.rotation @ region.half_size)[2])
    return others.top_along(xy, xy, 0.01)
