"""The layouts that a run may have on this machine, what each would take by measurement, and the choice of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from embodied_rl.envs.base import adapter_class
from embodied_rl.models.weights.shipped import provide
from embodied_rl.plan import Lanes, RunPlan
from embodied_rl.runtime.load import usable_cores
from embodied_rl.runtime.memory import machine_memory
from embodied_rl.runtime.worker import Backend
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.embodied.forecast import Forecast, Layout, StepShape, UnitCosts, forecast
from embodied_rl.tasks.embodied.pilot import Pilot, pilot_config
from embodied_rl.tasks.memory import GIB, Estimate
from embodied_rl.tasks.planning import placement_of, plan_of, threads_of
from embodied_rl.tasks.rules import process_problems
from embodied_rl.tasks.table import TASKS

Say = Callable[[str], None]
Plan = RunPlan[EmbodiedConfig]

_ENVS: Final = 8
"""Envs of a worker that are enough to know what more of them cost, where each is stepped alone."""
_MICRO_BATCHES: Final = (0.5, 2, 4)
"""Sizes to try beside the configuration's, as multiples of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout and what it would take."""

    layout: Layout
    forecast: Forecast
    memory: float
    """Bytes of host memory that all processes hold at most, by estimate."""
    fits: bool
    """That is there, or as much as ``cluster.memory_limit``."""

    @property
    def described(self) -> str:
        layout = self.layout
        where = "in one process" if layout.serial else f"{layout.env_workers} env worker(s)"
        return f"{where}, {layout.stages} stage(s), {layout.actor_threads} actor thread(s)"


def overrides(plan: Plan, layout: Layout) -> list[str]:
    """The command line's part that makes a run of it."""
    ranks = {name: f'"{text}"' if "," in text else text for name, text in _ranks(plan, layout).items()}
    return [
        *(["cluster=serial"] if layout.serial else []),
        *(f"cluster.component_placement.{name}={text}" for name, text in ranks.items()),
        f"rollout.pipeline_stage_num={layout.stages}",
        f"cluster.num_threads.actor={layout.actor_threads}",
        *([] if layout.micro_batch is None else [f"actor.micro_batch_size={layout.micro_batch}"]),
    ]


def _ranks(plan: Plan, layout: Layout) -> dict[str, str]:
    """``cluster.component_placement``: actor and rollout workers stay on the ranks that they are on."""
    slots = plan.placement.slots
    return {
        **{name: ",".join(map(str, slots[name])) for name in ("actor", "rollout")},
        "env": f"0-{layout.env_workers - 1}" if layout.env_workers > 1 else "0",
    }


def laid_out(plan: Plan, layout: Layout) -> EmbodiedConfig:
    """The run in a layout."""
    config = plan.config
    cluster = replace(
        config.cluster,
        backend="serial" if layout.serial else config.cluster.backend,
        component_placement=dict(_ranks(plan, layout)),
        num_threads={**config.cluster.num_threads, "actor": layout.actor_threads},
    )
    return replace(
        config,
        cluster=cluster,
        rollout=replace(config.rollout, pipeline_stage_num=layout.stages),
        actor=replace(config.actor, micro_batch_size=layout.micro_batch or config.actor.micro_batch_size),
    )


def present(plan: Plan) -> Layout:
    """The layout of the configuration."""
    size = plan.config.actor.micro_batch_size
    return Layout(
        serial=plan.config.cluster.backend == "serial",
        env_workers=plan.world_size("env"),
        stages=plan.lanes.stages,
        actor_threads=plan.threads["actor"],
        micro_batch=None if size == "auto" or plan.replays else size,
    )


