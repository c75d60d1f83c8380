"""Unit costs of a run, measured with its own simulators, policy and update: a few chunks, played for no training."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch

from embodied_rl.algorithms.catalog import LEARNERS
from embodied_rl.contracts import EnvObs, RolloutStart, Spaces, Trajectory
from embodied_rl.envs.base import adapter_class
from embodied_rl.envs.episode_queue import EpisodeQueue
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.plan import RunPlan
from embodied_rl.runtime.worker import Backend, Worker, WorkerContext, WorkerGroup
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.embodied.forecast import FREE, Cost, UnitCosts
from embodied_rl.tasks.wiring import Wiring
from embodied_rl.training.micro_batch import MicroBatch
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker
from embodied_rl.workers.env_stage import Stage
from embodied_rl.workers.rollout import RolloutWorker

BUDGET_S: Final = 2.0
"""Seconds that each measurement may take, if it takes no longer once."""
_CHUNKS: Final = 3
"""Fewest chunks of a rollout: what follows the first one is like the rest."""
_MOST: Final = 8
"""Repetitions of a measurement."""
_ONCE: Final = ("reset", "acquire", "release")
"""Phases of an env worker beside its chunks."""
_PER_EPOCH: Final = ("update", "critic")
"""Phases of an update that each epoch repeats."""


def _undisturbed() -> float:
    """A clock that stands still while this process' main thread could work but has no core: other programs have it."""
    return time.perf_counter() - _delay()


