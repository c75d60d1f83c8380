"""The knowledge of a LIBERO expert: poses, shapes, joints, contacts and goal predicates of one slot's present state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.libero.expert.geometry import Boxes, Vector
from embodied_rl.errors import UserError

_ORDER = {"turnon": 0, "turnoff": 0, "open": 1, "in": 2, "on": 2, "close": 3}
"""The order in which goals are brought about: a drawer is opened, filled, then closed."""
_PLACEMENTS = ("in", "on")
_ROBOT_BODIES = ("robot0", "gripper0", "mount0")
_HINGE = 3
"""MuJoCo's number for joints that turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One conjunct of a BDDL goal, such as ``(On akita_black_bowl_1 plate_1)``."""

    predicate: str
    """In lower case, as LIBERO's parser gives it."""
    subject: str
    """The object to move, or the thing to open, close or switch."""
    target: str | None = None
    """The object or region that it goes to; None for predicates of one argument."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return (self.subject,) if self.target is None else (self.subject, self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A pose in the world."""

    position: NDArray[np.float64]
    """[3] metres."""
    rotation: NDArray[np.float64]
    """[3,3], columns are the frame's axes in the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box-shaped site in or on something."""

    frame: Frame
    half_size: NDArray[np.float64]
    """[3] metres, along the frame's axes."""
    owner: str
    """The object or fixture that it belongs to."""


