"""Runs a whole job of any task: run directory, workers, loop, shutdown. Who talks to whom is in ``tasks/``."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console

from embodied_rl.checkpoints import resume
from embodied_rl.checkpoints.store import (
    EVALUATION,
    STATE_FILE,
    complete_checkpoints,
    experiment_dir,
    later_checkpoints,
    newest_whole,
    remove_torn,
    verify,
)
from embodied_rl.errors import UserError, listed
from embodied_rl.evaluation.eval_file import set_later_aside
from embodied_rl.files import locked, set_aside, write_text
from embodied_rl.models.weights.shipped import provide
from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.monitoring.console import LOG_FILE, RunConsole
from embodied_rl.monitoring.metrics import MetricLogger
from embodied_rl.monitoring.progress import Progress
from embodied_rl.monitoring.status import StatusWriter
from embodied_rl.params import argument
from embodied_rl.plan import Channels, RunPlan
from embodied_rl.registry import load_class
from embodied_rl.report.before_after import show_gain
from embodied_rl.report.recording import recorded
from embodied_rl.runtime.host import Host
from embodied_rl.runtime.numerics import Numerics
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.serial import SerialBackend
from embodied_rl.runtime.signals import Terminated, terminable
from embodied_rl.runtime.trace import DRIVER, Trace, TracePlan, merge
from embodied_rl.runtime.worker import Backend, WorkerError, WorkerGroup
from embodied_rl.schema import Config, EmbodiedConfig
from embodied_rl.tasks.due import misses_evaluation
from embodied_rl.tasks.hooks import Hooks
from embodied_rl.tasks.planning import node_groups_of, placement_of, plan_of
from embodied_rl.tasks.recovery import Recovery, aside
from embodied_rl.tasks.reporting import end_of, video_folder
from embodied_rl.tasks.rules import AUTO
from embodied_rl.tasks.saving import CheckpointSaver
from embodied_rl.tasks.table import TASKS
from embodied_rl.tasks.trial import acts_otherwise, try_checkpoints
from embodied_rl.tasks.wiring import RunContext, Wiring
from embodied_rl.workers.actor import ActorWorker

_LOCK: Final = ".lock"
_REFUSALS: Final = (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def run(config: Config) -> Path:
    """Run a whole job: workers, training or evaluation, shutdown. Returns the run directory, which is printed first."""
    return carry_out(plan_of(config))


def carry_out(
    plan: RunPlan[Any], command: Sequence[str] | None = None, hooks: Hooks | None = None, *, quiet: bool = False
) -> Path:
    """As :func:`run`, with a plan that was made before.

    Args:
        command: the arguments of the command line, from which the end of the run makes those that come next.
        hooks: told how the run goes.
        quiet: print nothing.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # workers' bars would tear the live lines apart
    console, hooks = RunConsole(quiet=quiet), hooks or Hooks()
    if plan.config.cluster.component_placement == AUTO:
        from embodied_rl.tasks.embodied.layouts import place  # others have no such workers

        with terminable(), console.status("cluster.component_placement=auto: measuring"):
            plan = place(plan, make_backend, partial(console.print, markup=False, highlight=False, soft_wrap=True))
    config = plan.config
    provide(config.model.path)
    for torn in remove_torn(experiment_dir(config)):  # before anything is written: the disk may be full of it
        console.print(f"removed a half-written checkpoint: {torn}", highlight=False, soft_wrap=True)
    if config.runner.about is not None:
        console.print(config.runner.about, markup=False, highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as alone:
        run_dir = _prepare(plan, console, alone)
        with (
            _unwritable(run_dir),
            console.logging_to(run_dir / LOG_FILE),
            _unwritable(run_dir),
            terminable(),
            recorded(run_dir, command, console, page=config.runner.report),
        ):
            hooks.started(run_dir)
            trained = _keep_going(plan, run_dir, console, hooks)
            if trained:
                show_gain(run_dir, console)
                for line in end_of(run_dir, config, command):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return run_dir


def _keep_going(plan: RunPlan[Any], run_dir: Path, console: RunConsole, hooks: Hooks) -> bool:
    """:func:`_drive`, after a failure again from the newest checkpoint, where ``runner.recover`` says so."""
    recovery, start = Recovery(plan, run_dir, console), plan.start
    begins = cache(partial(_set_later_aside, plan.config, start.resumed, start.step, run_dir, console))  # once
    while True:
        try:
            return _drive(plan, run_dir, console, hooks, begins, recoveries=recovery.count)
        except WorkerError as error:
            plan = recovery.after(error)


def _drive(
    plan: RunPlan[Any],
    run_dir: Path,
    console: RunConsole,
    hooks: Hooks,
    begins: Callable[[], None],
    *,
    recoveries: int,
) -> bool:
    """Start the workers, run the task's loop and end the workers; returns whether something was trained."""
    config, start = plan.config, plan.start
    total = 0 if config.runner.only_eval else config.runner.max_steps
    with contextlib.ExitStack() as stack:
        traced = TracePlan(folder=run_dir / "trace", steps=frozenset(config.runner.trace_steps))
        trace = traced if traced.steps else None
        if trace is not None:
            stack.callback(merge, trace)  # when no worker writes any more
        backend = make_backend(config, trace)
        stack.callback(backend.shutdown)
        progress = stack.enter_context(
            Progress(
                total_steps=total,
                initial_step=0 if config.runner.only_eval else min(start.step, total),
                console=console,
                log=console.log_only,
            )
        )
        progress.recoveries = recoveries
        stack.enter_context(StatusWriter(run_dir, progress, backend.pids))
        backend.on_progress(progress.hear)
        progress.describe("starting workers")
        wiring = wiring_of(plan, backend)
        for key, folder in _written_to(config, run_dir):
            backend.check_shared(str(folder), key)
        groups = wiring.connect()
        console.print(f"{config.cluster.backend} backend: {wiring.describe()}", highlight=False)
        if start.resumed:
            groups[-1].call(ActorWorker.load, start.resumed, weights_only=config.runner.only_eval).wait()
        logger = stack.enter_context(
            MetricLogger(
                config.runner.logger.logger_backends,
                RunInfo(
                    run_dir=run_dir,
                    project_name=config.runner.logger.project_name,
                    experiment_name=config.runner.experiment_name,
                    config=asdict(config),
                    wandb_options=config.runner.logger.wandb,
                    first_step=start.step + 1,  # metrics are numbered by finished steps
                    console=console,
                ),
                config.runner.logger.params,
            )
        )
        loaded = start.resumed or start.initial
        context = RunContext(
            run_dir=run_dir,
            checkpoint=loaded.name if loaded else None,
            logger=logger,
            progress=progress,
            console=console,
            hooks=hooks,
            begins=begins,
            trace=Trace(DRIVER, trace),
            loads=backend.loads,
        )
        runner = wiring.runner(groups, context)
        try:
            runner.run()
        except (Terminated, KeyboardInterrupt) as ending:
            if runner.saver is not None and not config.runner.only_eval:
                word = ending.word if isinstance(ending, Terminated) else "interrupted"
                _save_at_end(word, runner.saver, wiring, groups[-1], console)
            raise
    return runner.saver is not None and not config.runner.only_eval


def _written_to(config: Config, run_dir: Path) -> Iterator[tuple[str, Path]]:
    """Settings, each with the folder of it that workers write to."""
    yield "runner.output_dir", run_dir
    if isinstance(config, EmbodiedConfig):
        eval_env = "env" if config.eval_env is None else "eval_env"
        for key, mode in (("env.train", config.env.train), (f"{eval_env}.eval", config.evaluated.eval)):
            if mode.video_cfg.save_video:
                yield f"{key}.video_cfg.video_base_dir", Path(mode.video_cfg.video_base_dir)


def make_backend(config: Config, trace: TracePlan | None = None) -> Backend:
    """The backend that ``cluster.backend`` names."""
    cluster = config.cluster
    numerics = Numerics(
        matmul_precision=cluster.matmul_precision,
        cudnn_tf32=cluster.cudnn_tf32,
        deterministic=config.runner.deterministic,
    )
    if cluster.backend == "serial":
        return SerialBackend(trace, numerics)
    host = _cluster(config) if cluster.backend == "ray" else None
    return ProcessBackend(cluster.stall_timeout, trace, cluster.memory_limit, host, numerics)


def _cluster(config: Config) -> Host:
    from embodied_rl.runtime.cluster import ClusterHost  # a run on one machine needs none of it
    from embodied_rl.runtime.ray_nodes import RayNodes

    nodes = RayNodes(config.cluster.address, node_groups_of(config), config.cluster.wait_for_nodes)
    return ClusterHost(nodes, placement_of(config).node_of())


def wiring_of(plan: RunPlan[Any], backend: Backend) -> Wiring[Any]:
    """The task's wiring. Its workers' modules are imported here: a run needs those of one task only."""
    name = plan.config.runner.task_type
    return load_class("runner.task_type", {name: TASKS[name].wiring}, name)(plan, backend)


def connect(config: Config, backend: Backend) -> tuple[WorkerGroup, ...]:
    """Start the run's worker groups, joined by channels, each set up and ready; the actor is the last."""
    return wiring_of(plan_of(config), backend).connect()


def _prepare(plan: RunPlan[Any], console: Console, alone: contextlib.ExitStack) -> Path:
    """Check that the run can begin where it is to, and make its directory, which it holds until ``alone`` is closed.

    Raises:
        UserError: it has no step left to do, or another process trains in its directory.
        CheckpointError: a checkpoint is damaged, or the run cannot go on from it with this configuration.
    """
    config, start = plan.config, plan.start
    resumed, only_eval = start.resumed, config.runner.only_eval
    finished = start.step >= config.runner.max_steps > 0
    if finished and not only_eval and not (resumed and misses_evaluation(config.runner, resumed, start.step)):
        raise UserError(
            f"runner.max_steps={config.runner.max_steps}: {resumed} has {start.step} steps already; "
            "raise runner.max_steps to go on, or evaluate it with runner.only_eval=true"
        )
    run_dir = _directory_of(resumed) if resumed and not only_eval else None
    if run_dir is not None:  # before the checks, as the other process writes what they read
        alone.enter_context(_held(run_dir))
    changes = resume.compare(resumed, config) if resumed and not only_eval else []
    resume.check(resumed or Path(), changes or [])
    for checkpoint in filter(None, (resumed, start.initial)):
        console.print(f"comparing with its checksums: {checkpoint}", highlight=False, soft_wrap=True)
        verify(checkpoint)
    try_checkpoints(plan)
    if run_dir is None:
        run_dir = _new_directory(config)
        alone.enter_context(_held(run_dir))
    with _unwritable(run_dir):
        write_text(run_dir / resume.CONFIG_FILE, yaml.safe_dump(asdict(config), sort_keys=False))
    console.print(f"run directory: {run_dir}", highlight=False, soft_wrap=True)
    if config.runner.resume_dir == "auto" and resumed is None:
        _warn(console, _begins_anew(experiment_dir(config)))
    if loaded := resumed or start.initial:
        console.print(f"weights of: {loaded}", highlight=False, soft_wrap=True)
    for text in acts_otherwise(plan):
        _warn(console, text)
    if changes:
        console.print(resume.table(changes))
    elif changes is None:
        console.print(f"{resumed} has no {resume.CONFIG_FILE} of its run: settings are not compared", highlight=False)
    return run_dir


def _begins_anew(runs: Path) -> str:
    """What ``resume_dir=auto`` means where no run has a whole checkpoint."""
    torn = sorted(path.relative_to(runs) for path in runs.glob("*/checkpoints/global_step_*"))
    said = f"; {listed(map(str, torn), 3)} without {STATE_FILE}: not whole, so not taken" if torn else ""
    return f"runner.resume_dir=auto: no whole checkpoint in {runs}, so the run begins at step 0{said}"


def _set_later_aside(config: Config, resumed: Path | None, step: int, run_dir: Path, console: Console) -> None:
    """Checkpoints and evaluations of later steps than a run goes on from are of other weights than it trains now."""
    if resumed is None or _directory_of(resumed) != run_dir:
        return
    later = later_checkpoints(resumed)
    if config.runner.recover == "auto":
        later = [path for path in later if newest_whole([path], aside(partial(_warn, console)))]
    for checkpoint in later:
        set_aside(checkpoint, "former")
    if later:
        _warn(
            console,
            f"{', '.join(path.name for path in later)}: of later steps than {resumed.name}, from which the run goes on "
            "now: renamed to former_..., which is never deleted",
        )
    evaluations = set_later_aside(run_dir, step)
    if isinstance(config, EmbodiedConfig):
        set_later_aside(video_folder(config, run_dir), step)
    if evaluations:
        _warn(
            console,
            f"{', '.join(path.name for path in evaluations)}: evaluations after later steps than {resumed.name}, which "
            "no longer count: renamed to former_...",
        )


def _warn(console: Console, text: str) -> None:
    console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _directory_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint is in; None where it is somewhere else."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


@contextlib.contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    """Let no other process train in a run directory, for as long as the block or this process lasts: workers do not
    inherit the lock.

    Raises:
        UserError: another process does.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(run_dir / _LOCK, wait=False))
        except BlockingIOError:
            raise UserError(f"{run_dir}: another process trains in it; wait until it has ended, or stop it") from None
        except OSError:  # a file system without locks; what cannot be written is told of where it is missed
            pass
        yield


def _new_directory(config: Config) -> Path:
    base = experiment_dir(config) / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    suffix = EVALUATION if config.runner.only_eval else ""
    for number in range(1000):
        directory = Path(f"{base}{f'_{number}' if number else ''}{suffix}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"runner.output_dir: {directory} cannot be made: {error.strerror}; choose another"
            ) from error
        return directory
    raise FileExistsError(base)


def _save_at_end(word: str, saver: CheckpointSaver, wiring: Wiring[Any], actor: WorkerGroup, console: Console) -> None:
    """Save what has not been, where the workers are still able to. A second signal ends this at once."""
    console.print(f"{word}: saving what is finished; Ctrl-C ends at once", highlight=False)
    try:
        if not saver.updating:
            wiring.backend.abandon(Channels.need(wiring.channels.trajectories), range(actor.world_size))
        outcome = saver.save_at_termination()
    except Exception as error:
        outcome = f"no checkpoint of step {saver.finished}: {str(error).strip() or type(error).__name__}"
    console.print(f"{word}: {outcome}", markup=False, highlight=False, soft_wrap=True)
    if complete_checkpoints(saver.run_dir / "checkpoints") and "optimizer" in saver.config.save_contents:
        resumed = shlex.quote(argument("runner.resume_dir", str(saver.run_dir)))
        console.print(f"go on with: {resumed}", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _unwritable(run_dir: Path) -> Iterator[None]:
    """One message where samples, metrics or reports cannot be written; a checkpoint has its own."""
    try:
        yield
    except OSError as error:
        where = str(error.filename2 or error.filename or run_dir)  # the second: what a hidden neighbour is to become
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{where}: {error.strerror}; make room, then go on with "
                f"{shlex.quote(argument('runner.resume_dir', str(run_dir)))}: the checkpoints in it are whole"
            ) from error
        if error.errno in _REFUSALS and Path(where).is_relative_to(run_dir):
            raise UserError(f"{where}: {error.strerror}; the run writes it: move away what is there") from error
        raise
