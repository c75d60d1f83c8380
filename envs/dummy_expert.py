"""The expert for point reaching: straight to the goal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.base import SimEnv
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.errors import UserError

_NOISE = 0.3
"""Standard deviation of the noise on each action."""


class DummyExpert:
    """Plays :class:`~embodied_rl.envs.dummy.DummyEnv`; a :class:`~embodied_rl.demonstrations.expert.Expert`."""

    def __init__(self, env: SimEnv) -> None:
        if not isinstance(env, DummyEnv):
            raise UserError(f"DummyExpert: got a {type(env).__name__}, expected a DummyEnv: it plays env_type dummy")
        self._env = env
        self._slots: set[int] = set()

    def reset(self, slot: int) -> None:
        self._slots.add(slot)

    def act(self, slot: int, generator: np.random.Generator | None) -> NDArray[np.float32]:
        if slot not in self._slots:
            raise RuntimeError(f"act: the expert has no episode in slot {slot}; call reset({slot}) first")
        position, goal = np.split(self._env.observe([slot]).state[0], 2)
        action = (goal - position) / self._env.step_size
        if generator is not None:
            action = np.clip(action, -1.0, 1.0) + generator.normal(0.0, _NOISE, action.shape)
        return np.clip(action, -1.0, 1.0).astype(np.float32)
