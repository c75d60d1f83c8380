"""Initial states beyond the published ones: objects are placed anew, as LIBERO's own reset places them.

Robot, drawers and knobs are a published state's, and fixtures stay where they are, so what differs is where the objects
stand in the regions of the task's definition, and how they are turned.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from embodied_rl.errors import UserError

_ATTEMPTS: Final = 100
"""As many as LIBERO's reset makes."""


def drawn_state(env: Any, published: NDArray[np.float64], key: str) -> NDArray[np.float64]:
    """[1+nq+nv]: ``published`` with objects placed anew; a function of the arguments alone.

    Args:
        env: LIBERO's problem environment. Its simulation is left in another state.
        published: time, positions and velocities as LIBERO ships them.
        key: what the places are drawn from.

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
            mujoco.mj_kinematics(model, data)
            for _ in range(_ATTEMPTS):
                try:
                    placements = _placements(env, fixtures)
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


def _placements(env: Any, fixtures: dict[str, Any]) -> dict[str, Any]:
    """Object -> position, quaternion (w x y z) and robosuite's model, ``fixtures`` among them."""
    placed = dict(fixtures)
    tables = env.placement_initializer
    for name, sampler in tables.samplers.items():
        if not any(body.name in fixtures for body in sampler.mujoco_objects):
            placed = sampler.sample(fixtures=placed, **(tables.sample_args[name] or {}))
    # Its sampler of objects inside of others starts a debugger where one finds no room.
    with mock.patch("pdb.set_trace"):
        placed = env.conditional_placement_initializer.sample(env.sim, placed)
    return env.conditional_placement_on_objects_initializer.sample(placed)


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
