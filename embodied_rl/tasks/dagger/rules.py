"""Rules of ``task=dagger``; the arithmetic is that of ``task=embodied_sft``."""

from __future__ import annotations

from collections.abc import Iterator

from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import DaggerConfig
from embodied_rl.tasks.collect.rules import player_problems
from embodied_rl.tasks.embodied.rules import adapter_problems
from embodied_rl.tasks.embodied_sft.rules import arithmetic, embodied_sft_problems
from embodied_rl.tasks.task import Task


def dagger_problems(c: DaggerConfig, placement: Placement | None) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    yield from embodied_sft_problems(c, placement)
    if not list(adapter_problems(c)):
        yield from player_problems(c.env, c.dagger)
    if c.dagger.interval >= c.runner.max_steps and not c.runner.only_eval:
        yield (
            f"dagger.interval: got {c.dagger.interval}, but the run ends after runner.max_steps={c.runner.max_steps} "
            "steps, before the first round; use task=sft, or a smaller interval"
        )
    if "model" not in c.runner.save_contents:
        yield (
            f"runner.save_contents: got {c.runner.save_contents}, but every round begins with a checkpoint whose model "
            "plays; add model"
        )


TASK = Task(
    config=DaggerConfig,
    components=("actor", "rollout", "env", "collector"),
    rules=dagger_problems,
    arithmetic=arithmetic,
    wiring="embodied_rl.tasks.dagger.run:DaggerWiring",
    imitates=True,
)
