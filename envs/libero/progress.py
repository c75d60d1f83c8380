"""Progress towards a LIBERO task's goal: a dense reward from the simulator's privileged state.

LIBERO rewards success alone. Here each placement ``(On object target)`` or ``(In object target)`` counts

    0.2 (1 - tanh 10 |hand - object|) + 0.2 [both fingers touch the object] + 0.4 (1 - tanh 5 |object - target|)

metres between the grip site and origins, and 1 once the predicate holds; any other predicate counts when it holds. The
task's progress is the mean. The stages are those of robosuite's shaped rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PLACEMENTS = ("on", "in")
_REACH, _GRASP, _PLACE = 0.2, 0.2, 0.4
_REACH_SHARPNESS, _PLACE_SHARPNESS = 10.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    body: int
    geoms: NDArray[np.integer]
    target: int
    """A site's number, or a body's."""
    on_site: bool


class Progress:
    """Progress of LIBERO's problem environment ``env``, at any time."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._model, self._data = env.sim.model._model, env.sim.data._data
        gripper = env.robots[0].gripper.important_geoms
        self._fingers = [
            np.array([env.sim.model.geom_name2id(name) for name in gripper[f"{side}_fingerpad"]])
            for side in ("left", "right")
        ]
        self._hand = env.robots[0].eef_site_id
        self._goals = [(goal, self._placement(goal)) for goal in env.parsed_problem["goal_state"]]

    def level(self) -> float:
        """0 to 1; 1 if all predicates hold."""
        return sum(self._of(*goal) for goal in self._goals) / len(self._goals)

    def _placement(self, goal: list[str]) -> _Placement | None:
        if goal[0].lower() not in _PLACEMENTS:
            return None
        env, (_, subject, target) = self._env, goal
        body = env.obj_body_id[subject]
        on_site = target in env.object_sites_dict
        return _Placement(
            body=body,
            geoms=np.flatnonzero(self._model.body_rootid[self._model.geom_bodyid] == body),
            target=env.sim.model.site_name2id(target) if on_site else env.obj_body_id[target],
            on_site=on_site,
        )

    def _of(self, goal: list[str], placement: _Placement | None) -> float:
        if self._env._eval_predicate(goal):
            return 1.0
        if placement is None:
            return 0.0
        data = self._data
        position = data.xpos[placement.body]
        target = (data.site_xpos if placement.on_site else data.xpos)[placement.target]
        reached = 1.0 - np.tanh(_REACH_SHARPNESS * np.linalg.norm(data.site_xpos[self._hand] - position))
        placed = 1.0 - np.tanh(_PLACE_SHARPNESS * np.linalg.norm(position - target))
        return float(_REACH * reached + _GRASP * self._grasped(placement.geoms) + _PLACE * placed)

    def _grasped(self, geoms: NDArray[np.integer]) -> bool:
        touching = self._data.contact.geom
        of_object = np.isin(touching, geoms)
        pairs = touching[of_object.any(1)]
        return all(np.isin(pairs, finger).any() for finger in self._fingers)
