"""``python train.py plan ...``: the run of a command line on one page. Starts no worker and writes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from embodied_rl.command_line import COMMAND_LINE, checked, origins
from embodied_rl.commands.terminal import console
from embodied_rl.composition import with_recipe
from embodied_rl.errors import UserError
from embodied_rl.plan import RunPlan
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.memory import GIB, Estimate, Need
from embodied_rl.tasks.planning import plan_of
from embodied_rl.tasks.rules import AUTO

if TYPE_CHECKING:  # imports torch
    from embodied_rl.tasks.embodied.forecast import Layout
    from embodied_rl.tasks.embodied.layouts import Candidate

USAGE: Final = "python train.py plan [--measure] [group=choice] [key=value] ..."
_HELP: Final = """
The arguments are those of a run. It prints what follows from them: where the run starts, the arithmetic of a training
step, where workers sit and what memory they need by estimate, and which file each key of the configuration comes from.

--measure (task=embodied) plays a few chunks with the run's simulators, policy and update on this machine instead, and
predicts the step's seconds and memory for other numbers of env workers and stages, actor threads and micro-batches.
"""
MEASURE: Final = "--measure"
_ROWS: Final = 12


def main(arguments: Sequence[str]) -> None:
    """Print the plan of a run.

    Raises:
        UserError: the configuration is wrong, or a checkpoint that it names does not exist.
    """
    if set(arguments) & {"-h", "--help"}:
        print(f"usage: {USAGE}\n{_HELP}")
        return
    given = with_recipe([text for text in arguments if text != MEASURE])
    plan, out = plan_of(checked(given)), console()
    if MEASURE in arguments:
        _measure(plan, given, out)
        return
    out.print(f"task={plan.config.runner.task_type}: {_start(plan)}", soft_wrap=True)
    for line in arithmetic_lines(plan):
        out.print(line, soft_wrap=True)
    if plan.config.cluster.component_placement == AUTO:
        out.print(f"the run measures before it places its workers, as {MEASURE} does; without that:", soft_wrap=True)
    out.print(placement_table(plan))
    if len(plan.placement.nodes) > 1:
        out.print(f"nodes\n{plan.placement.drawn()}\n", highlight=False)
    out.print(origins_table(given))


def _measure(plan: RunPlan[Any], arguments: Sequence[str], out: Console) -> None:
    """Print the layouts that the run may have, the fastest first, and the arguments of that one.

    Raises:
        UserError: the run has no env workers, trains nothing, or is on several nodes.
    """
    task, only_eval = plan.config.runner.task_type, plan.config.runner.only_eval
    if task != "embodied" or only_eval or plan.config.cluster.backend == "ray":
        got = f"task={task}" if task != "embodied" else "runner.only_eval=true" if only_eval else "cluster=ray"
        raise UserError(f"plan {MEASURE}: got {got}, expected training of task=embodied on this machine")
    from embodied_rl.launch import make_backend  # imports torch and the workers
    from embodied_rl.tasks.embodied import layouts

    found = list(layouts.layouts(plan, apart=True, sizes=True))
    with out.status("") as status:
        costs = layouts.measured(plan, found, make_backend, status.update)
    candidates = layouts.compared(plan, found, costs)
    out.print(measured_table(candidates, layouts.present(plan)))
    best = layouts.overrides(plan, candidates[0].layout)
    chosen = {"cluster", *(text.partition("=")[0] for text in best)}
    keys = [text.partition("=")[0].lstrip("+") for text in arguments]
    replaced = [key in chosen or key.startswith("cluster.component_placement") for key in keys]
    rest = [text for text, gone in zip(arguments, replaced, strict=True) if not gone]
    out.print("the fastest:", style="bold")
    out.print(shlex.join(["python", "train.py", *rest, *best]), markup=False, highlight=False, soft_wrap=True)


def measured_table(candidates: Sequence[Candidate], present: Layout) -> Table:
    """What candidates would take, in their order: of each place the best one, and the configuration's."""
    table = Table(title="seconds of a training step, by forecast", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("env workers", "stages", "actor threads", "micro-batch", "step", "rollout", "its limit", "update"):
        table.add_column(name, justify="left" if name == "its limit" else "right")
    table.add_column("memory")
    seen: set[tuple[bool, int, int]] = set()
    for one in candidates:
        layout, seconds = one.layout, one.forecast
        place = (layout.serial, layout.env_workers, layout.stages)
        if layout != present and (place in seen or len(seen) >= _ROWS):
            continue
        seen.add(place)
        table.add_row(
            "serial" if layout.serial else str(layout.env_workers),
            str(layout.stages),
            str(layout.actor_threads),
            str(layout.micro_batch or ""),
            f"{seconds.step:.3g}",
            f"{seconds.rollout:.3g}",
            seconds.limit,
            f"{seconds.update:.3g}",
            f"{one.memory / GIB:.1f} GiB" + ("" if one.fits else ", more than there is"),
            style="bold" if layout == present else None,
        )
    table.caption = "bold: as configured"
    return table


def arithmetic_lines(plan: RunPlan[Any]) -> list[str]:
    """From groups to optimiser steps."""
    if plan.training is None:
        return ["nothing is trained"]
    config, numbers = plan.config, plan.training
    members = numbers.groups * numbers.group_size
    of_epochs = f" in {numbers.rollout_epochs} rollout epochs" if numbers.rollout_epochs > 1 else ""
    lines = [
        f"a step: {numbers.groups} groups x {numbers.group_size}{of_epochs} = {members} sequences; x {numbers.chunks} "
        f"decision(s) of {numbers.num_action_chunks} = at most {numbers.samples} samples"
    ]
    if plan.replays:
        return [*lines, *_replay_lines(plan), *_last_lines(plan)]
    minibatches = config.algorithm.n_minibatches
    if minibatches is None:
        minibatches = max(1, round(numbers.samples / config.actor.global_batch_size))
    steps = minibatches * config.algorithm.update_epoch
    lines.append(
        f"an update: {config.algorithm.update_epoch} epoch(s) x {minibatches} mini-batches of about "
        f"{-(-numbers.samples // minibatches)} samples = {steps} optimiser steps, in micro-batches of "
        f"{config.actor.micro_batch_size} a rank"
    )
    lines.append(
        f"the run: {max(0, config.runner.max_steps - plan.start.step)} steps = "
        f"{max(0, config.runner.max_steps - plan.start.step) * steps} optimiser steps"
    )
    return [*lines, *_last_lines(plan)]


def _replay_lines(plan: RunPlan[Any]) -> list[str]:
    """From the chunks of a step to updates."""
    config, numbers = plan.config, plan.arithmetic
    replay, first = config.algorithm.replay, plan.start.step
    steps = max(0, config.runner.max_steps - first)
    before, after = (replay.updates_after(step * numbers.samples) for step in (first, first + steps))
    of_each = f"{replay.update_to_data:g} a chunk after the first {replay.learning_starts}"
    shown = f", {replay.demonstration_share:.0%} of them demonstrations" if replay.demonstrations else ""
    warm_up = config.algorithm.critic_warmup_steps
    waits = f" after the first {warm_up} steps" if warm_up else ""
    return [
        f"the buffer: {replay.capacity} chunks, {replay.capacity / numbers.samples:.0f} steps' worth; the first "
        f"{replay.random_chunks} chunks are random",
        f"an update: {of_each}, each on {replay.batch_size} chunks{shown}",
        f"the run: {steps} steps = at most {steps * numbers.samples} chunks = {after - before} updates of the critics, "
        f"one of the policy for each {config.algorithm.sac.policy_interval}{waits}",
    ]


def _last_lines(plan: RunPlan[Any]) -> list[str]:
    config, lines = plan.config, list[str]()
    if isinstance(config, EmbodiedConfig):
        env = config.evaluated
        lines.append(
            f"an evaluation: {env.eval.episodes_per_task} episode(s) of each task of {env.name}, of at most "
            f"{env.eval.max_episode_steps} steps, {env.eval.total_num_envs} at once"
        )
    if plan.staleness_bound is not None:
        chunks = config.rollout.chunks_ahead if isinstance(config, EmbodiedConfig) else None
        where = "" if chunks is None else f", and after its first {chunks} chunks the newest"
        lines.append(f"weights of a rollout: at most {plan.staleness_bound} updates old{where}")
    if plan.weight_plane != "channel":
        lines.append(f"weights travel by {plan.weight_plane}")
    return lines


def placement_table(plan: RunPlan[Any]) -> Table:
    """The driver and the workers, their devices and, by estimate, the most memory that one holds."""
    table = Table(title="workers", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("component", "workers", "devices", "threads", "memory of each, by estimate"):
        table.add_column(name)
    estimate = Estimate(plan)
    table.add_row("driver", "1", "cpu", "", _memory(estimate.of("driver"), None))
    for component in plan.placement.slots:
        count = plan.world_size(component)
        devices = dict.fromkeys(plan.placement.device(component, rank) for rank in range(count))
        table.add_row(
            component,
            str(count),
            ", ".join(devices),
            str(plan.threads[component]),
            _memory(estimate.of(component), None if component == "env" else estimate.parameters),
        )
    return table


def origins_table(arguments: Sequence[str]) -> Table:
    """Each file of the configuration, in the order in which later ones win, and the keys whose value is its.

    Defaults of all tasks and algorithms are counted alone.
    """
    found = origins(arguments)
    leaves = [key for key in found.keys if not any(other.startswith(f"{key}.") for other in found.keys)]
    table = Table(title="where each key comes from", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("file", no_wrap=True)
    table.add_column("keys")
    for file in (*found.files, COMMAND_LINE):
        if own := [key for key in leaves if found.keys[key] == file]:
            is_base = file == "base" or file.endswith("/base")
            table.add_row(file, f"{len(own)} defaults that nothing changes" if is_base else ", ".join(own))
    return table


def _memory(need: Need, parameters: int | None) -> str:
    parts = [("weights", need.weights), ("passes", need.passes), ("simulator", need.simulator), ("sync", need.sync)]
    parts += [("buffer", need.buffer), ("its copy at a save", need.snapshot)]
    text = f"{need.total / GIB:.2f} GiB"
    if shown := [f"{name} {size / GIB:.2f}" for name, size in parts if size >= GIB / 200]:
        text += f": {', '.join(shown)}"
    if parameters is not None:
        text += f" ({parameters / 1e6:.1f} M parameters)"
    return text if need.missing is None else f"{text}; without {need.missing}"


def _start(plan: RunPlan[Any]) -> str:
    start = plan.start
    if start.resumed is not None:
        what = "evaluates" if plan.config.runner.only_eval else f"goes on after step {start.step} of"
        return f"{what} {start.resumed}"
    if start.initial is not None:
        return f"starts with the weights of {start.initial}"
    if plan.config.model.path is not None:
        return f"starts with the weights in {plan.config.model.path}"
    return "starts with fresh weights"