class World:
    """A read-only view of LIBERO's problem environment ``env``, valid until the simulation moves on.

    Names of objects, fixtures and regions are those of the task's BDDL file.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._model, self._data = env.sim.model._model, env.sim.data._data

    @property
    def hand(self) -> Frame:
        """The gripper's grip site: x along the fingers' opening, z from the palm to the fingertips."""
        return self._site(self._env.robots[0].eef_site_id)

    @property
    def opening(self) -> float:
        """Metres between the fingers, 0.08 at most."""
        left, right = self._data.qpos[list(self._env.robots[0]._ref_gripper_joint_pos_indexes)]
        return float(left - right)

    def holds_in_hand(self, name: str) -> bool:
        """Both fingers touch the object ``name``."""
        if name not in self._env.objects_dict:
            return False
        geoms = self._env.get_object(name).contact_geoms
        return bool(self._env._check_grasp(gripper=self._env.robots[0].gripper, object_geoms=geoms))

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """The task's goal predicates."""
        return parse_goals(self._env.parsed_problem["goal_state"])

    def holds(self, goal: Goal) -> bool:
        """LIBERO's own predicate, now."""
        return bool(self._env._eval_predicate([goal.predicate, *goal.arguments]))

    @property
    def success(self) -> bool:
        """All goals hold."""
        return all(self.holds(goal) for goal in self.goals)

    def is_region(self, name: str) -> bool:
        return name in self._env.object_sites_dict

    def category(self, name: str) -> str:
        """``akita_black_bowl`` of ``akita_black_bowl_1``."""
        return str(self._env.get_object(name).category_name)

    def objects(self) -> list[str]:
        """The movable ones."""
        return list(self._env.objects_dict)

    def speed(self) -> float:
        """Speed of the fastest movable object, m/s."""
        joints = [self._env.get_object(name).joints[-1] for name in self.objects()]
        return max(float(np.linalg.norm(self._env.sim.data.get_joint_qvel(joint)[:3])) for joint in joints)

    def frame(self, name: str) -> Frame:
        """The pose of an object's or fixture's origin; the predicates compare origins."""
        body = self._env.obj_body_id[name]
        return Frame(position=self._data.xpos[body].copy(), rotation=self._data.xmat[body].reshape(3, 3).copy())

    def region(self, name: str) -> Region:
        shape = self._env.object_sites_dict[name]
        return Region(
            frame=self._site(self._env.sim.model.site_name2id(name)),
            half_size=np.asarray(shape.size, dtype=np.float64),
            owner=str(shape.parent_name),
        )

    def joint(self, name: str) -> float:
        """A hinge's angle (rad) or a slide's way (m)."""
        return float(self._data.qpos[self._env.sim.model.get_joint_qpos_addr(name)])

    def joints(self, name: str) -> list[str]:
        """The joints of a fixture, or of a region on it."""
        sites = self._env.object_sites_dict
        return list((sites[name] if name in sites else self._env.get_object(name)).joints or ())

    def closed(self, name: str) -> bool:
        """A drawer or the like that is more closed than open; False for what has no joints."""
        joints = self.joints(name)
        return bool(joints) and all(abs(self.joint(j)) < 0.5 * max(map(abs, self.joint_range(j))) for j in joints)

    def joint_range(self, name: str) -> tuple[float, float]:
        low, high = self._model.joint(name).range
        return float(low), float(high)

    def joint_axis(self, name: str) -> tuple[Vector, Vector]:
        """A point [3] on the joint's axis and the axis' direction [3] in the world."""
        joint = self._model.joint(name).id
        return self._data.xanchor[joint].copy(), self._data.xaxis[joint].copy()

    def is_hinge(self, name: str) -> bool:
        """Otherwise it is a slide."""
        return int(self._model.joint(name).type[0]) == _HINGE

    def link_shape(self, joint: str) -> Boxes:
        """The collision shapes that a joint moves."""
        return self._boxes(self._link(joint))

    def opened_shape(self, joint: str) -> Boxes:
        """The same, of a slide at the open end of its way."""
        far = max(self.joint_range(joint), key=abs)
        return self.link_shape(joint).moved((far - self.joint(joint)) * self.joint_axis(joint)[1])

    def surroundings_of_link(self, joint: str) -> Boxes:
        """All collision shapes but those of the robot, planes, and what the joint moves: a part and what is in it."""
        corners = self.link_shape(joint).corners
        low, high = corners.min(axis=0), corners.max(axis=0)
        at = {name: self.frame(name).position for name in self.objects()}
        inside = [self._env.obj_body_id[name] for name, place in at.items() if ((low < place) & (place < high)).all()]
        return self._boxes(~self.robot_geoms & ~self._link(joint) & ~np.isin(self._roots, inside))

    def shape(self, name: str) -> Boxes:
        """An object's or fixture's collision shapes."""
        return self._boxes(self._roots == self._env.obj_body_id[name])

    def surroundings(self, *without: str) -> Boxes:
        """All collision shapes but those of the robot, planes and the objects ``without``."""
        ignored = [self._env.obj_body_id[name] for name in without]
        return self._boxes(~self.robot_geoms & ~np.isin(self._roots, ignored))

    def _site(self, site: int) -> Frame:
        return Frame(
            position=self._data.site_xpos[site].copy(), rotation=self._data.site_xmat[site].reshape(3, 3).copy()
        )

    def _link(self, joint: str) -> NDArray[np.bool_]:
        """Mask of the geoms that a joint moves."""
        return self._model.geom_bodyid == self._model.jnt_bodyid[self._model.joint(joint).id]

    @property
    def _roots(self) -> NDArray[np.int32]:
        return self._model.body_rootid[self._model.geom_bodyid]

    @property
    def robot_geoms(self) -> NDArray[np.bool_]:
        """[geoms], which are the robot's."""
        bodies = range(self._model.nbody)
        robot = [body for body in bodies if self._model.body(body).name.startswith(_ROBOT_BODIES)]
        return np.isin(self._model.geom_bodyid, robot)

    def _boxes(self, chosen: NDArray[np.bool_]) -> Boxes:
        model, data = self._model, self._data
        solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        geoms = np.flatnonzero(chosen & solid & (model.geom_type != 0))  # Planes have no extent.
        rotation = data.geom_xmat[geoms].reshape(-1, 3, 3)
        return Boxes(
            centers=data.geom_xpos[geoms] + np.einsum("nij,nj->ni", rotation, model.geom_aabb[geoms, :3]),
            rotations=rotation,
            half_sizes=model.geom_aabb[geoms, 3:].copy(),
        )


def parse_goals(goal_state: Iterable[Sequence[str]]) -> tuple[Goal, ...]:
    """LIBERO's ``parsed_problem["goal_state"]``, in the order in which an expert does them.

    Raises:
        UserError: a predicate that experts do not know.
    """
    goals = []
    for predicate, *arguments in goal_state:
        name = predicate.lower()
        if name not in _ORDER or len(arguments) != (2 if name in _PLACEMENTS else 1):
            known = ", ".join(f"{p} ({2 if p in _PLACEMENTS else 1})" for p in _ORDER)
            raise UserError(
                f"the expert cannot play the goal ({' '.join([predicate, *arguments])}): it knows the predicates "
                f"{known}, with so many arguments."
            )
        goals.append(Goal(predicate=name, subject=arguments[0], target=arguments[1] if len(arguments) > 1 else None))
    return tuple(sorted(goals, key=lambda goal: _ORDER[goal.predicate]))


def share_of_target(goals: Sequence[Goal], goal: Goal) -> tuple[int, int]:
    """(index, count) among the placements that share this one's target and stand side by side on it."""
    rivals = [other for other in goals if other.target == goal.target and other.predicate in _PLACEMENTS]
    return rivals.index(goal), len(rivals)
