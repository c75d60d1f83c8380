"""From goals to skills: how each predicate is brought about."""

from __future__ import annotations

import numpy as np

from embodied_rl.envs.libero.expert.categories import facts
from embodied_rl.envs.libero.expert.controller import OPEN, Command
from embodied_rl.envs.libero.expert.geometry import pointing_down, yaw_of
from embodied_rl.envs.libero.expert.goals import Goal
from embodied_rl.envs.libero.expert.grasps import Grasp, find_grasps
from embodied_rl.envs.libero.expert.placements import find_placement
from embodied_rl.envs.libero.expert.pushing import push
from embodied_rl.envs.libero.expert.skills import Arm, Skill, carry, close_gripper, reach, release, settle

_ATTEMPTS = 8


def play(arm: Arm) -> Skill:
    """Bring about all goals of the task, then wait."""
    goals = arm.world.goals
    for _ in range(_ATTEMPTS):
        for goal in goals:
            if not arm.world.holds(goal):
                yield from (place(arm, goal) if goal.target is not None else switch(arm, goal))
        if arm.world.success:
            break
    rest = arm.world.hand
    while True:
        yield Command(position=rest.position, rotation=pointing_down(yaw_of(rest.rotation)), gripper=OPEN)


def switch(arm: Arm, goal: Goal) -> Skill:
    """(Close x), (Turnon x) and (Turnoff x): push the moving part along its joint."""
    toward = -1.0 if goal.predicate == "turnoff" else 1.0
    for joint in arm.world.joints(goal.subject):
        if goal.predicate == "close":  # Closed is zero.
            toward = 1.0 if arm.world.joint(joint) < 0 else -1.0
        if (yield from push(arm, joint, toward, lambda: arm.world.holds(goal))):
            return True
    return arm.world.holds(goal)


def place(arm: Arm, goal: Goal) -> Skill:
    """(In x y) and (On x y): pick, carry, let go."""
    tried: list[Grasp] = []
    for _ in range(_ATTEMPTS):
        yield from settle(arm)
        world = arm.world
        if world.holds(goal):
            return True
        grasps = find_grasps(
            world.shape(goal.subject),
            world.frame(goal.subject),
            facts(world.category(goal.subject)),
            world.surroundings(),
            world.hand,
            find_placement(world, goal),
            world.surroundings(goal.subject),
        )
        fresh = [g for g in grasps if all(np.linalg.norm(g.position - t.position) > 0.015 for t in tried)]
        grasp = (fresh or grasps)[0]
        tried.append(grasp)
        if not (yield from reach(arm, goal.subject, grasp)):
            continue
        if not (yield from close_gripper(arm, grasp)):
            yield from release(arm)
            continue
        yield from carry(arm, goal.subject, find_placement(arm.world, goal), lambda: arm.world.success)
        yield from release(arm)
    return arm.world.holds(goal)
