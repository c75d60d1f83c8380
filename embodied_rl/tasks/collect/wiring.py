"""``task=collect``: workers that play side by side. There are no channels; they write what they play to one folder."""

from __future__ import annotations

from embodied_rl.checkpoints.store import find_initial
from embodied_rl.runtime.worker import Backend, WorkerGroup
from embodied_rl.schema import CollectConfig
from embodied_rl.tasks.collect.run import CollectRunner
from embodied_rl.tasks.task import RunContext, Wiring, group
from embodied_rl.tasks.validation import placement_of
from embodied_rl.workers.collector import CollectSpaces, CollectWorker


class CollectWiring(Wiring[CollectConfig]):
    """The env group alone."""

    def connect(self, config: CollectConfig, backend: Backend) -> tuple[WorkerGroup, ...]:
        self._backend = backend
        [env] = backend.launch(
            [
                group(
                    "env",
                    CollectWorker,
                    placement_of(config),
                    config,
                    env=config.env,
                    collect=config.collect,
                    model=config.model,
                    initial=find_initial(config),
                )
            ]
        )
        self._spaces: CollectSpaces = env.call(CollectWorker.setup).wait()[0]
        return (env,)

    def describe(self, config: CollectConfig, groups: tuple[WorkerGroup, ...]) -> str:
        [env] = groups
        player = "the scripted expert" if config.collect.policy == "expert" else f"model={config.model.model_type}"
        tasks = len(self._spaces.tasks)
        return (
            f"{env.world_size} env worker(s); {player} plays {tasks} task(s) x {config.collect.episodes_per_task} "
            f"demonstrations = {tasks * config.collect.episodes_per_task}"
        )

    def runner(self, config: CollectConfig, groups: tuple[WorkerGroup, ...], context: RunContext) -> CollectRunner:
        [env] = groups
        return CollectRunner(
            config=config,
            run_dir=context.run_dir,
            env=env,
            backend=self._backend,
            spaces=self._spaces,
            progress=context.progress,
            console=context.console,
        )
