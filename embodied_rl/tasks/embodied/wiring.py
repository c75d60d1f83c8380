"""``task=embodied``.

============  ===============  ===============  ==============================================
channel       from             to               key
============  ===============  ===============  ==============================================
turns         env worker       rollout worker   lane: (env worker, stage)
answers       rollout worker   env worker       lane
trajectories  rollout workers  actor rank       actor rank
weights       actor rank 0     rollout worker   rollout worker
============  ===============  ===============  ==============================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied_rl.contracts import Spaces
from embodied_rl.monitoring.builtin import logged_before
from embodied_rl.runtime.worker import Backend, WorkerGroup
from embodied_rl.schema import EmbodiedConfig, chunks_per_rollout, groups_per_step
from embodied_rl.tasks.embodied.reporting import TOTAL_STEPS, EvalReporter
from embodied_rl.tasks.embodied.run import EmbodiedRunner
from embodied_rl.tasks.embodied.simulation import Simulation
from embodied_rl.tasks.task import RunContext, Wiring, actor_group, group, trajectory_capacity
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker
from embodied_rl.workers.rollout import RolloutWorker


class EmbodiedWiring(Wiring[EmbodiedConfig]):
    """Env, rollout and actor groups, in this order."""

    def connect(self, config: EmbodiedConfig, backend: Backend) -> tuple[WorkerGroup, ...]:
        simulation = Simulation(config, backend)
        placement, lanes = simulation.placement, simulation.lanes.all()
        capacity = trajectory_capacity(config, len(lanes))
        trajectories = backend.channel("trajectories", range(simulation.actor_ranks), capacity)
        self.trajectories = trajectories
        env, rollout, actor = backend.launch(
            [
                simulation.env_group(),
                group("rollout", RolloutWorker, placement, config, **simulation.serving(trajectories)),
                actor_group(
                    placement,
                    config,
                    expected=len(lanes) * config.algorithm.rollout_epoch,
                    groups=groups_per_step(config),
                    longest_sequence=chunks_per_rollout(config),
                    trajectories=trajectories,
                    weights=simulation.weights,
                ),
            ]
        )
        spaces: Spaces = env.call(EnvWorker.setup, train=not config.runner.only_eval).wait()[0]
        spec = simulation.spec(spaces)
        ready = [rollout.call(RolloutWorker.setup, spec), actor.call(ActorWorker.setup, spec)]
        for handle in ready:
            handle.wait()
        return env, rollout, actor

    def describe(self, config: EmbodiedConfig, groups: tuple[WorkerGroup, ...]) -> str:
        env, rollout, actor = groups
        train, stages = config.env.train, config.rollout.pipeline_stage_num
        lanes = env.world_size * stages
        return (
            f"{env.world_size} env, {rollout.world_size} rollout, {actor.world_size} actor worker(s); "
            f"{train.total_num_envs} envs = {env.world_size} workers x {stages} stages x "
            f"{train.total_num_envs // lanes}, in {train.total_num_envs // config.algorithm.group_size} groups of "
            f"{config.algorithm.group_size}"
        )

    def runner(self, config: EmbodiedConfig, groups: tuple[WorkerGroup, ...], context: RunContext) -> EmbodiedRunner:
        return EmbodiedRunner(config=config, **loop_arguments(config, groups, context))


def loop_arguments(config: EmbodiedConfig, groups: tuple[WorkerGroup, ...], context: RunContext) -> dict[str, Any]:
    """Those of :class:`EmbodiedRunner` beside the configuration."""
    env, rollout, actor = groups
    run = f"{config.runner.experiment_name}_{context.run_dir.name}"
    video_dir = Path(config.env.eval.video_cfg.video_base_dir) / run
    return {
        "run_dir": context.run_dir,
        "video_dir": video_dir,
        "train_video_dir": Path(config.env.train.video_cfg.video_base_dir) / run,
        "env": env,
        "rollout": rollout,
        "actor": actor,
        "logger": context.logger,
        "progress": context.progress,
        "console": context.console,
        "reporter": EvalReporter(
            config=config,
            run_dir=context.run_dir,
            video_dir=video_dir,
            console=context.console,
            checkpoint=context.checkpoint,
            first_step=context.first_step,
        ),
        "env_steps": logged_before(context.run_dir, TOTAL_STEPS, context.first_step) if context.first_step else 0.0,
        "first_step": context.first_step,
        "resumed": context.resumed,
    }
