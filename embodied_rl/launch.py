"""Builds and connects the workers. The only module that knows who talks to whom.

============  ===============  ===============  ==============================================
channel       from             to               key
============  ===============  ===============  ==============================================
requests      env worker       rollout worker   lane: (env worker, stage)
answers       rollout worker   env worker       lane
trajectories  env workers      actor rank       actor rank
weights       actor rank 0     rollout worker   rollout worker
============  ===============  ===============  ==============================================
"""

from __future__ import annotations

import contextlib
import datetime
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import rich
import yaml
from rich.console import Console

from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.contracts import Spaces
from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.registry import policy_class
from embodied_rl.monitoring.metrics import MetricLogger
from embodied_rl.monitoring.progress import Progress
from embodied_rl.params import parse_params
from embodied_rl.runners.embodied import EmbodiedRunner
from embodied_rl.runners.reporting import EvalReporter
from embodied_rl.runtime.placement import Placement, parse_placement
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.serial import SerialBackend
from embodied_rl.runtime.worker import Backend, GroupSpec, WorkerGroup
from embodied_rl.schema import Config
from embodied_rl.training.checkpoint_store import experiment_dir, find_checkpoint, read_state
from embodied_rl.validation import COMPONENTS, SHARING
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker
from embodied_rl.workers.lanes import Lanes
from embodied_rl.workers.rollout import RolloutWorker

LANE_CAPACITY = 4
"""A lane has at most a request and the marks of its rollout's end in flight."""


class Terminated(SystemExit):
    """The run was asked to end by SIGTERM."""


def run(config: Config) -> None:
    """Run a whole job: workers, training or evaluation, shutdown. The run directory is printed first."""
    console = rich.get_console()
    parse_params(policy_class(config.model.model_type).Params, config.model.params, "model.params")
    resumed = find_checkpoint(config)
    state = read_state(resumed) if resumed else None
    first_step = state.step if state else 0
    if not config.runner.only_eval and first_step >= config.runner.max_steps > 0:
        raise UserError(
            f"runner.max_steps={config.runner.max_steps}: {resumed} has {first_step} steps already; "
            "raise runner.max_steps to go on, or evaluate it with runner.only_eval=true"
        )
    run_dir = _run_directory(config, resumed)
    video_dir = Path(config.env.eval.video_cfg.video_base_dir) / _run_name(config, run_dir)
    train_video_dir = Path(config.env.train.video_cfg.video_base_dir) / _run_name(config, run_dir)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False))
    console.print(f"run directory: {run_dir}", highlight=False, soft_wrap=True)
    if resumed:
        console.print(f"weights of: {resumed}", highlight=False, soft_wrap=True)
    total = 1 if config.runner.only_eval else config.runner.max_steps
    with _terminable(), contextlib.ExitStack() as stack:
        backend = make_backend(config)
        stack.callback(backend.shutdown)
        progress = stack.enter_context(
            Progress(total_steps=total, initial_step=0 if config.runner.only_eval else min(first_step, total))
        )
        backend.on_progress(lambda what, done, of: progress.describe(f"{what} {done}/{of}"))
        progress.describe("starting workers")
        env, rollout, actor = connect(config, backend)
        describe(config, env, rollout, actor, console)
        if resumed:
            actor.call(ActorWorker.load, resumed, weights_only=config.runner.only_eval).wait()
        logger = stack.enter_context(
            MetricLogger(
                config.runner.logger.logger_backends,
                run_dir,
                project_name=config.runner.logger.project_name,
                experiment_name=config.runner.experiment_name,
                config=asdict(config),
                wandb_options=config.runner.logger.wandb,
                first_step=first_step + 1,  # metrics are numbered by finished steps
                console=console,
            )
        )
        EmbodiedRunner(
            config=config,
            run_dir=run_dir,
            video_dir=video_dir,
            train_video_dir=train_video_dir,
            env=env,
            rollout=rollout,
            actor=actor,
            logger=logger,
            progress=progress,
            reporter=EvalReporter(
                config=config,
                run_dir=run_dir,
                video_dir=video_dir,
                console=console,
                checkpoint=resumed.name if resumed else None,
            ),
            first_step=first_step,
        ).run()


def make_backend(config: Config) -> Backend:
    """The backend that ``cluster.backend`` names."""
    if config.cluster.backend == "serial":
        return SerialBackend()
    return ProcessBackend(config.cluster.stall_timeout)


