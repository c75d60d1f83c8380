"""Play ManiSkill's digital twins and print what happened as JSON: ``python -m tests.envs.twin_probe``.

A process of its own, since ManiSkill reads ``MS_ASSET_DIR`` when it is imported.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams, can_render
from embodied_rl.models.openvla.actions import ActionCodec
from tests.envs.bridge_assets import CARROT, PLATE

STATISTICS = {"action": {"q01": [-0.05] * 3 + [-0.2] * 3 + [0.0], "q99": [0.05] * 3 + [0.2] * 3 + [1.0]}}
STATISTICS["action"]["mask"] = [True] * 6 + [False]  # pyright: ignore[reportArgumentType]
PARAMS: dict[str, Any] = {
    "env_id": "PutCarrotOnPlateInScene-v1",
    "control_mode": "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",
    "reward_mode": "dense",
}


SIBLINGS = (
    "PutSpoonOnTableClothInScene-v1",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1",
    "PutEggplantInBasketScene-v1",
)


def poses(env: ManiSkillEnv, slot: int) -> NDArray[np.float32]:
    """[2,7]: of the object and what it belongs on."""
    inner = env._envs[slot]
    return np.concatenate([inner.objs[name].pose.raw_pose.numpy() for name in inner.obj_names])


def played(env: ManiSkillEnv, slot: int, reset_state_id: int) -> list[float]:
    env.reset([slot], [reset_state_id])
    rng = np.random.default_rng(0)
    for action in rng.uniform(-0.05, 0.05, (6, 7)).astype(np.float32):
        env.step([slot], action[None])
    return [*env.observe([slot]).state[0].tolist(), *poses(env, slot).ravel().tolist()]


def moved(env: ManiSkillEnv, data: list[float]) -> dict[str, list[float]]:
    """What the hand does in the arm's frame after five actions of ``data``, in the data's units, and some rest."""
    codec = ActionCodec(STATISTICS, 32000, "widowx_bridge")
    limits = torch.tensor([0.05] * 3 + [0.2] * 3 + [1.0])
    action = codec.to_env(torch.tensor(data) / limits).numpy()
    rest = codec.to_env(torch.tensor([0.0] * 6 + [data[-1]]) / limits).numpy()
    env.reset([0], [0])
    robot = env._envs[0].agent.robot
    hand = robot.links_map["ee_gripper_link"]

    def frame() -> NDArray[np.float64]:
        pose = robot.pose.inv() * hand.pose
        return pose.to_transformation_matrix()[0].numpy().astype(np.float64)

    before = frame()
    for command in [action] * 5 + [rest] * 10:
        env.step([0], command[None])
    after = frame()
    turn = after[:3, :3] @ before[:3, :3].T
    angles = [turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]
    fingers = robot.get_qpos()[0, -2:]
    return {
        "metres": (after[:3, 3] - before[:3, 3]).tolist(),
        "radians": [float(angle) / 2 for angle in angles],  # of a small turn, about the arm's axes
        "fingers": fingers.tolist(),
    }


def on_the_plate(env: ManiSkillEnv) -> dict[str, Any]:
    """Success and rewards: at the start, with the carrot laid on the plate, and then as if it had been carried."""
    from mani_skill.utils.structs.pose import Pose

    env.reset([0], [0])
    inner, idle = env._envs[0], np.zeros((1, 7), np.float32)
    first = env.step([0], idle)
    above = inner.objs[PLATE].pose.p + torch.tensor([[0.0, 0.0, 0.03]])
    inner.objs[CARROT].set_pose(Pose.create_from_pq(above, torch.tensor([[1.0, 0.0, 0.0, 0.0]])))
    for _ in range(4):
        laid = env.step([0], idle)
    inner.episode_stats["is_src_obj_grasped"][:] = True
    carried = env.step([0], idle)
    outcomes = {"first": first, "laid": laid, "carried": carried}
    return {name: [bool(step.success[0]), float(step.rewards[0])] for name, step in outcomes.items()}


def sibling(env_id: str) -> dict[str, Any]:
    env = ManiSkillEnv(1, ManiSkillParams(**{**PARAMS, "env_id": env_id}), seed=0)
    starts: list[list[float]] = []
    for reset_state_id in range(env.num_reset_states):
        env.reset([0], [reset_state_id])
        starts.append(poses(env, 0)[:, :2].ravel().round(3).tolist())
    step = env.step([0], np.zeros((1, 7), np.float32))
    said = [env.num_reset_states, env.action_dim, env.task(0).instruction, len(env.observe([0]).state[0])]
    env.close()
    return {"said": said, "starts": starts, "outcome": [bool(step.success[0]), float(step.rewards[0])]}


def main() -> None:
    env = ManiSkillEnv(2, ManiSkillParams(**PARAMS), seed=0)
    found: dict[str, Any] = {
        "spaces": [env.num_reset_states, env.action_dim, env.control_hz, env.task(0).instruction],
        "starts": [],
        "episodes": [played(env, 0, 3), played(env, 0, 5), played(env, 0, 3), played(env, 1, 3)],
        "forward": moved(env, [0.02, 0, 0, 0, 0, 0, 1.0]),
        "yaw": moved(env, [0, 0, 0, 0, 0, 0.05, 0.0]),
        "rewards": on_the_plate(env),
        "siblings": {env_id: sibling(env_id) for env_id in SIBLINGS},
    }
    for reset_state_id in range(env.num_reset_states):
        env.reset([0], [reset_state_id])
        found["starts"].append(poses(env, 0)[:, :2].ravel().round(3).tolist())
    env.close()
    if can_render():
        seen = ManiSkillEnv(1, ManiSkillParams(**PARAMS, obs_mode="rgb", camera_height=96, camera_width=128), seed=0)
        seen.reset([0], [0])
        (picture,) = seen.observe([0]).images.values()
        found["pictures"] = [list(seen.image_shapes), list(picture.shape), picture[0, 0, 0].tolist()]
        found["frame"] = list(seen.render([0]).shape)
        found["colours"] = len(np.unique(picture.reshape(-1, 3), axis=0))
        seen.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
