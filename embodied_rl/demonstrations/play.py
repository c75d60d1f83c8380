"""Playing episodes: recorded step by step as a policy would see them, or only to see whether an expert succeeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.demonstrations.expert import Expert
from embodied_rl.demonstrations.lerobot.episode import Steps
from embodied_rl.envs.base import SimEnv, SimObs
from embodied_rl.envs.reset_states import task_ranges

_SLOT = 0


class Player(Protocol):
    """Chooses the actions."""

    def start(self, generator: np.random.Generator) -> None:
        """A new episode has begun; all randomness comes from ``generator``."""
        ...

    def act(self, obs: SimObs, instruction: str) -> NDArray[np.float32]:
        """The action [A] for the observation of slot 0; called before every control step."""
        ...


class ExpertPlayer:
    """A scripted expert in slot 0.

    Args:
        varied: the expert adds noise of its own.
    """

    def __init__(self, expert: Expert, *, varied: bool) -> None:
        self._expert, self._varied = expert, varied
        self._generator: np.random.Generator | None = None

    def start(self, generator: np.random.Generator) -> None:
        self._generator = generator if self._varied else None
        self._expert.reset(_SLOT)

    def act(self, obs: SimObs, instruction: str) -> NDArray[np.float32]:
        del obs, instruction  # it knows better
        return self._expert.act(_SLOT, self._generator)


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


class Bursts:
    """Noise that comes in bursts: for ``steps`` steps the same, then none for ``pause`` steps on average. What follows
    is undisturbed, so the player's way back has nothing in it that a policy could not foresee."""

    def __init__(self, scale: float, steps: int, pause: int, generator: np.random.Generator, size: int) -> None:
        self._scale, self._steps, self._pause, self._generator = scale, steps, pause, generator
        self._size, self._left, self._value = size, 0, np.zeros(size)

    def next(self) -> NDArray[np.float64]:
        """[size], zeros between the bursts."""
        if not self._left and self._generator.random() < 1 / (1 + self._pause):
            self._left, self._value = self._steps, self._generator.normal(0.0, self._scale, self._size)
        if not self._left:
            return np.zeros(self._size)
        self._left -= 1
        return self._value


def play(
    sim: SimEnv,
    reset_state_id: int,
    player: Player,
    *,
    generator: np.random.Generator,
    max_steps: int,
    noise: Noise | Bursts | None = None,
    on_step: Callable[[int], None] = lambda steps: None,
) -> Steps:
    """Play from an initial state in slot 0 until the goal holds or the simulator ends the episode, or for ``max_steps``
    steps. Every step is observed, so a chunk of actions may start at any.

    Args:
        generator: of the player.
        noise: added to what is executed, not to what is recorded. Bursts are marked.
        on_step: told how many steps are done.
    """
    sim.reset([_SLOT], [reset_state_id])
    player.start(generator)
    instruction = sim.task(reset_state_id).instruction
    images: dict[str, list[NDArray[np.uint8]]] = {camera: [] for camera in sim.image_shapes}
    states, actions, rewards, success, disturbed, terminated = [], [], [], [], [], False
    for step in range(max_steps):
        obs = sim.observe([_SLOT])
        action = np.clip(player.act(obs, instruction), -1.0, 1.0).astype(np.float32)
        added = np.zeros(sim.action_dim) if noise is None else noise.next()
        executed = np.clip(action + added, -1.0, 1.0).astype(np.float32)
        outcome = sim.step([_SLOT], executed[None])
        for camera, frames in images.items():
            frames.append(obs.images[camera][0])
        states.append(obs.state[0])
        actions.append(action)
        rewards.append(outcome.rewards[0])
        success.append(outcome.success[0])
        disturbed.append(bool(added.any()))
        on_step(step + 1)
        terminated = outcome.terminated is not None and bool(outcome.terminated[0])
        if terminated or outcome.success[0] or (outcome.truncated is not None and outcome.truncated[0]):
            break
    return Steps(
        images={camera: np.stack(frames) for camera, frames in images.items()},
        state=np.stack(states).astype(np.float32),
        actions=np.stack(actions),
        rewards=np.asarray(rewards, dtype=np.float32),
        success=np.asarray(success, dtype=np.bool_),
        disturbed=np.asarray(disturbed, dtype=np.bool_) if isinstance(noise, Bursts) else None,
        terminated=terminated,
    )


def succeeded(sim: SimEnv, steps: Steps, *, use_rel_reward: bool) -> bool:
    """Whether an episode of :func:`play` is a success, as in :class:`ChunkedEnv`: the goal holds at its end, or its
    return is at least the simulator's ``success_return``.

    Args:
        use_rel_reward: the return sums up changes of the simulator's level instead of the level.
    """
    least: float | None = getattr(sim, "success_return", None)
    if steps.success[-1] or least is None:
        return bool(steps.success[-1])
    rewards = np.diff(steps.rewards, prepend=np.float32(0)) if use_rel_reward else steps.rewards
    return bool(np.cumsum(rewards, dtype=np.float64)[-1] >= least)


def spread_states(env: SimEnv, task_ids: Sequence[int] | None, episodes_per_task: int) -> list[int]:
    """Initial states to measure an expert on, task by task, spread evenly over those of each task.

    Raises:
        ValueError: a task has fewer initial states than asked for.
    """
    chosen = []
    for task_id, states in task_ranges(env, task_ids).items():
        if not 1 <= episodes_per_task <= len(states):
            raise ValueError(
                f"episodes per task: got {episodes_per_task}, expected 1 to {len(states)}, the number of initial "
                f"states of task {task_id}"
            )
        chosen += [states[int(i * len(states) / episodes_per_task)] for i in range(episodes_per_task)]
    return chosen


def play_expert(
    env: SimEnv, expert: Expert, reset_state_id: int, *, max_steps: int, noise_seed: int | None = None
) -> EpisodeRecord:
    """The outcome of one of the expert's episodes.

    Args:
        noise_seed: the expert's noise is a function of this and the initial state; None: no noise.
    """
    player = ExpertPlayer(expert, varied=noise_seed is not None)
    generator = np.random.default_rng([noise_seed or 0, reset_state_id])
    steps = play(env, reset_state_id, player, generator=generator, max_steps=max_steps)
    task, success = env.task(reset_state_id), bool(steps.success[-1])
    return EpisodeRecord(
        env_id=0,
        task_id=task.task_id,
        instruction=task.instruction,
        reset_state_id=reset_state_id,
        success=success,
        episode_return=float(success),
        episode_length=len(steps.success),
    )
