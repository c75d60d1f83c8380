"""Progress from one sub-goal of a LIBERO task to the next: a dense reward that reaches across the table.

:mod:`~embodied_rl.envs.libero.progress` sees some 20 cm far, so after the first of two objects it says nothing of the
way to the second. Here nearness of two things that are d metres apart is

    n(d) = (1 - tanh 10 d) / 2 + (1 - tanh 2 d) / 2

which has a slope at any distance on a table and is steep in the last centimetres. A sub-goal that holds counts 1. Of
those that do not, a placement ``(On object target)`` or ``(In object target)`` counts

    0.1 [both fingers touch the object] + 0.1 [and nothing else does: it is lifted] + 0.4 n(object - target)

and ``Open``, ``Close``, ``Turnon`` and ``Turnoff`` count 0.6 times the share of the joint's way that is done. The one
that the hand is nearest to counts 0.2 n(hand - object or moving part) more. A ``Close`` counts, even where it holds,
only while what belongs ``In`` the closed thing is there: what is closed first cannot be filled. The level is the mean
over sub-goals.

A function of the state alone, so differences of it sum to what an episode achieved (Ng, Harada & Russell 1999, "Policy
invariance under reward transformations", with a discount of 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from embodied_rl.envs.libero.expert.world import World
from embodied_rl.envs.libero.progress import Hand, Placement, is_placement

_REACH, _TOUCH, _LIFT, _PLACE = 0.2, 0.1, 0.1, 0.4
_JOINT = 0.6
_NEAR, _FAR = 10.0, 2.0


def nearness(distance: float) -> float:
    """1 for a ``distance`` of 0 metres, to 0 far away."""
    return float(1.0 - (np.tanh(_NEAR * distance) + np.tanh(_FAR * distance)) / 2)


class _SubGoal(Protocol):
    def done(self) -> float:
        """What it counts before it holds, without the hand's nearness, 0 to 0.6."""
        ...

    def distance(self) -> float:
        """Metres from the hand to what must be moved."""
        ...


class _Placing:
    def __init__(self, env: Any, hand: Hand, goal: Sequence[str]) -> None:
        self._hand, self._placement = hand, Placement(env, goal)
        self._robot = World(env).robot_geoms

    def done(self) -> float:
        placement = self._placement
        touched = self._hand.grasps(placement)
        held = touched and self._robot[np.setdiff1d(self._hand.touched(placement), placement.geoms)].all()
        apart = float(np.linalg.norm(placement.position - placement.target))
        return _TOUCH * touched + _LIFT * bool(held) + _PLACE * nearness(apart)

    def distance(self) -> float:
        return float(np.linalg.norm(self._hand.position - self._placement.position))


class _Moving:
    """A drawer, door or knob."""

    def __init__(self, env: Any, hand: Hand, goal: Sequence[str]) -> None:
        self._world, self._hand = World(env), hand
        self._predicate, self._joints = goal[0].lower(), self._world.joints(goal[1])

    def done(self) -> float:
        ways = [self._way(joint) for joint in self._joints]
        return _JOINT * (min(ways) if self._predicate in ("close", "turnoff") else max(ways))

    def distance(self) -> float:
        """From the surface of the part; inside it is 0."""
        at = self._hand.position[None]
        return max(0.0, min(float(self._world.link_shape(joint).clearance(at)[0]) for joint in self._joints))

    def _way(self, joint: str) -> float:
        """Share of the joint's way that is done, 0 to 1. Closed is 0 of a drawer's or door's range, whose other end is
        open; a knob is off at its range's lower end."""
        low, high = self._world.joint_range(joint)
        position = self._world.joint(joint)
        if self._predicate in ("open", "close"):
            share = abs(position) / max(abs(low), abs(high))
        else:
            share = (position - low) / (high - low)
        share = float(np.clip(share, 0.0, 1.0))
        return share if self._predicate in ("open", "turnon") else 1.0 - share


class SubGoals:
    """Progress of LIBERO's problem environment ``env``, at any time."""

    def __init__(self, env: Any) -> None:
        self._env, hand = env, Hand(env)
        self._goals: list[tuple[list[str], _SubGoal]] = [
            (goal, _Placing(env, hand, goal) if is_placement(goal) else _Moving(env, hand, goal))
            for goal in env.parsed_problem["goal_state"]
        ]

    def _places(self, target: str) -> set[str]:
        """What a goal would name that closes ``target``: itself, such as a drawer, or whose part it is."""
        site = self._env.object_sites_dict.get(target)
        return {target} if site is None else {target, str(site.parent_name)}

    def level(self) -> float:
        """0 to 1; 1 if all predicates hold."""
        holds = [bool(self._env._eval_predicate(goal)) for goal, _ in self._goals]
        unfilled: set[str] = set()
        for (goal, _), held in zip(self._goals, holds, strict=True):
            if not held and goal[0].lower() == "in":
                unfilled |= self._places(goal[2])
        total, nearest = 0.0, np.inf
        for (goal, sub_goal), held in zip(self._goals, holds, strict=True):
            if goal[0].lower() == "close" and goal[1] in unfilled:
                continue
            if held:
                total += 1.0
            else:
                total += sub_goal.done()
                nearest = min(nearest, sub_goal.distance())
        return (total + _REACH * nearness(nearest)) / len(self._goals)
