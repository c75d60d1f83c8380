"""Validation rules for ``task=collect``."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from embodied_rl.checkpoints.store import STATE_FILE, resolve
from embodied_rl.demonstrations.expert import expert_class, expert_options
from embodied_rl.demonstrations.plan import Played, conflicts, section_name, takeover_problems
from embodied_rl.errors import CheckpointError, ConfigError, UserError
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import CollectConfig, EnvConfig, PlaySection
from embodied_rl.tasks.embodied.rules import adapter_problems
from embodied_rl.tasks.task import Task


def collect_problems(c: CollectConfig, placement: Placement | None) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    unknown = list(adapter_problems(c))
    yield from unknown
    if not unknown:
        yield from player_problems(c.env, c.collect)
    if c.collect.learner_plays and c.model.path is None and c.runner.init_from is None:
        key = "policy=model" if c.collect.policy == "model" else f"takeover_after={c.collect.takeover_after}"
        yield (
            f"collect.{key}: no weights are given, and fresh ones demonstrate nothing; set model.path or "
            "runner.init_from"
        )
    if c.collect.policy == "model":
        for key in ("teacher", "takeover_after"):
            if (value := getattr(c.collect, key)) is not None:
                yield f"collect.{key}: got {value}, but the model plays alone; use collect.policy=expert"
    if c.runner.resume_dir is not None:
        yield (
            f"runner.resume_dir: got {c.runner.resume_dir!r}, but a collection resumes from collect.path by itself; "
            "for the weights of a run use runner.init_from"
        )
    if c.runner.only_eval:
        yield "runner.only_eval: got true, but task=collect evaluates nothing; use task=embodied"
    yield from conflicts(c, checkpoints_that_play(c))


def checkpoints_that_play(c: CollectConfig) -> dict[str, Played]:
    """By the key that means each now; without those that mean none, which other rules tell."""
    learner = c.runner.init_from if c.collect.learner_plays else None
    found = {}
    for key, path in (("runner.init_from", learner), ("collect.teacher", c.collect.teacher)):
        with contextlib.suppress(CheckpointError):
            if path is not None and (checkpoint := resolve(path, Path(path), key=key)) is not None:
                state = (checkpoint / STATE_FILE).read_bytes()
                found[key] = Played(checkpoint=str(checkpoint.resolve()), sha256=hashlib.sha256(state).hexdigest())
    return found


def player_problems(env: EnvConfig, section: PlaySection) -> Iterator[str]:
    """What is wrong with who plays: what was got, why it cannot be, and what to do."""
    name = section_name(section)
    yield from takeover_problems(section)
    if section.scripted:
        try:
            expert = expert_class(env.env_type, section.expert)
            expert_options(expert, section.expert_params)
        except ConfigError as error:
            yield from error.problems
        except UserError as error:
            other = "collect.policy=model, or " if name == "collect" else ""
            what = str(error).rstrip(".")
            yield f"{name}.expert: {what}. Or let a trained model play: {other}{name}.teacher=<checkpoint>"
    if section.teacher is not None:
        try:
            resolve(section.teacher, Path(section.teacher), key=f"{name}.teacher")
        except CheckpointError as error:
            yield str(error)


TASK = Task(
    config=CollectConfig,
    components=("env",),
    rules=collect_problems,
    arithmetic=None,
    wiring="embodied_rl.tasks.collect.run:CollectWiring",
)