def _delay(file: Path = Path("/proc/self/schedstat")) -> float:
    """Seconds so far; 0 where the kernel does not count."""
    try:
        return int(file.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one worker did in a rollout."""

    whole: Cost
    disturbed: float
    """Seconds that other programs took."""
    phases: dict[str, Cost]
    waits: list[float]
    """Seconds of each wait for the other side."""

    def but(self, *names: str) -> Cost:
        """Its time beside these phases."""
        return self.whole - sum((self.phases.get(name, FREE) for name in names), FREE)


class _Clock:
    """Takes down a worker's phases."""

    def __init__(self) -> None:
        self._phases: defaultdict[str, list[Cost]] = defaultdict(list)
        self.timer = PhaseTimer(_undisturbed, ended=self._note)

    def _note(self, name: str, start: float, end: float, cpu: float) -> None:
        self._phases[name].append(Cost(end - start, cpu))

    @contextmanager
    def rollout(self) -> Iterator[Callable[[], Played]]:
        self._phases.clear()
        begun, before = _now(), _delay()
        yield lambda: Played(
            whole=_now() - begun,
            disturbed=_delay() - before,
            phases={name: sum(spent, FREE) for name, spent in self._phases.items()},
            waits=[spent.wall for spent in self._phases["wait"]],
        )


def _now() -> Cost:
    return Cost(_undisturbed(), time.process_time())


class EnvPilot(EnvWorker):
    """Plays rollouts of any length, in some of its envs."""

    def __init__(self, context: WorkerContext, **arguments: Any) -> None:
        super().__init__(context, **arguments)
        self._clock = _Clock()
        self._timer = self._clock.timer
        self._envs = 0

    async def play(self, *, step: int, chunks: int, envs: int, workers: int) -> Played:
        """A rollout of so many chunks in the first ``envs`` envs of each of the first ``workers`` workers."""
        self._envs = envs if self.context.rank < workers else 0
        steps = replace(self._config.train, max_steps_per_rollout_epoch=chunks * self._chunk)
        self._config = replace(self._config, train=steps)
        with self._clock.rollout() as played:
            await self.interact(step=step)
            return played()

    def _episodes(self, stage: Stage, step: int, epochs: range) -> EpisodeQueue:
        states = super()._episodes(stage, step, epochs).states
        return EpisodeQueue([s if i < self._envs else None for i, s in enumerate(states)], stage.env_ids)


class RolloutPilot(RolloutWorker):
    """Serves them, and acts on as many observations at once as it is asked to."""

    def __init__(self, context: WorkerContext, **arguments: Any) -> None:
        super().__init__(context, **arguments)
        self._clock = _Clock()
        self._timer = self._clock.timer
        self._seen: EnvObs | None = None

    async def play(self, *, step: int) -> Played:
        with self._clock.rollout() as played:
            await self.serve(mode="train", step=step)
            return played()

    def _decide(self, turns: Any, *args: Any, **options: Any) -> Any:
        starts = [turn.obs for turn in turns.values() if isinstance(turn, RolloutStart)]
        if starts:
            self._seen = EnvObs.concatenate(starts)
        return super()._decide(turns, *args, **options)

    def decide(self, rows: int) -> Cost:
        """One forward pass on so many observations."""
        seen = self._seen
        assert seen is not None
        obs = EnvObs.concatenate([seen] * -(-rows // len(seen))).rows(slice(0, rows))
        turns = {(0, 0): RolloutStart(obs=obs, group_ids=None, rollout_epoch=0)}

        def act() -> None:
            self._decide(turns, "train", 0)
            if self.context.device != "cpu":
                torch.cuda.synchronize(self.context.device)

        act()
        begun = _now()
        act()
        once = _now() - begun
        count = max(2, min(_MOST, int(BUDGET_S / 4 / max(once.wall, 1e-9))))
        costs = []
        for _ in range(count):
            begun = _now()
            act()
            costs.append(_now() - begun)
        self._seen = seen
        return _middle(costs)


class _Learner(ActorWorker):
    """What a pilot's actor does beside: the worker is of the run's own learner."""

    def __init__(self, context: WorkerContext, **arguments: Any) -> None:
        super().__init__(context, **arguments)
        self._kept: list[Trajectory] = []

    async def take(self, *, step: int, senders: int) -> None:
        """Receive a rollout that so many workers send."""
        self._numbers = replace(self._numbers, senders=senders)
        self._scores_ahead = False  # that is part of what learning costs
        await self.receive(step=step)
        self._kept = self._received

    def learn(self, *, threads: int, micro_batch: int | None, samples: int, epochs: int) -> Cost:
        """A sample's share of an update on about ``samples`` of this rank, or fewer where that takes too long."""
        torch.set_num_threads(threads)
        if micro_batch is not None:
            self._updater._micro_batch = MicroBatch(micro_batch, max_tokens=self._config.max_tokens_per_micro_batch)
        self._numbers = replace(self._numbers, groups=2**31)  # all that there are
        first = self._update_once(1, epochs)
        copies = max(1, min(samples // first[1], int(BUDGET_S / max(first[0].wall, 1e-9))))
        costs: list[Cost] = []
        while len(costs) < 2 or (len(costs) < _MOST and sum(costs, FREE).wall < BUDGET_S):
            costs.append(self._update_once(copies, epochs)[0])
        return _middle(costs) * (1 / (copies * first[1]))

    def _update_once(self, copies: int, epochs: int) -> tuple[Cost, int]:
        self._received = [
            replace(kept, rollout_epoch=kept.rollout_epoch + copy, group_ids=kept.group_ids + (copy << 32))
            for copy in range(copies)
            for kept in self._kept
        ]
        count = sum(int(kept.valid.any(-1).sum()) for kept in self._received)
        begun = _now()
        seconds = self.update(step=0).seconds
        cost = _now() - begun
        repeated = sum(seconds.get(phase, 0.0) for phase in _PER_EPOCH) / sum(seconds.values())
        return cost * (1 + (epochs - 1) * repeated), max(1, count)


def learning(learner: str, context: WorkerContext, **arguments: Any) -> Worker:
    """An actor's worker that can do what :class:`_Learner` does, too."""
    pilot: Any = type("ActorPilot", (_Learner, LEARNERS[learner].load()), {})
    return pilot(context, **arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """A rollout's costs."""

    chunk: Cost
    """Of an env worker."""
    reset: Cost
    """Of an env worker."""
    turn: Cost
    """Of a rollout worker."""
    latency: float
    """As of :class:`UnitCosts`."""

    @staticmethod
    def of(served: Sequence[Played], played: Sequence[Played], chunks: int, passes: int) -> _Turns:
        turn = _mean([one.but("wait", "load", "offload") for one in served]) * (1 / passes)
        wait = fmean(median(one.waits[1:] or one.waits) for one in played)
        return _Turns(
            chunk=_mean([one.but(*_ONCE, "wait") for one in played]) * (1 / chunks),
            reset=_mean([one.phases.get("reset", FREE) for one in played]),
            turn=turn,
            latency=max(0.0, wait - turn.wall - fmean(one.disturbed for one in served) / passes),
        )

    @staticmethod
    def median(found: Sequence[_Turns]) -> _Turns:
        chunk, reset, turn = (_middle([getattr(one, name) for one in found]) for name in ("chunk", "reset", "turn"))
        return _Turns(chunk=chunk, reset=reset, turn=turn, latency=median(one.latency for one in found))


def _slowest(costs: Sequence[Cost]) -> Cost:
    return max(costs, key=lambda cost: cost.wall)


def _mean(costs: Sequence[Cost]) -> Cost:
    return sum(costs, FREE) * (1 / len(costs))


def _middle(costs: Sequence[Cost]) -> Cost:
    return Cost(median(cost.wall for cost in costs), median(cost.cpu for cost in costs))


class PilotWiring(Wiring[EmbodiedConfig]):
    """The run's three groups, as pilots."""

    def connect(self) -> tuple[WorkerGroup, ...]:
        self.make_channels(lanes=True)
        learner = partial(learning, self.config.algorithm.learner)
        env, rollout, actor = self.backend.launch(
            [self.group("env", EnvPilot), self.group("rollout", RolloutPilot), self.group("actor", learner)]
        )
        spaces: Spaces = env.call(EnvWorker.setup, train=True).wait()[0]
        spec = self.spec(spaces)
        ready = [rollout.call(RolloutWorker.setup, spec), actor.call(ActorWorker.setup, spec)]
        for handle in ready:
            handle.wait()
        return env, rollout, actor


def pilot_config(config: EmbodiedConfig, envs: int) -> EmbodiedConfig:
    """The same simulators, policy and learner for so many envs. An update is one epoch on one mini-batch."""
    train, algorithm = config.env.train, config.algorithm
    return replace(
        config,
        env=replace(
            config.env,
            train=replace(
                train,
                total_num_envs=envs,
                auto_reset=False,
                stagger=False,
                task_sampling="uniform" if train.task_sampling == "success" else train.task_sampling,
                video_cfg=replace(train.video_cfg, save_video=False),
            ),
        ),
        algorithm=replace(
            algorithm,
            rollout_epoch=1,
            update_epoch=1,
            n_minibatches=1,
            filter_rewards=False,
            max_resample_rounds=0,
            early_stop_imp_ratio=None,
            critic_warmup_steps=0,
            replay=replace(algorithm.replay, learning_starts=0, random_chunks=0),
        ),
        actor=replace(config.actor, global_batch_size=None, skip_zero_advantages=False),
        rollout=replace(config.rollout, max_staleness=0, interruptible=False, chunks_ahead=None),
        runner=replace(config.runner, resume_dir=None, recover="never", trace_steps=[]),
    )


class Pilot:
    """Measures, step by step.

    Args:
        plan: of :func:`pilot_config`, with one stage.
        chunks: most of a rollout.
        say: told what it is at.
    """

    def __init__(
        self, plan: RunPlan[EmbodiedConfig], backend: Backend, chunks: int, say: Callable[[str], None]
    ) -> None:
        self._workers, self._most, self._say = plan.world_size("env"), chunks, say
        self._values = plan.records_unacted or plan.values_per_chunk > 0
        self._lane_envs = plan.config.env.train.total_num_envs // self._workers
        self._served = -(-self._workers // plan.world_size("rollout"))
        self._batched = adapter_class(plan.config.env.env_type).batched
        say("starting workers")
        self._env, self._rollout, self._actor = PilotWiring(plan, backend).connect()
        self._step = self._version = 0
        self._calls = float("inf")

    def measure(
        self, *, rows: Sequence[int], updates: Sequence[tuple[int, int | None]], samples: int, epochs: int
    ) -> UnitCosts:
        """Play, decide and update.

        Args:
            rows: sizes of forward passes.
            updates: (threads, micro-batch) of the actor.
            samples: of a mini-batch, on a rank.
            epochs: of an update.
        """
        self._sync()
        whole = self._lane_envs, self._workers
        self._say(f"playing in {whole[0] * whole[1]} envs")
        self._play(min(_CHUNKS, self._most), *whole)  # what is built once
        together = self._plays(*whole)
        of_one = self._plays(1, self._workers) if self._lane_envs > 1 else together
        lone = self._plays(self._lane_envs, 1) if self._workers > 1 else together
        chunk, one = together.chunk, of_one.chunk
        each = FREE if self._batched else chunk
        if self._lane_envs > 1:
            each = (chunk - one) * (1 / (self._lane_envs - 1))
        own = self._lane_envs * self._served
        self._say("deciding")
        decisions = [
            (count, _slowest(self._rollout.call(RolloutPilot.decide, count).wait()))
            for count in sorted({own, self._lane_envs, *rows})
        ]
        beside, by_one = together.turn - dict(decisions)[own], lone.turn - dict(decisions)[self._lane_envs]
        lane = (beside - by_one) * (1 / (self._served - 1)) if self._served > 1 else FREE
        self._say("updating")
        self._play(min(_CHUNKS, self._most), *whole)  # the newest is trained on
        learned = {
            (threads, size): _slowest(
                self._actor.call(
                    _Learner.learn, threads=threads, micro_batch=size, samples=samples, epochs=epochs
                ).wait()
            )
            for threads, size in updates
        }
        return UnitCosts(
            chunk=chunk - each * self._lane_envs,
            chunk_env=each,
            crowd=self._workers,
            alone=lone.chunk.wall / max(chunk.wall, 1e-9),
            reset=together.reset * (1 / self._lane_envs),
            decisions=decisions,
            turn=beside - lane * self._served,
            turn_lane=lane,
            latency=together.latency,
            calls=self._calls,
            updates=learned,
            sync=min(self._sync() for _ in range(4)),
        )

    def _sync(self) -> float:
        """Seconds of a version's way to the rollout workers."""
        begun = time.perf_counter()
        loaded = self._rollout.call(RolloutWorker.load_weights, self._version)
        self._actor.call(ActorWorker.publish_weights, self._version).wait()
        loaded.wait()
        self._version += 1
        return time.perf_counter() - begun

    def _play(self, chunks: int, envs: int, workers: int) -> _Turns:
        step, self._step = self._step, self._step + 1
        begun = time.perf_counter()
        calls = [
            self._rollout.call(RolloutPilot.play, step=step),
            self._env.call(EnvPilot.play, step=step, chunks=chunks, envs=envs, workers=workers),
            self._actor.call(_Learner.take, step=step, senders=workers),
        ]
        served, played, _ = (call.wait() for call in calls)
        spent = time.perf_counter() - begun - max(one.whole.wall + one.disturbed for one in played)
        self._calls = max(0.0, min(self._calls, spent))  # what disturbs comes on top
        return _Turns.of(served[:workers], played[:workers], chunks, chunks + self._values)

    def _plays(self, envs: int, workers: int) -> _Turns:
        """The median of several rollouts."""
        few = min(_CHUNKS, self._most)
        begun = time.perf_counter()
        self._play(few, envs, workers)
        took = (time.perf_counter() - begun) / few
        chunks = max(few, min(self._most, int(BUDGET_S / took)))
        count = min(_MOST, max(1, int(BUDGET_S / (took * chunks))))
        return _Turns.median([self._play(chunks, envs, workers) for _ in range(count)])
