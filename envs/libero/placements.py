"""Initial states beyond the published ones: objects are placed anew, as LIBERO's own reset places them.

Robot, drawers and knobs are a published state's, and fixtures stay where they are, so what differs is where the objects
stand in the regions of the task's definition, and how they are turned.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.errors import UserError

_ATTEMPTS: Final = 100
"""As many as LIBERO's reset makes."""
_LARGE: Final = 2.0
"""Times the median reach of a scene's objects."""


def drawn_state(env: Any, published: NDArray[np.float64], key: str, *, exchange: bool) -> NDArray[np.float64]:
    """[1+nq+nv]: ``published`` with objects placed anew; a function of the arguments alone.

    Args:
        env: LIBERO's problem environment. Its simulation is left in another state.
        published: time, positions and velocities as LIBERO ships them.
        key: what the places are drawn from.
        exchange: objects may stand in each other's regions.

    Raises:
        UserError: the objects find no room.
    """
    import mujoco
    from robosuite.utils.errors import RandomizationError

    model, data = env.sim.model._model, env.sim.data._data
    state = published.copy()
    positions, velocities = state[1 : 1 + model.nq], state[1 + model.nq :]
    data.qpos[:] = positions
    random = np.random.get_state()
    np.random.seed(zlib.crc32(key.encode()))
    try:
        with _fixtures_at_origin(env) as fixtures:
            mujoco.mj_kinematics(model, data)  # type: ignore[attr-defined]
            for _ in range(_ATTEMPTS):
                try:
                    placements = _placements(env, fixtures, exchange)
                    break
                except RandomizationError:
                    continue
            else:
                raise UserError(
                    f"{key}: objects find no room in {_ATTEMPTS} attempts; set env.init_params.drawn_states=0"
                )
    finally:
        np.random.set_state(random)
    for position, quaternion, body in placements.values():
        if body.name not in env.fixtures_dict:
            joint = env.sim.model.joint_name2id(body.joints[-1])
            place, motion = model.jnt_qposadr[joint], model.jnt_dofadr[joint]
            positions[place : place + 7] = *position, *quaternion
            velocities[motion : motion + 6] = 0.0
    return state


def heights(env: Any, positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """[objects] metres above the floor.

    Args:
        env: LIBERO's problem environment.
        positions: [nq] of the joints.
    """
    model = env.sim.model
    joints = [model.joint_name2id(body.joints[-1]) for body in env.objects_dict.values()]
    return positions[model._model.jnt_qposadr[joints] + 2]


def _placements(env: Any, fixtures: dict[str, Any], exchange: bool) -> dict[str, Any]:
    """Object -> position, quaternion (w x y z) and robosuite's model, ``fixtures`` among them."""
    from unittest import mock  # not when an adapter is imported, which takes longer for it

    placed = dict(fixtures)
    tables = env.placement_initializer
    with _regions_exchanged(env) if exchange else nullcontext():
        for name, sampler in tables.samplers.items():
            if not any(body.name in fixtures for body in sampler.mujoco_objects):
                placed = sampler.sample(fixtures=placed, **(tables.sample_args[name] or {}))
    # Its sampler of objects inside of others starts a debugger where one finds no room.
    with mock.patch("pdb.set_trace"):
        placed = env.conditional_placement_initializer.sample(env.sim, placed)
    return env.conditional_placement_on_objects_initializer.sample(placed)


@contextmanager
def _regions_exchanged(env: Any) -> Iterator[None]:
    """Each object has a region of another on the table, or its own. Which of two bowls is meant their places say, so
    what there are several of stays; so does what is much larger than the others, such as a basket."""
    task = env.parsed_problem
    for place in {name for goal in task["goal_state"] for name in goal[1:]} & task["regions"].keys():
        if task["regions"][place]["target"] not in {*env.objects_dict, *env.fixtures_dict}:
            raise UserError(
                f"exchange_places: {Path(env.bddl_file_name).stem}: the goal {place} is a place on the table, which "
                "stays while the objects move; leave this task out (env.task_ids)"
            )
    alone = {names[0] for names in task["objects"].values() if len(names) == 1}
    samplers = [
        sampler
        for sampler in env.placement_initializer.samplers.values()
        if all(body.name in alone for body in sampler.mujoco_objects)
    ]
    reach = np.array([max(_reach(env, body) for body in sampler.mujoco_objects) for sampler in samplers])
    small = [samplers[i] for i in np.flatnonzero(reach <= _LARGE * np.median(reach))] if samplers else []
    regions = [(sampler.x_ranges, sampler.y_ranges) for sampler in small]
    for sampler, taken in zip(small, np.random.permutation(len(small)), strict=True):
        sampler.x_ranges, sampler.y_ranges = regions[taken]
    try:
        yield
    finally:
        for sampler, (x_ranges, y_ranges) in zip(small, regions, strict=True):
            sampler.x_ranges, sampler.y_ranges = x_ranges, y_ranges


def _reach(env: Any, body: Any) -> float:
    """Metres from an object's middle to its farthest part; robosuite's ``horizontal_radius`` is 2.5 cm for most."""
    model, data = env.sim.model._model, env.sim.data._data
    root = env.sim.model.body_name2id(body.root_body)
    parts = np.flatnonzero(model.body_rootid[model.geom_bodyid] == model.body_rootid[root])
    away = np.linalg.norm((data.geom_xpos[parts] - data.xpos[root])[:, :2], axis=1)
    return float((away + model.geom_rbound[parts]).max())


@contextmanager
def _fixtures_at_origin(env: Any) -> Iterator[dict[str, Any]]:
    """Where the fixtures stand. Meanwhile they are at the origin: LIBERO's samplers add their places to those of their
    sites."""
    model = env.sim.model._model
    bodies = {
        body.name: (env.sim.model.body_name2id(body.root_body), body)
        for sampler in env.placement_initializer.samplers.values()
        for body in sampler.mujoco_objects
        if body.name in env.fixtures_dict
    }
    ids = [number for number, _ in bodies.values()]
    positions, quaternions = model.body_pos[ids].copy(), model.body_quat[ids].copy()
    model.body_pos[ids], model.body_quat[ids] = 0.0, (1.0, 0.0, 0.0, 0.0)
    try:
        yield {
            name: (tuple(position), quaternion, body)
            for (name, (_, body)), position, quaternion in zip(bodies.items(), positions, quaternions, strict=True)
        }
    finally:
        model.body_pos[ids], model.body_quat[ids] = positions, quaternions