def connect(config: Config, backend: Backend) -> tuple[WorkerGroup, WorkerGroup, WorkerGroup]:
    """Start the env, rollout and actor groups, joined by channels, each set up and ready."""
    placement = parse_placement(config.cluster.component_placement, COMPONENTS, sharing=SHARING)
    world = {name: placement.world_size(name) for name in COMPONENTS}
    lanes = Lanes(env_workers=world["env"], stages=config.rollout.pipeline_stage_num)
    requests = backend.channel("requests", lanes.all(), LANE_CAPACITY)
    answers = backend.channel("answers", lanes.all(), LANE_CAPACITY)
    trajectories = backend.channel("trajectories", range(world["actor"]), len(lanes.all()))
    weights = backend.channel("weights", range(world["rollout"]), 1)
    needs_values = ADVANTAGES[config.algorithm.adv_type].needs_values
    env, rollout, actor = backend.launch(
        [
            _group(
                "env",
                EnvWorker,
                placement,
                config,
                env=config.env,
                group_size=config.algorithm.group_size,
                rollout_epochs=config.algorithm.rollout_epoch,
                num_action_chunks=config.model.num_action_chunks,
                needs_values=needs_values,
                lanes=lanes,
                actor_ranks=world["actor"],
                requests=requests,
                answers=answers,
                trajectories=trajectories,
            ),
            _group(
                "rollout",
                RolloutWorker,
                placement,
                config,
                model=config.model,
                sampling=config.algorithm.sampling_params,
                seed=config.actor.seed,
                lanes=lanes,
                requests=requests,
                answers=answers,
                weights=weights,
            ),
            _group(
                "actor",
                ActorWorker,
                placement,
                config,
                model=config.model,
                algorithm=config.algorithm,
                actor=config.actor,
                expected=len(lanes.all()) * config.algorithm.rollout_epoch,
                rollout_workers=world["rollout"],
                trajectories=trajectories,
                weights=weights,
            ),
        ]
    )
    spaces: Spaces = env.call(EnvWorker.setup, train=not config.runner.only_eval).wait()[0]
    values_per_chunk = 0
    if needs_values:
        values_per_chunk = 1 if config.algorithm.reward_type == "chunk_level" else config.model.num_action_chunks
    spec = PolicySpec(
        action_dim=spaces.action_dim,
        num_action_chunks=config.model.num_action_chunks,
        state_dim=spaces.state_dim,
        image_shapes=spaces.image_shapes,
        values_per_chunk=values_per_chunk,
    )
    ready = [rollout.call(RolloutWorker.setup, spec), actor.call(ActorWorker.setup, spec)]
    for handle in ready:
        handle.wait()
    return env, rollout, actor


def _group(component: str, worker: type, placement: Placement, config: Config, **arguments: object) -> GroupSpec:
    return GroupSpec(
        name={"env": "EnvGroup", "rollout": "RolloutGroup", "actor": "ActorGroup"}[component],
        worker=worker,
        arguments=arguments,
        devices=[placement.device(component, rank) for rank in range(placement.world_size(component))],
        num_threads=config.cluster.num_threads[component],
    )


def describe(config: Config, env: WorkerGroup, rollout: WorkerGroup, actor: WorkerGroup, console: Console) -> None:
    """Print the arithmetic of a run that was derived and not asked for."""
    train, stages = config.env.train, config.rollout.pipeline_stage_num
    lanes = env.world_size * stages
    console.print(
        f"{config.cluster.backend} backend: {env.world_size} env, {rollout.world_size} rollout, {actor.world_size} "
        f"actor worker(s); {train.total_num_envs} envs = {env.world_size} workers x {stages} stages x "
        f"{train.total_num_envs // lanes}, in {train.total_num_envs // config.algorithm.group_size} groups of "
        f"{config.algorithm.group_size}",
        highlight=False,
    )


def _run_directory(config: Config, resumed: Path | None) -> Path:
    """A new directory, or, to go on training, the one the checkpoint is in."""
    if resumed and not config.runner.only_eval and resumed.parent.name == "checkpoints":
        return resumed.parent.parent
    base = experiment_dir(config) / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    suffix = "-eval" if config.runner.only_eval else ""
    for number in range(1000):
        directory = Path(f"{base}{f'_{number}' if number else ''}{suffix}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            return directory
    raise FileExistsError(base)


def _run_name(config: Config, run_dir: Path) -> str:
    return f"{config.runner.experiment_name}_{run_dir.name}"


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that it ends a run as cleanly as Ctrl-C."""

    def terminate(number: int, frame: FrameType | None) -> None:
        del frame
        raise Terminated(128 + number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
