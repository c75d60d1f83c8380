"""The project's envs as lerobot's EnvHub has them: ``{suite: {task_id: vector}}``. See docs/gymnasium.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from embodied_rl.gymnasium_envs import PlatformEnv


class LerobotEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One env with lerobot's names: ``pixels`` (camera -> image) and ``agent_pos``; after ``reset``, the instruction
    as ``task`` and ``task_description``."""

    def __init__(self, env: PlatformEnv) -> None:
        super().__init__(env)
        self.task = self.task_description = ""
        self._max_episode_steps = env.max_episode_steps
        space = env.observation_space
        cameras = {key: part for key, part in space.items() if key != "state"} if isinstance(space, spaces.Dict) else {}
        named: dict[str, spaces.Space[Any]] = {"agent_pos": space["state"] if isinstance(space, spaces.Dict) else space}
        self.observation_space = spaces.Dict({**named, "pixels": spaces.Dict(cameras)} if cameras else named)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self.task = self.task_description = info["instruction"]
        return _named(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, *outcome = self.env.step(action)
        return (_named(obs), *outcome)  # type: ignore[return-value]


def vectors(
    preset: str,
    n_envs: int = 1,
    use_async_envs: bool = False,
    *,
    task_ids: Sequence[int] = (0,),
    episode_steps: int | None = None,
    **init_params: Any,
) -> dict[str, dict[int, VectorEnv[Any, Any, Any]]]:
    """What a hub's ``make_env(n_envs, use_async_envs)`` has to return.

    Args:
        preset: the choice of ``env``, such as libero_spatial.
        n_envs: envs of each task, one simulator each.
        use_async_envs: in processes of their own. They start from a server that has drawn nothing (``forkserver``): a
            fork of a process with a rendering context would wait for ever. So a script needs a ``__main__`` guard, and
            a Gymnasium env that the script registers an id with its module, ``module:id``.
        task_ids: tasks of the suite.
        episode_steps: as of :class:`~embodied_rl.gymnasium_envs.PlatformEnv`; libero_10 has 520 in publications.
        init_params: the adapter's own options (``env.init_params``).
    """
    kind: Any = partial(AsyncVectorEnv, context="forkserver") if use_async_envs else SyncVectorEnv

    def of_task(task_id: int) -> VectorEnv[Any, Any, Any]:
        make: Callable[[], Any] = partial(_make, preset, task_id, episode_steps, init_params)
        return kind([make] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    return {preset: {task_id: of_task(task_id) for task_id in task_ids}}


def _make(preset: str, task_id: int, episode_steps: int | None, init_params: dict[str, Any]) -> LerobotEnv:
    fixed: dict[str, Any] = {"task_id": task_id, "render_mode": "rgb_array", "episode_steps": episode_steps}
    return LerobotEnv(PlatformEnv(preset, **fixed, **init_params))


def _named(obs: Any) -> dict[str, Any]:
    if not isinstance(obs, dict):
        return {"agent_pos": obs}
    return {"agent_pos": obs["state"], "pixels": {key: part for key, part in obs.items() if key != "state"}}
