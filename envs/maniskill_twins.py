"""ManiSkill's digital twins: scenes of BridgeData V2 with the photographed table as the background.

Li et al., "Evaluating Real-World Robot Manipulation Policies in Simulation" (SIMPLER), arXiv:2405.05941. Unlike other
tasks they have only pictures, from one camera of 640 by 480 pixels, no reward, and a list of initial states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_PICTURE_MODE = "rgb+segmentation"
_MOST_REWARD = 1.2


def is_twin(task: type) -> bool:
    """Whether a task of ManiSkill's is a digital twin."""
    from mani_skill.envs.tasks.digital_twins.base_env import BaseDigitalTwinEnv

    return issubclass(task, BaseDigitalTwinEnv)


def with_states(twin: Any, can_render: bool) -> Any:
    """The class of a digital twin that has states, with the poses of its two objects, and rewards, too.

    Args:
        can_render: False: the photograph is not laid behind the scene, since there are no pictures.
    """
    added: dict[str, Any] = {
        "SUPPORTED_OBS_MODES": ("state", *twin.SUPPORTED_OBS_MODES),
        "SUPPORTED_REWARD_MODES": ("normalized_dense", "dense", "sparse", *twin.SUPPORTED_REWARD_MODES),
        "_get_obs_extra": _poses,
        "compute_dense_reward": _reward,
        "compute_normalized_dense_reward": lambda env, **seen: _reward(env, **seen) / _MOST_REWARD,
    }
    if not can_render:
        added["rgb_overlay_mode"] = "none"
    return type(twin.__name__, (twin,), added)


def _poses(env: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    """Of what only a simulator knows, where the observation mode has it: [n,7] each."""
    names = {"source": env.source_obj_name, "target": env.target_obj_name} if env.obs_mode_struct.use_state else {}
    return {name: env.objs[thing].pose.raw_pose for name, thing in names.items()}


def _reward(env: Any, info: Mapping[str, Any], **_: Any) -> Any:
    """[n]: 0.1 once the object was grasped, 0.1 more once it was held for five steps, 1 more while it lies where it
    belongs. Rewards of Liu et al. 2025 (arXiv:2505.19789), whose policies learned from them."""
    grasped = info["is_src_obj_grasped"]
    return 0.1 * grasped.float() + 0.1 * info["consecutive_grasp"].float() + (info["success"] & grasped).float()


def num_states(env: Any) -> int | None:
    """How many initial states the task lists, ``episode_id`` of its resets; None: it draws them."""
    positions, turns = (getattr(env, name, None) for name in ("xyz_configs", "quat_configs"))
    return None if positions is None or turns is None else len(positions) * len(turns)


def pictures(env: Any, height: int, width: int) -> Mapping[str, Any]:
    """Camera -> uint8 [n,height,width,3], the scene before the photograph.

    A camera's lens is given for its own size, so it renders at that and the picture is made smaller by area.
    """
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    mode, struct = env._obs_mode, env.obs_mode_struct
    env._obs_mode, env.obs_mode_struct = _PICTURE_MODE, parse_obs_mode_to_struct(_PICTURE_MODE)
    try:
        seen = env._get_obs_sensor_data()
    finally:
        env._obs_mode, env.obs_mode_struct = mode, struct
    return {
        camera: np.stack([_smaller(picture, height, width) for picture in textures["rgb"].cpu().numpy()])
        for camera, textures in seen.items()
    }


def _smaller(picture: NDArray[Any], height: int, width: int) -> NDArray[np.uint8]:
    image = Image.fromarray(picture.astype(np.uint8))
    return np.asarray(image.resize((width, height), Image.Resampling.BOX))
