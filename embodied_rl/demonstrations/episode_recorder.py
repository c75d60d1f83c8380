"""Plays one episode, and keeps every step of it as a policy would see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodied_rl.demonstrations.lerobot.episode import Steps
from embodied_rl.envs.base import SimEnv, SimObs

_SLOT = 0


class Player(Protocol):
    """Chooses the actions."""

    def start(self, generator: np.random.Generator) -> None:
        """A new episode has begun; all randomness comes from ``generator``."""
        ...

    def act(self, obs: SimObs, instruction: str) -> NDArray[np.float32]:
        """The action [A] for what slot 0 shows; called before every control step."""
        ...


class Noise:
    """Noise on executed actions that remembers: n' = c n + sqrt(1 - c²) σ ε, so its deviation is σ at all times."""

    def __init__(self, scale: float, correlation: float, generator: np.random.Generator, size: int) -> None:
        self._scale, self._correlation, self._generator = scale, correlation, generator
        self._value = generator.normal(0.0, scale, size) if scale else np.zeros(size)

    def next(self) -> NDArray[np.float64]:
        """[size]."""
        value = self._value
        if self._scale:
            fresh = self._generator.normal(0.0, self._scale, value.shape)
            self._value = self._correlation * value + np.sqrt(1 - self._correlation**2) * fresh
        return value


def play(
    sim: SimEnv,
    reset_state_id: int,
    player: Player,
    *,
    generator: np.random.Generator,
    noise: Noise,
    max_steps: int,
    on_step: Callable[[int], None],
) -> Steps:
    """Play from an initial state in slot 0 until the goal holds, or for ``max_steps`` steps. Every step is observed, so
    a chunk of actions may start at any.

    Args:
        generator: of the player.
        noise: added to what is executed, not to what is recorded.
        on_step: told how many steps are done.
    """
    sim.reset([_SLOT], [reset_state_id])
    player.start(generator)
    instruction = sim.task(reset_state_id).instruction
    images: dict[str, list[NDArray[np.uint8]]] = {camera: [] for camera in sim.image_shapes}
    states, actions, rewards, success = [], [], [], []
    for step in range(max_steps):
        obs = sim.observe([_SLOT])
        action = np.clip(player.act(obs, instruction), -1.0, 1.0).astype(np.float32)
        executed = np.clip(action + noise.next(), -1.0, 1.0).astype(np.float32)
        outcome = sim.step([_SLOT], executed[None])
        for camera, frames in images.items():
            frames.append(obs.images[camera][0])
        states.append(obs.state[0])
        actions.append(action)
        rewards.append(outcome.rewards[0])
        success.append(outcome.success[0])
        on_step(step + 1)
        if outcome.success[0]:
            break
    return Steps(
        images={camera: np.stack(frames) for camera, frames in images.items()},
        state=np.stack(states).astype(np.float32),
        actions=np.stack(actions),
        rewards=np.asarray(rewards, dtype=np.float32),
        success=np.asarray(success, dtype=np.bool_),
    )
