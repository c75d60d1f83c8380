"""Validation rules for ``task=collect``."""

from __future__ import annotations

from collections.abc import Iterator

from embodied_rl.demonstrations.expert import expert_class, expert_options
from embodied_rl.demonstrations.plan import conflicts
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import CollectConfig
from embodied_rl.tasks.embodied.rules import adapter_problems
from embodied_rl.tasks.task import Task


def collect_problems(c: CollectConfig, placement: Placement | None) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    unknown = list(adapter_problems(c))
    yield from unknown
    if c.collect.policy == "expert" and not unknown:
        try:
            expert = expert_class(c.env.env_type, c.collect.expert)
            expert_options(expert, c.collect.expert_params)
        except ConfigError as error:
            yield from error.problems
        except UserError as error:
            yield f"collect.policy=expert: {error}. Or let a trained model play: collect.policy=model"
    if c.collect.policy == "model" and c.model.path is None and c.runner.init_from is None:
        yield (
            "collect.policy=model: no weights are given, and fresh ones demonstrate nothing; set model.path or "
            "runner.init_from"
        )
    if c.runner.resume_dir is not None:
        yield (
            f"runner.resume_dir: got {c.runner.resume_dir!r}, but a collection resumes from collect.path by itself; "
            "for the weights of a run use runner.init_from"
        )
    if c.runner.only_eval:
        yield "runner.only_eval: got true, but task=collect evaluates nothing; use task=embodied"
    yield from conflicts(c)


TASK = Task(
    config=CollectConfig,
    components=("env",),
    rules=collect_problems,
    arithmetic=None,
    wiring="embodied_rl.tasks.collect.run:CollectWiring",
)
