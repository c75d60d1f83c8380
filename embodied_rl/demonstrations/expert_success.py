"""How well a scripted expert does: success per task over the benchmark's initial states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embodied_rl import seeding
from embodied_rl.contracts import EpisodeRecord
from embodied_rl.demonstrations.expert import Expert
from embodied_rl.envs.base import SimEnv
from embodied_rl.envs.reset_states import task_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What to play."""

    task_ids: Sequence[int] | None
    """None: all of the env's."""
    episodes_per_task: int
    """Initial states, spread evenly over a task's."""
    max_episode_steps: int
    noise_seed: int | None
    """None: no noise. Otherwise episode noise is a function of this and the initial state."""


def reset_states(env: SimEnv, plan: Evaluation) -> list[int]:
    """The initial states that are played, task by task.

    Raises:
        ValueError: a task has fewer initial states than asked for.
    """
    chosen = []
    for task_id, states in task_ranges(env, plan.task_ids).items():
        if not 1 <= plan.episodes_per_task <= len(states):
            raise ValueError(
                f"episodes per task: got {plan.episodes_per_task}, expected 1 to {len(states)}, the number of initial "
                f"states of task {task_id}"
            )
        chosen += [states[int(i * len(states) / plan.episodes_per_task)] for i in range(plan.episodes_per_task)]
    return chosen


def play_episode(env: SimEnv, expert: Expert, reset_state_id: int, plan: Evaluation) -> EpisodeRecord:
    """One episode in slot 0, up to success or the horizon."""
    generator = None if plan.noise_seed is None else seeding.generator(plan.noise_seed, reset_state_id)
    env.reset([0], [reset_state_id])
    expert.reset(0)
    task = env.task(reset_state_id)
    success, steps = False, 0
    while not success and steps < plan.max_episode_steps:
        success = bool(env.step([0], expert.act(0, generator)[None]).success[0])
        steps += 1
    return EpisodeRecord(
        env_id=0,
        task_id=task.task_id,
        instruction=task.instruction,
        reset_state_id=reset_state_id,
        success=success,
        episode_return=float(success),
        episode_length=steps,
    )
