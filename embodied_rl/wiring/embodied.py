"""``task=embodied``.

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

from pathlib import Path

from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.contracts import Spaces
from embodied_rl.models.base import PolicySpec
from embodied_rl.runners.embodied import EmbodiedRunner
from embodied_rl.runners.reporting import EvalReporter
from embodied_rl.runtime.worker import Backend, WorkerGroup
from embodied_rl.schema import EmbodiedConfig, chunks_per_rollout, groups_per_step
from embodied_rl.validation import COMPONENTS, placement_of
from embodied_rl.wiring.base import BUCKETS_IN_FLIGHT, RunContext, Wiring, actor_group, group, values_per_chunk
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker
from embodied_rl.workers.lanes import Lanes
from embodied_rl.workers.rollout import RolloutWorker

LANE_CAPACITY = 4
"""A lane has at most a request and the marks of its rollout's end in flight."""


class EmbodiedWiring(Wiring[EmbodiedConfig]):
    """Env, rollout and actor groups, in this order."""

    def connect(self, config: EmbodiedConfig, backend: Backend) -> tuple[WorkerGroup, ...]:
        placement = placement_of(config)
        world = {name: placement.world_size(name) for name in COMPONENTS["embodied"]}
        lanes = Lanes(env_workers=world["env"], stages=config.rollout.pipeline_stage_num)
        requests = backend.channel("requests", lanes.all(), LANE_CAPACITY)
        answers = backend.channel("answers", lanes.all(), LANE_CAPACITY)
        trajectories = backend.channel("trajectories", range(world["actor"]), len(lanes.all()))
        self.trajectories = trajectories
        weights = backend.channel("weights", range(world["rollout"]), BUCKETS_IN_FLIGHT)
        needs_values = ADVANTAGES[config.algorithm.adv_type].needs_values
        env, rollout, actor = backend.launch(
            [
                group(
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
                group(
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
                actor_group(
                    placement,
                    config,
                    expected=len(lanes.all()) * config.algorithm.rollout_epoch,
                    groups=groups_per_step(config),
                    longest_sequence=chunks_per_rollout(config),
                    trajectories=trajectories,
                    weights=weights,
                ),
            ]
        )
        spaces: Spaces = env.call(EnvWorker.setup, train=not config.runner.only_eval).wait()[0]
        spec = PolicySpec(
            action_dim=spaces.action_dim,
            num_action_chunks=config.model.num_action_chunks,
            state_dim=spaces.state_dim,
            image_shapes=spaces.image_shapes,
            values_per_chunk=values_per_chunk(config, config.model.num_action_chunks),
        )
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
        env, rollout, actor = groups
        run = f"{config.runner.experiment_name}_{context.run_dir.name}"
        video_dir = Path(config.env.eval.video_cfg.video_base_dir) / run
        return EmbodiedRunner(
            config=config,
            run_dir=context.run_dir,
            video_dir=video_dir,
            train_video_dir=Path(config.env.train.video_cfg.video_base_dir) / run,
            env=env,
            rollout=rollout,
            actor=actor,
            logger=context.logger,
            progress=context.progress,
            console=context.console,
            reporter=EvalReporter(
                config=config,
                run_dir=context.run_dir,
                video_dir=video_dir,
                console=context.console,
                checkpoint=context.checkpoint,
            ),
            first_step=context.first_step,
        )
