"""Stable-Baselines3 on vectors of Gymnasium envs, such as ``gymnasium.make_vec("embodied_rl/libero_spatial-v0")``.

SB3 has vectors of its own kind and steps the single envs in them one by one; :class:`Sb3VecEnv` gives it one of
Gymnasium's as it is. Needs ``stable-baselines3``. See docs/gymnasium.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import Wrapper
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from embodied_rl.errors import UserError

_FINAL = ("final_obs", "final_info")


class Sb3VecEnv(VecEnv):
    """A Gymnasium vector as SB3's ``VecEnv``; ``VecMonitor`` around it counts returns.

    Attributes are the vector's, which all envs share; there are no single envs whose methods could be called.

    Raises:
        UserError: ``envs`` does not start the next episode in the step that ends one, as SB3 has to have it.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise UserError(
                f"Sb3VecEnv: got a vector with autoreset_mode {mode}, expected SAME_STEP; for vectors of Gymnasium's "
                'own: make_vec(..., vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP})'
            )
        self._envs, self._actions = envs, np.empty(0)
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        seeded = any(seed is not None for seed in self._seeds)
        seeds: Any = self._seeds if seeded else None  # gymnasium's annotation knows one number alone
        options = self._options[0]
        if any(own != options for own in self._options):
            raise UserError(
                f"Sb3VecEnv.set_options: got {self._options}, expected one dict for all envs; a number for each of the "
                "project's envs is {'reset_state_id': [7, 8]}"
            )
        obs, infos = self._envs.reset(seed=seeds, options=options or None)
        self.reset_infos = [_of(infos, i) for i in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return obs

    def step_async(self, actions: NDArray[Any]) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        obs, rewards, terminated, truncated, infos = self._envs.step(self._actions)
        dones, found = terminated | truncated, []
        for i in range(self.num_envs):
            info = _of(infos, i)
            if dones[i]:
                self.reset_infos[i] = {key: value for key, value in info.items() if key not in _FINAL}
                info = {**_of(infos["final_info"], i), "terminal_observation": info["final_obs"]}
            info["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
            found.append(info)
        return obs, np.asarray(rewards, np.float32), dones, found

    def close(self) -> None:
        self._envs.close()

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        frames: Any = self._envs.render()
        return [None] * self.num_envs if frames is None else list(frames)

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        return [getattr(self._envs, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        if len(list(self._get_indices(indices))) != self.num_envs:
            raise UserError(f"Sb3VecEnv.set_attr: {attr_name!r} is one for all envs, so indices must be left out")
        setattr(self._envs, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: int | Iterable[int] | None = None, **method_kwargs: Any
    ) -> list[Any]:
        raise UserError(
            f"Sb3VecEnv.env_method: got {method_name!r}, but a vector has no single envs to call it on; SB3's "
            "DummyVecEnv of gymnasium.make(...) has"
        )

    def env_is_wrapped(
        self, wrapper_class: type[Wrapper[Any, Any, Any, Any]], indices: int | Iterable[int] | None = None
    ) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))


def _of(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """What a vector's infos tell of one env: where ``_key`` says that it has ``key``."""
    return {
        key: _of(value, index) if isinstance(value, dict) else value[index]
        for key, value in infos.items()
        if f"_{key}" in infos and infos[f"_{key}"][index]
    }
