"""``task=embodied_sft``.

============  ===============  ===============  ==================================
channel       from             to               key
============  ===============  ===============  ==================================
trajectories  rollout worker   actor rank       actor rank
turns         env worker       rollout worker   lane: (env worker, stage)
answers       rollout worker   env worker       lane
weights       actor rank 0     rollout worker   rollout worker
============  ===============  ===============  ==================================

Rollout workers read the demonstrations. Envs, turns and answers serve evaluations.
"""

from __future__ import annotations

from embodied_rl.contracts import Spaces
from embodied_rl.runtime.worker import Backend, WorkerGroup
from embodied_rl.schema import EmbodiedSftConfig
from embodied_rl.tasks.embodied.simulation import Simulation
from embodied_rl.tasks.embodied.wiring import loop_arguments
from embodied_rl.tasks.embodied_sft.run import EmbodiedSftRunner
from embodied_rl.tasks.task import RunContext, Wiring, actor_group, group
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.demonstrator import DemonstrationSummary, ImitationWorker
from embodied_rl.workers.env import EnvWorker


class EmbodiedSftWiring(Wiring[EmbodiedSftConfig]):
    """Env, rollout and actor groups, in this order."""

    _demonstrations: DemonstrationSummary | None = None

    def connect(self, config: EmbodiedSftConfig, backend: Backend) -> tuple[WorkerGroup, ...]:
        simulation = Simulation(config, backend)
        placement, ranks = simulation.placement, simulation.actor_ranks
        # Room for all that is read ahead: no worker waits here, so it can serve an evaluation at any time.
        trajectories = backend.channel("trajectories", range(ranks), config.data.prefetch + 1)
        self.trajectories = trajectories
        env, rollout, actor = backend.launch(
            [
                simulation.env_group(),
                group(
                    "rollout",
                    ImitationWorker,
                    placement,
                    config,
                    data=config.data,
                    **simulation.serving(trajectories),
                ),
                actor_group(
                    placement,
                    config,
                    expected=1,
                    groups=config.data.batch_size,
                    longest_sequence=1,
                    trajectories=trajectories,
                    weights=simulation.weights,
                ),
            ]
        )
        spaces: Spaces = env.call(EnvWorker.setup, train=False).wait()[0]
        spec = simulation.spec(spaces)
        if not config.runner.only_eval:
            self._demonstrations = rollout.call(ImitationWorker.open, spec).wait()[0]
        statistics = self._demonstrations.action_statistics if self._demonstrations else None
        ready = [
            rollout.call(ImitationWorker.setup, spec),
            actor.call(ActorWorker.setup, spec, action_statistics=statistics),
        ]
        for handle in ready:
            handle.wait()
        return env, rollout, actor

    def describe(self, config: EmbodiedSftConfig, groups: tuple[WorkerGroup, ...]) -> str:
        env, rollout, actor = groups
        workers = f"{env.world_size} env, {rollout.world_size} rollout, {actor.world_size} actor worker(s)"
        found = self._demonstrations
        if found is None:
            return workers
        passes = config.runner.max_steps * config.data.batch_size / found.num_frames
        return (
            f"{workers}; {found.num_episodes} demonstrations of {found.num_frames} frames; {config.runner.max_steps} "
            f"steps x {config.data.batch_size} frames = {passes:.1f} passes"
        )

    def runner(
        self, config: EmbodiedSftConfig, groups: tuple[WorkerGroup, ...], context: RunContext
    ) -> EmbodiedSftRunner:
        return EmbodiedSftRunner(
            config=config, demonstrations=self._demonstrations, **loop_arguments(config, groups, context)
        )
