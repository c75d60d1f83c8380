"""The initial state that each env starts from.

Pure functions of the config, of (step, rollout epoch, episode) and of the tasks' weights: nothing is remembered between
calls, so a resumed run needs no cursor, and any number of env workers computes the same list and takes its own part of
it. Lists cover all envs of the run in the order of their env ids; those of one group are neighbours: env ``e`` is in
group ``e // group_size``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.base import SimEnv
from embodied_rl.envs.task_sampling import shares
from embodied_rl.errors import UserError
from embodied_rl.seeding import generator


def task_ranges(sim: SimEnv, task_ids: Sequence[int] | None = None) -> dict[int, range]:
    """Task id -> the ids of its initial states, for ``task_ids`` in the order given.

    None takes all tasks in the simulator's order.

    Raises:
        ValueError: a task that does not exist or is named twice, or an adapter whose states are not ordered by task.
    """
    ranges: dict[int, range] = {}
    start, end = 0, sim.num_reset_states
    while start < end:
        task_id = sim.task(start).task_id
        stop = bisect_left(range(end), True, lo=start, key=lambda i, t=task_id: sim.task(i).task_id != t)
        if task_id in ranges:
            raise ValueError(
                f"{type(sim).__name__}: task {task_id} owns reset states {ranges[task_id]} and again {start}; "
                "an adapter must number its reset states task by task"
            )
        ranges[task_id] = range(start, stop)
        start = stop
    if task_ids is None:
        return ranges
    unknown = sorted(set(task_ids) - set(ranges))
    if unknown or not task_ids or len(set(task_ids)) != len(task_ids):
        raise UserError(
            f"env.task_ids: got {list(task_ids)}, expected some of {list(ranges)}, each once"
            + (f"; {unknown} do not exist" if unknown else "")
        )
    return {task_id: ranges[task_id] for task_id in task_ids}


def after_evaluation(tasks: Mapping[int, range], *, skip: int, key: str) -> dict[int, range]:
    """``tasks`` without each task's first ``skip`` initial states, which are left to evaluation.

    Args:
        key: the configuration's, for the message.

    Raises:
        UserError: a task has no more than those.
    """
    for task_id, states in tasks.items():
        if skip >= len(states):
            raise UserError(
                f"{key}: got {skip}, but task {task_id} has {len(states)} initial states, so none is left to train on; "
                "use a smaller number, such as 0, which trains on what is evaluated"
            )
    return {task_id: states[skip:] for task_id, states in tasks.items()}


def first_lengths(num_envs: int, *, group_size: int, longest: int) -> list[int]:
    """Steps of each env's first episode where they are staggered, by env id: evenly spread up to ``longest``, which the
    last group's is. The members of a group share theirs."""
    groups = num_envs // group_size
    return [-(-longest * (1 + env_id // group_size) // groups) for env_id in range(num_envs)]


def train_reset_states(
    tasks: Mapping[int, range],
    *,
    num_groups: int,
    group_size: int,
    seed: int,
    fixed: bool,
    step: int,
    rollout_epoch: int,
    episode: int = 0,
    weights: Mapping[int, float] | None = None,
) -> NDArray[np.int64]:
    """[num_groups * group_size] reset state ids, equal for all members of a group.

    :func:`shares` says how many groups each task gets. A task's states are drawn without replacement; one is used twice
    only when the task has more groups than states.
    Groups are ordered by task, so that an env worker, which takes neighbouring groups, meets as few scenes as possible.

    Args:
        tasks: from :func:`task_ranges`.
        fixed: draw from ``seed`` alone and so keep the same states for the whole run; else draw anew for each
            (step, rollout_epoch, episode).
        step: training step; 0 with auto-reset, whose episodes belong to none.
        rollout_epoch: which of the step's rollouts; 0 with auto-reset.
        episode: how many episodes the env has finished in the whole run; above 0 only with auto-reset.
        weights: task -> how often it is to be played; None: all alike.
    """
    key = () if fixed else (step, rollout_epoch, episode)
    rng = generator(seed, spawn_key=key)
    counts = shares(num_groups, list(tasks), weights, rng)
    drawn = [_draw(rng, states, int(count)) for states, count in zip(tasks.values(), counts, strict=True)]
    return np.repeat(np.concatenate(drawn), group_size)


def _draw(rng: np.random.Generator, states: range, count: int) -> NDArray[np.int64]:
    """[count] of ``states``, each as often as any other but for the rest."""
    rounds, rest = divmod(count, len(states))
    everything = np.arange(rounds * len(states), dtype=np.int64) % len(states)
    return states.start + np.concatenate([everything, rng.choice(len(states), size=rest, replace=False)])


def eval_reset_states(tasks: Mapping[int, range], *, episodes_per_task: int) -> NDArray[np.int64]:
    """[len(tasks) * episodes_per_task]: the first ``episodes_per_task`` initial states of each task, task by task.

    Raises:
        ValueError: a task has fewer initial states.
    """
    for task_id, states in tasks.items():
        if not 1 <= episodes_per_task <= len(states):
            raise UserError(
                f"env.eval.episodes_per_task: got {episodes_per_task}, expected 1 to {len(states)}, "
                f"the number of initial states of task {task_id}"
            )
    return np.concatenate([np.array(states[:episodes_per_task], dtype=np.int64) for states in tasks.values()])