def layouts(plan: Plan, *, apart: bool, sizes: bool) -> Iterator[Layout]:
    """Those to compare, the configuration's first.

    Args:
        apart: go over ``cluster=serial`` and processes, instead of what the configuration has of the two.
        sizes: and over micro-batches.
    """
    own, config, cores = present(plan), plan.config, int(usable_cores())
    threads, micro_batches = [own.actor_threads], [own.micro_batch]
    if plan.placement.device("actor", 0) == "cpu":
        most = max(1, cores // plan.world_size("actor"))
        threads += [count for count in (*(2**k for k in range(most.bit_length())), most) if count <= most]
    if sizes and own.micro_batch is not None:
        tried = [round(own.micro_batch * factor) for factor in _MICRO_BATCHES]
        micro_batches += [size for size in tried if 1 <= size <= minibatch(plan)]
    places = [(own.serial, own.env_workers, own.stages)]
    if not own.serial:
        places += [(False, workers, stages) for workers in range(1, cores + 1) for stages in (1, 2)]
    may_be_one = config.runner.recover == "never" and config.cluster.memory_limit is None
    if own.serial or (apart and may_be_one and plan.world_size("actor") == 1):
        places.append((True, plan.world_size("rollout"), 1))
    for serial, workers, stages in dict.fromkeys(places):
        for count in dict.fromkeys(threads):
            for size in dict.fromkeys(micro_batches):
                layout = Layout(
                    serial=serial, env_workers=workers, stages=stages, actor_threads=count, micro_batch=size
                )
                there = laid_out(plan, layout)
                placement = placement_of(there)
                problems = (
                    *process_problems(there, placement),
                    *TASKS[config.runner.task_type].rules(there, placement),
                )
                if layout == own or not problems:
                    yield layout


def minibatch(plan: Plan) -> int:
    """Samples of an actor rank's mini-batch."""
    config, samples = plan.config, plan.arithmetic.samples
    size = config.actor.global_batch_size
    count = config.algorithm.n_minibatches or max(1, round(samples / (size or samples)))
    return -(-samples // (count * plan.world_size("actor")))


def step_shape(plan: Plan) -> StepShape:
    """What a training step of the run asks for."""
    config, numbers, train = plan.config, plan.arithmetic, plan.config.env.train
    ahead = not (config.rollout.max_staleness or train.enable_offload or train.video_cfg.save_video)
    steps = numbers.chunks * numbers.num_action_chunks
    played = numbers.chunks * numbers.rollout_epochs
    return StepShape(
        envs=train.total_num_envs,
        chunks=numbers.chunks,
        rollouts=numbers.rollout_epochs,
        samples=-(-numbers.samples // plan.world_size("actor")),
        actor_ranks=plan.world_size("actor"),
        rollout_workers=plan.world_size("rollout"),
        values=plan.values_per_chunk > 0 or plan.records_unacted,
        resets="between" if train.auto_reset else "ahead" if ahead else "first",
        resets_per_env=steps / train.max_episode_steps if train.auto_reset else 1.0,
        runs_ahead=min(1.0, (config.rollout.chunks_ahead or played) / played) if config.rollout.max_staleness else 0.0,
        sync_interval=config.runner.weight_sync_interval,
        cores=usable_cores(),
    )


def measured(
    plan: Plan, found: Sequence[Layout], backend_of: Callable[[EmbodiedConfig], Backend], say: Say
) -> UnitCosts:
    """What the parts of the run cost, for all of these layouts: played with as many env workers as one of them has at
    most, but no more than there are cores."""
    config, cores = plan.config, max(1, int(usable_cores()))
    own = present(plan)
    workers = max(
        (one.env_workers for one in found if not one.serial and one.env_workers <= cores), default=own.env_workers
    )
    group, envs = config.algorithm.group_size, config.env.train.total_num_envs // workers
    if not adapter_class(config.env.env_type).batched:
        envs = min(envs, group * -(-_ENVS // group))
    pilot = pilot_config(laid_out(plan, replace(own, env_workers=workers, stages=1)), workers * envs)
    provide(config.model.path)
    backend = backend_of(pilot)
    try:
        return Pilot(plan_of(pilot), backend, plan.arithmetic.chunks, say).measure(
            rows=sorted({_rows(plan, layout) for layout in found}),
            updates=list(dict.fromkeys((one.actor_threads, one.micro_batch) for one in found)),
            samples=minibatch(plan),
            epochs=1 if plan.replays else config.algorithm.update_epoch,
        )
    finally:
        backend.shutdown()


def _rows(plan: Plan, layout: Layout) -> int:
    """Observations that a rollout worker answers at once."""
    served = -(-layout.env_workers // plan.world_size("rollout"))
    return plan.config.env.train.total_num_envs * served // (layout.env_workers * layout.stages)


def compared(plan: Plan, found: Sequence[Layout], costs: UnitCosts) -> list[Candidate]:
    """All of these layouts, those that fit first, and the fastest of them before the rest."""
    shape, limit = step_shape(plan), plan.config.cluster.memory_limit
    there = machine_memory().available if limit is None else limit * GIB
    candidates: list[Candidate] = []
    memories: dict[tuple[object, ...], float] = {}
    for layout in found:
        place = (layout.serial, layout.env_workers, layout.stages, layout.micro_batch)
        if place not in memories:
            memories[place] = _memory(plan, layout)
        memory = memories[place]
        candidates.append(
            Candidate(layout=layout, forecast=forecast(shape, costs, layout), memory=memory, fits=memory <= there)
        )
    return sorted(candidates, key=lambda one: (not one.fits, one.forecast.step))


def _memory(plan: Plan, layout: Layout) -> float:
    config = laid_out(plan, layout)
    placement = placement_of(config)
    there = replace(
        plan,
        config=config,
        placement=placement,
        lanes=Lanes(env_workers=layout.env_workers, stages=layout.stages),
        threads=threads_of(config, placement),
    )
    estimate, total, processes = Estimate(there), 0.0, list[float]()
    for component, count in {"driver": 1, **{name: len(ranks) for name, ranks in placement.slots.items()}}.items():
        need = estimate.of(component)
        for rank in range(count):
            on_host = component == "driver" or placement.device(component, rank) == "cpu"
            processes.append(need.process)
            total += need.simulator + need.buffer + need.snapshot + on_host * (need.weights + need.passes + need.sync)
    return total + (max(processes) if layout.serial else sum(processes))


def place(plan: Plan, backend_of: Callable[[EmbodiedConfig], Backend], say: Say) -> Plan:
    """The run with the layout that ``cluster.component_placement=auto`` chooses.

    Args:
        backend_of: makes a backend for workers to try out.
        say: told what was chosen, and why.
    """
    begun = time.perf_counter()
    found = list(layouts(plan, apart=False, sizes=False))
    costs = measured(plan, found, backend_of, lambda text: None)
    best, *others = compared(plan, found, costs)
    seconds = best.forecast
    words = f"cluster.component_placement=auto: {best.described}, {seconds.step:.3g} s a step by forecast"
    words += f" (rollout {seconds.rollout:.3g}, whose limit is {seconds.limit}, update {seconds.update:.3g})"
    if others:
        words += f"; the next best takes {others[0].forecast.step:.3g} s: {others[0].described}"
    say(f"{words}; measured in {time.perf_counter() - begun:.0f} s")
    return plan_of(laid_out(plan, best.layout))
