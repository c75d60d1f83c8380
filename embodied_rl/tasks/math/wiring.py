"""``task=math`` and ``task=sft``.

============  =================  =================  ==================
channel       from               to                 key
============  =================  =================  ==================
trajectories  generation worker  actor rank         actor rank
weights       actor rank 0       generation worker  generation worker
============  =================  =================  ==================
"""

from __future__ import annotations

from embodied_rl.models.base import PolicySpec
from embodied_rl.runtime.worker import Backend, WorkerGroup
from embodied_rl.schema import MathConfig
from embodied_rl.tasks.math.reporting import MathReporter
from embodied_rl.tasks.math.run import MathRunner
from embodied_rl.tasks.sft.run import SftRunner
from embodied_rl.tasks.task import (
    BUCKETS_IN_FLIGHT,
    RunContext,
    Wiring,
    actor_group,
    group,
    trajectory_capacity,
    values_per_chunk,
)
from embodied_rl.tasks.validation import placement_of
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.generation import GenerationWorker


class MathWiring(Wiring[MathConfig]):
    """Generation (component ``rollout``) and actor groups, in this order."""

    _loop: type[MathRunner] = MathRunner

    def connect(self, config: MathConfig, backend: Backend) -> tuple[WorkerGroup, ...]:
        placement = placement_of(config)
        generators, actors = placement.world_size("rollout"), placement.world_size("actor")
        trajectories = backend.channel("trajectories", range(actors), trajectory_capacity(config, generators))
        self.trajectories = trajectories
        weights = backend.channel("weights", range(generators), BUCKETS_IN_FLIGHT)
        rollout, actor = backend.launch(
            [
                group(
                    "rollout",
                    GenerationWorker,
                    placement,
                    config,
                    model=config.model,
                    rollout=config.rollout,
                    data=config.data,
                    reward=config.reward,
                    sampling=config.algorithm.sampling_params,
                    group_size=config.algorithm.group_size,
                    seed=config.actor.seed,
                    actor_ranks=actors,
                    trajectories=trajectories,
                    weights=weights,
                ),
                actor_group(
                    placement,
                    config,
                    expected=generators,
                    groups=config.data.rollout_batch_size,
                    longest_sequence=1,
                    trajectories=trajectories,
                    weights=weights,
                ),
            ]
        )
        spec = PolicySpec(
            action_dim=1,
            num_action_chunks=config.rollout.max_new_tokens,
            state_dim=0,
            image_shapes={},
            values_per_chunk=values_per_chunk(config, config.rollout.max_new_tokens),
        )
        ready = [rollout.call(GenerationWorker.setup, spec), actor.call(ActorWorker.setup, spec)]
        for handle in ready:
            handle.wait()
        return rollout, actor

    def describe(self, config: MathConfig, groups: tuple[WorkerGroup, ...]) -> str:
        rollout, actor = groups
        prompts, size = config.data.rollout_batch_size, config.algorithm.group_size
        return (
            f"{rollout.world_size} rollout ({config.rollout.backend}), {actor.world_size} actor worker(s); "
            f"{prompts} prompts x {size} completions = {prompts * size} of at most {config.rollout.max_new_tokens} "
            "tokens a step"
        )

    def runner(self, config: MathConfig, groups: tuple[WorkerGroup, ...], context: RunContext) -> MathRunner:
        rollout, actor = groups
        return self._loop(
            config=config,
            run_dir=context.run_dir,
            rollout=rollout,
            actor=actor,
            logger=context.logger,
            progress=context.progress,
            console=context.console,
            reporter=MathReporter(
                config=config,
                run_dir=context.run_dir,
                console=context.console,
                checkpoint=context.checkpoint,
                first_step=context.first_step,
            ),
            first_step=context.first_step,
        )


class SftWiring(MathWiring):
    """``task=sft``: the same groups with another loop."""

    _loop = SftRunner
