"""The scripted expert for LIBERO's pick-and-place, drawer, door and stove tasks. See docs/experts.md.

It plans from the simulator's privileged state. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.base import SimEnv
from embodied_rl.envs.libero.expert.articulation import pull, push
from embodied_rl.envs.libero.expert.clearing import make_room
from embodied_rl.envs.libero.expert.geometry import OPEN, Command, action_toward, pointing_down, yaw_of
from embodied_rl.envs.libero.expert.insertion import find_insertion, insert
from embodied_rl.envs.libero.expert.pick_and_place import Grasp, find_grasps, find_placement, too_flat
from embodied_rl.envs.libero.expert.skills import (
    Arm,
    Skill,
    carry,
    close_gripper,
    reach,
    release,
    retreat,
    settle,
    slide,
)
from embodied_rl.envs.libero.expert.world import Goal, World
from embodied_rl.errors import UserError

_NOISE = 0.5
"""Standard deviation of the noise on translation actions in free motion."""
_NOISE_MEMORY = 0.8
"""Correlation of the noise between control steps: white noise would average out to nothing."""
_ATTEMPTS = 8
_FAILED = 40.0
"""Steps that another place is worth, for each attempt that failed there."""
_AJAR = 0.5
"""Radians at which fingers fit behind a door."""


@dataclass(slots=True)
class _Episode:
    arm: Arm
    plan: Skill
    noise: NDArray[np.float64]


class LiberoExpert:
    """Plays LIBERO tasks from the simulator's state (the :class:`~embodied_rl.demonstrations.expert.Expert` protocol).

    It follows the task's goal predicates and the objects' shapes; there is no script for any one task. It must be used
    in the thread of its env.
    """

    def __init__(self, env: SimEnv) -> None:
        from embodied_rl.envs.libero.adapter import LiberoEnv

        if not isinstance(env, LiberoEnv):
            raise UserError(f"LiberoExpert: got a {type(env).__name__}, expected a LiberoEnv: it plays env_type libero")
        self._env = env
        self._episodes: dict[int, _Episode] = {}

    def reset(self, slot: int) -> None:
        arm = Arm()
        self._episodes[slot] = _Episode(arm, play(arm), np.zeros(3))

    def act(self, slot: int, generator: np.random.Generator | None) -> NDArray[np.float32]:
        if slot not in self._episodes:
            raise RuntimeError(f"act: the expert has no episode in slot {slot}; call reset({slot}) first")
        episode = self._episodes[slot]
        episode.arm.see(World(self._env.privileged(slot)))
        command = next(episode.plan)
        hand = episode.arm.world.hand
        action = action_toward(command, hand.position, hand.rotation, episode.arm.velocity)
        if generator is not None:
            fresh = generator.normal(0.0, _NOISE * np.sqrt(1 - _NOISE_MEMORY**2), 3)
            episode.noise = _NOISE_MEMORY * episode.noise + fresh
            action[:3] = np.clip(action[:3] + command.slack * episode.noise, -1.0, 1.0)
        return action.astype(np.float32)


def play(arm: Arm) -> Skill:
    """Bring about all goals of the task, then wait. What is held already, where it takes over, comes first."""
    goals = sorted(arm.world.goals, key=lambda goal: not arm.world.holds_in_hand(goal.subject))
    for _ in range(_ATTEMPTS):
        for goal in goals:
            # What was not put in must not find the drawer closed.
            if not arm.world.holds(goal) and not (
                yield from (place(arm, goal) if goal.target is not None else switch(arm, goal))
            ):
                break
        if arm.world.success:
            break
    rest = arm.world.hand
    while True:
        yield Command(position=rest.position, rotation=pointing_down(yaw_of(rest.rotation)), gripper=OPEN)


def switch(arm: Arm, goal: Goal) -> Skill:
    """(Open x), (Close x), (Turnon x) and (Turnoff x): move the part along its joint."""
    for joint in arm.world.joints(goal.subject):
        if goal.predicate == "open":
            yield from _open(arm, joint, goal)
        else:
            toward = -1.0 if goal.predicate == "turnoff" else 1.0
            if goal.predicate == "close":  # Closed is zero.
                toward = 1.0 if arm.world.joint(joint) < 0 else -1.0
            # A stove is on after a quarter of the knob's way, and off at its very end.
            yield from push(arm, joint, toward, lambda: arm.world.holds(goal), at_end=goal.predicate == "turnoff")
        if arm.world.holds(goal):
            return True
    return arm.world.holds(goal)


def _open(arm: Arm, joint: str, goal: Goal) -> Skill:
    """Pull a drawer, after putting aside what belongs into it and would be covered by it; pull a door until it is ajar,
    then push it from behind, where the arm need not reach as far."""
    for filling in arm.world.goals:
        if filling.predicate == "in" and filling.target == goal.subject:
            yield from make_room(arm, filling)
    low, high = arm.world.joint_range(joint)
    toward = 1.0 if high > -low else -1.0

    def ajar() -> bool:
        return arm.world.holds(goal) or (arm.world.is_hinge(joint) and abs(arm.world.joint(joint)) > _AJAR)

    if not ajar():
        yield from pull(arm, joint, toward, ajar)
    if not arm.world.holds(goal) and ajar():
        yield from push(arm, joint, toward, lambda: arm.world.holds(goal))
    return arm.world.holds(goal)


def place(arm: Arm, goal: Goal) -> Skill:
    """(In x y) and (On x y): pick, carry, let go. A drawer that is closed is opened first."""
    if not (yield from _opened(arm, goal)):
        return False
    if arm.world.holds_in_hand(goal.subject) and not arm.world.holds(goal):
        insertion = find_insertion(arm.world, goal)
        yield from _put(arm, goal) if insertion is None else insert(arm, goal, insertion)
    tried: list[Grasp] = []
    for _ in range(_ATTEMPTS):
        yield from settle(arm)
        world = arm.world
        if world.holds(goal):
            return True
        if not (yield from _opened(arm, goal)):
            return False
        if (insertion := find_insertion(world, goal)) is not None:
            yield from insert(arm, goal, insertion)
            continue
        if too_flat(world, goal.subject):
            yield from slide(arm, goal.subject, find_placement(world, goal), lambda: arm.world.holds(goal))
            continue
        grasps = find_grasps(world, goal)
        grasp = min(grasps, key=lambda g: g.cost + _FAILED * sum(_alike(g, other) for other in tried))
        tried.append(grasp)
        if not (yield from reach(arm, goal.subject, grasp)):
            yield from retreat(arm)
            continue
        if not (yield from close_gripper(arm, grasp)):
            yield from release(arm)
            continue
        yield from _put(arm, goal)
    return arm.world.holds(goal)


def _opened(arm: Arm, goal: Goal) -> Skill:
    """Open the drawer that the goal wants filled, if it is closed. What is held is let go of before."""
    assert goal.target is not None
    if goal.predicate != "in" or not arm.world.closed(goal.target):
        return True
    if arm.world.holds_in_hand(goal.subject):
        yield from release(arm)
        yield from retreat(arm)
    return (yield from switch(arm, Goal(predicate="open", subject=goal.target)))


def _alike(one: Grasp, other: Grasp) -> bool:
    return bool(np.linalg.norm(one.position - other.position) < 0.015)


def _put(arm: Arm, goal: Goal) -> Skill:
    """Carry what is held where it belongs, and let go."""
    yield from carry(arm, goal.subject, find_placement(arm.world, goal), lambda: arm.world.success)
    yield from release(arm)
    return True
