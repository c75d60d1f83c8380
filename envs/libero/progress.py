"""Progress towards a LIBERO task's goal: a dense reward from the simulator's privileged state.

LIBERO rewards success alone. Here each placement ``(On object target)`` or ``(In object target)`` counts

    0.2 (1 - tanh 10 |hand - object|) + 0.2 [both fingers touch the object] + 0.4 (1 - tanh 5 |object - target|)

metres between the grip site and origins, and 1 once the predicate holds; any other predicate counts when it holds. The
task's progress is the mean. The stages are those of robosuite's shaped rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PLACEMENTS = ("on", "in")
_REACH, _GRASP, _PLACE = 0.2, 0.2, 0.4
_REACH_SHARPNESS, _PLACE_SHARPNESS = 10.0, 5.0


class Hand:
    """The gripper of LIBERO's problem environment ``env``, and what it touches."""

    def __init__(self, env: Any) -> None:
        self._model, self._data = env.sim.model._model, env.sim.data._data
        gripper = env.robots[0].gripper.important_geoms
        self._fingers = [
            np.array([env.sim.model.geom_name2id(name) for name in gripper[f"{side}_fingerpad"]])
            for side in ("left", "right")
        ]
        self._site = env.robots[0].eef_site_id

    @property
    def position(self) -> NDArray[np.float64]:
        """[3] metres, the grip site."""
        return self._data.site_xpos[self._site]

    def touched(self, placement: Placement) -> NDArray[np.integer]:
        """[contacts,2], numbers of the geoms of each contact of the object."""
        touching = self._data.contact.geom
        return touching[np.isin(touching, placement.geoms).any(1)]

    def grasps(self, placement: Placement) -> bool:
        """Both fingers touch the object."""
        pairs = self.touched(placement)
        return all(np.isin(pairs, finger).any() for finger in self._fingers)


class Placement:
    """A goal ``(On object target)`` or ``(In object target)``."""

    def __init__(self, env: Any, goal: Sequence[str]) -> None:
        _, subject, target = goal
        model = env.sim.model._model
        self._data = env.sim.data._data
        self._body = env.obj_body_id[subject]
        self._on_site = target in env.object_sites_dict
        self._target = env.sim.model.site_name2id(target) if self._on_site else env.obj_body_id[target]
        self.geoms = np.flatnonzero(model.body_rootid[model.geom_bodyid] == self._body)
        """Numbers of the object's geoms."""

    @property
    def position(self) -> NDArray[np.float64]:
        """[3] metres, the object's origin."""
        return self._data.xpos[self._body]

    @property
    def target(self) -> NDArray[np.float64]:
        """[3] metres, the origin of where it belongs."""
        return (self._data.site_xpos if self._on_site else self._data.xpos)[self._target]


def is_placement(goal: Sequence[str]) -> bool:
    return goal[0].lower() in _PLACEMENTS


class Progress:
    """Progress of LIBERO's problem environment ``env``, at any time."""

    def __init__(self, env: Any) -> None:
        self._env, self._hand = env, Hand(env)
        goals = env.parsed_problem["goal_state"]
        self._goals = [(goal, Placement(env, goal) if is_placement(goal) else None) for goal in goals]

    def level(self) -> float:
        """0 to 1; 1 if all predicates hold."""
        return sum(self._of(*goal) for goal in self._goals) / len(self._goals)

    def _of(self, goal: list[str], placement: Placement | None) -> float:
        if self._env._eval_predicate(goal):
            return 1.0
        if placement is None:
            return 0.0
        position = placement.position
        reached = 1.0 - np.tanh(_REACH_SHARPNESS * np.linalg.norm(self._hand.position - position))
        placed = 1.0 - np.tanh(_PLACE_SHARPNESS * np.linalg.norm(position - placement.target))
        return float(_REACH * reached + _GRASP * self._hand.grasps(placement) + _PLACE * placed)
