"""Seconds of a training step, from what its parts cost and how its workers are laid out (docs/performance.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one process."""

    wall: float
    cpu: float
    """On cores, of all its threads."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Cost) -> Cost:
        """Of what is left, which takes no less than nothing."""
        return Cost(max(0.0, self.wall - other.wall), max(0.0, self.cpu - other.cpu))

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.wall * factor, self.cpu * factor)


FREE = Cost(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What may be chosen for a run without another result, rounding and random draws aside."""

    serial: bool = False
    env_workers: int
    stages: int
    actor_threads: int
    micro_batch: int | None = None
    """None: the size that fits is found in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a training step asks for, whatever the layout."""

    envs: int
    chunks: int
    """Of a rollout, at most: episodes may end before."""
    rollouts: int
    """Rollout epochs."""
    samples: int
    """Of an actor rank."""
    actor_ranks: int
    rollout_workers: int
    values: bool
    """States are valued after the last chunk."""
    resets: Literal["ahead", "first", "between"]
    """While the actor updates, before a rollout, or with auto-reset where an episode ends."""
    resets_per_env: float
    """In a rollout."""
    runs_ahead: float
    """Share of a step's rollouts that may be played while the actor updates."""
    sync_interval: int
    cores: float
    """That the run may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """What was measured."""

    chunk: Cost
    """An env worker's for a chunk of a stage, its messages included, however many envs take part."""
    chunk_env: Cost
    """What each env adds."""
    crowd: int
    """Env workers that worked at once when these were measured."""
    alone: float
    """What a chunk costs an env worker that works alone, as a multiple of that in the crowd."""
    reset: Cost
    """Of one env."""
    decisions: Sequence[tuple[int, Cost]]
    """Rows of a forward pass -> its cost, ascending."""
    turn: Cost
    """A rollout worker's for a turn of a stage, beside the decision, whoever takes part."""
    turn_lane: Cost
    """What each env worker adds: its message, the answer, and what is recorded."""
    latency: float
    """Seconds of a turn in which neither worker is at it: messages on their way, and waiting for the slowest."""
    calls: float
    """Seconds of a rollout before its env workers begin, and after they have ended."""
    updates: Mapping[tuple[int, int | None], Cost]
    """(Threads, micro-batch) -> of an actor rank's sample, in all epochs."""
    sync: float

    def decision(self, rows: float) -> Cost:
        """Between sizes that were measured, on the line between them; beyond, in proportion."""
        below = [at for at in self.decisions if at[0] <= rows]
        above = [at for at in self.decisions if at[0] > rows]
        if not above:
            return below[-1][1] * (rows / below[-1][0])
        if not below:
            return above[0][1]
        (low, first), (high, second) = below[-1], above[0]
        share = (rows - low) / (high - low)
        return first * (1 - share) + second * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds of a training step."""

    step: float
    rollout: float
    """Of all its rollouts."""
    update: float
    """With resets that go on beside it."""
    sync: float
    limit: str
    """What the rollout waits for: env workers, the policy, turns (each for the other), or cores."""
    cpu: float
    """Of all workers, in seconds on cores: what a step takes whatever else the machine does."""


def forecast(shape: StepShape, costs: UnitCosts, layout: Layout) -> Forecast:
    """The step's seconds in a layout; the formulas are in docs/performance.md."""
    workers, stages, served = layout.env_workers, layout.stages, -(-layout.env_workers // shape.rollout_workers)
    envs = shape.envs / (workers * stages)
    at_once = 1 if layout.serial else min(workers, shape.cores)
    crowding = 1.0 if costs.crowd == 1 else costs.alone + (1 - costs.alone) * (at_once - 1) / (costs.crowd - 1)
    env = (costs.chunk + costs.chunk_env * envs) * crowding
    resets = costs.reset * (crowding * shape.envs / workers * shape.resets_per_env)
    """Of an env worker, in a rollout."""
    if shape.resets == "between":
        env, resets = env + resets * (1 / (shape.chunks * stages)), FREE
    policy = costs.decision(envs * served) + costs.turn + costs.turn_lane * served
    passes = shape.chunks + shape.values
    update = costs.updates[layout.actor_threads, layout.micro_batch] * shape.samples
    sync = costs.sync / shape.sync_interval
    work = stages * (workers * env.cpu * shape.chunks + shape.rollout_workers * policy.cpu * passes)
    of_rollouts, of_updates = shape.rollouts * (work + workers * resets.cpu), shape.actor_ranks * update.cpu
    cpu = of_rollouts + of_updates
    if layout.serial:
        turns = stages * (workers * env.wall * shape.chunks + policy.wall * passes)
        rollout = shape.rollouts * (turns + workers * resets.wall + costs.calls)
        step, limit = rollout + update.wall + sync, "one process"
        return Forecast(step=step, rollout=rollout, update=update.wall, sync=sync, limit=limit, cpu=cpu)
    turn, fill = env.wall + policy.wall + costs.latency, 0.0 if stages == 1 else min(env.wall, policy.wall)
    limits = {
        "env workers": stages * env.wall * shape.chunks + fill,
        "the policy": stages * policy.wall * passes + fill,
        "turns": turn * shape.chunks + policy.wall * (passes - shape.chunks),
        "cores": work / shape.cores,
    }
    limit = max(limits, key=lambda name: limits[name])
    of_resets = max(resets.wall, workers * resets.cpu / shape.cores)
    ahead = shape.resets == "ahead"
    rollout = shape.rollouts * (limits[limit] + costs.calls) + (shape.rollouts - ahead) * of_resets
    together = of_updates + ahead * workers * resets.cpu
    updated = max(update.wall, together / shape.cores, ahead * of_resets)
    share = shape.runs_ahead
    meanwhile = max(share * rollout, updated, (share * of_rollouts + of_updates) / shape.cores)
    step = (1 - share) * rollout + meanwhile + sync
    return Forecast(step=step, rollout=rollout, update=updated, sync=sync, limit=limit, cpu=cpu)
