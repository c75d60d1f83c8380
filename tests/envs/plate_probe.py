"""Play :class:`PutOnPlateEnv` on stand-ins and print what happened: ``python -m tests.envs.plate_probe ASSETS``."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

from embodied_rl.envs.maniskill import can_render
from embodied_rl.envs.put_on_plate import PutOnPlateEnv, PutOnPlateParams


def played(env: PutOnPlateEnv, slot: int, state: int) -> list[float]:
    env.reset([slot], [state])
    for action in np.random.default_rng(0).uniform(-0.05, 0.05, (4, 7)).astype(np.float32):
        env.step([slot], action[None])
    objects = env._envs[slot].objs.values()
    return [*env.observe([slot]).state[0].tolist(), *(x for thing in objects for x in thing.pose.raw_pose[0].tolist())]


def shown(env: PutOnPlateEnv, state: int) -> dict[str, Any]:
    env.reset([0], [state])
    thing, plate = env._envs[0].objs.values()
    return {
        "names": list(env._envs[0].objs),
        "instruction": env.task(state).instruction,
        "places": [*thing.pose.p[0, :2].tolist(), *plate.pose.p[0, :2].tolist()],
        "heights": [float(thing.pose.p[0, 2]), float(plate.pose.p[0, 2])],
    }


def laid(env: PutOnPlateEnv, beside: float) -> bool:
    """Success after the object was laid on the plate, so far from its middle."""
    from mani_skill.utils.structs.pose import Pose

    env.reset([0], [0])
    thing, plate = env._envs[0].objs.values()
    above = plate.pose.p + torch.tensor([[0.0, beside, 0.007]])
    thing.set_pose(Pose.create_from_pq(above, torch.tensor([[1.0, 0.0, 0.0, 0.0]])))
    for _ in range(3):
        step = env.step([0], np.zeros((1, 7), np.float32))
    return bool(step.success[0])


def main() -> None:
    params: dict[str, Any] = {"assets": sys.argv[1], "num_reset_states": 160}
    env = PutOnPlateEnv(2, PutOnPlateParams(**params), seed=0)
    found: dict[str, Any] = {
        "count": env.num_reset_states,
        "tasks": sorted({env.task(state).task_id for state in range(env.num_reset_states)}),
        "tables": sorted({env.start(state).table for state in range(env.num_reset_states)}),
        "shown": [shown(env, state) for state in (0, 1, 10, 159)],
        "episodes": [played(env, 0, 33), played(env, 0, 71), played(env, 0, 33), played(env, 1, 33)],
        "laid": [laid(env, 0.0), laid(env, 0.12)],
    }
    env.close()
    test = PutOnPlateEnv(1, PutOnPlateParams(**params, objects="test"), seed=0)
    found["test"] = {
        "instructions": sorted({test.task(state).instruction for state in range(test.num_reset_states)}),
        "tables": sorted({test.start(state).table for state in range(test.num_reset_states)}),
    }
    test.close()
    if can_render():
        params |= {"obs_mode": "rgb", "camera_height": 96, "camera_width": 128}
        seen = PutOnPlateEnv(2, PutOnPlateParams(**params), seed=0)
        seen.reset([0, 1], [0, 159])
        (pictures,) = seen.observe([0, 1]).images.values()
        found["blues"] = [[seen.start(state).table, int(pictures[slot, 0, 0, 2])] for slot, state in ((0, 0), (1, 159))]
        found["cameras"] = seen.image_shapes
        seen.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
