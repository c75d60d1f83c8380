"""Changes of the configuration since the checkpoint that a run resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from rich import box
from rich.table import Table
from rich.text import Text

from embodied_rl.algorithms.catalog import ADVANTAGES, LEARNERS
from embodied_rl.envs.base import default_params, params_of_the_machine
from embodied_rl.errors import CheckpointError
from embodied_rl.params import flat, shown
from embodied_rl.schema import Config

CONFIG_FILE: Final = "config.yaml"
ABSENT: Final = "(no such key)"
DAMAGED: Final = "restore it, or remove it and resume the run with the same settings, which writes it again"
"""What to do where that file is damaged."""
_OF_THE_CALL: Final = ("runner.about", "runner.resume_dir", "runner.recover", "runner.max_recoveries")
"""Keys that say how a run is started, not what it does."""
_OTHER_CRITIC: Final = "it would be another critic than the one whose weights and moments were saved"
_SHAPES_OF_CRITICS: Final = tuple(
    f"algorithm.sac.{name}" for name in ("num_critics", "hidden_size", "num_layers", "layer_norm")
)
_FIXED: Final[Mapping[str, str]] = {
    "runner.task_type": "another task trains another policy",
    "model": "it would be another policy than the one whose weights and moments were saved",
    "algorithm.learner": "it would lack the critics and the buffer that the other has",
    "critic.revision": _OTHER_CRITIC,
    "env.env_type": "its observations and actions would mean something else",
}
"""Key or section that a run cannot change on its way -> why."""
_FREE: Final = ("model.lora.dropout", "model.attn_implementation", "model.trust_remote_code")
"""Exceptions to that."""
_OF_OUTCOMES: Final = (
    "algorithm.gamma",
    "env.init_params",
    "env.task_ids",
    "env.use_rel_reward",
    "env.reward_coef",
    "env.train.ignore_terminations",
)
"""Keys or sections that decide what came of a chunk, which a replay buffer keeps."""
_OPEN: Final = ("model.params.", "model.hf_overrides.", "env.init_params.")
"""Sections whose keys need not be there to mean something."""
_COMMIT: Final = re.compile("[0-9a-f]{7,40}")
_OF_REFERENCE: Final = ("runner.init_from", "actor.seed")
"""Keys that decide the reference policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key whose value is not what it was."""

    key: str
    before: Any
    """:data:`ABSENT` where there was no such key."""
    now: Any
    refusal: str | None
    """Why the run cannot go on like this; None if it can."""


def compare(checkpoint: Path, config: Config) -> list[Change] | None:
    """The keys that changed, in the configuration's order; None where the checkpoint has no configuration beside it.

    Raises:
        CheckpointError: its configuration cannot be read.
    """
    path = config_of_checkpoint(checkpoint)
    if path is None:
        return None
    saved = read_config(path)
    before, now = dict(flat(saved)), dict(flat(yaml.safe_load(yaml.safe_dump(asdict(config)))))
    _fill(before, now)
    return [
        Change(
            key=key,
            before=before.get(key, ABSENT),
            now=now.get(key, ABSENT),
            refusal=_refusal(key, before, now, config),
        )
        for key in {**now, **before}
        if key not in _OF_THE_CALL and before.get(key, ABSENT) != now.get(key, ABSENT)
    ]


def check(checkpoint: Path, changes: list[Change]) -> None:
    """Refuse what would corrupt the continuation.

    Raises:
        CheckpointError: naming every such key.
    """
    refused = [change for change in changes if change.refusal]
    if refused:
        lines = [f"  {c.key}: {shown(c.before)} -> {shown(c.now)}; {c.refusal}" for c in refused]
        raise CheckpointError(
            f"cannot resume {checkpoint} with this configuration:\n"
            + "\n".join(lines)
            + "\nSet these keys as they were, or start a new run from its weights with runner.init_from."
        )


def table(changes: list[Change]) -> Table:
    """A table of the changes, for the console."""
    rows = Table(title="changed since the checkpoint", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("key", "checkpoint", "now"):
        rows.add_column(name, overflow="fold")
    for change in changes:
        rows.add_row(change.key, *(Text(shown(value)) for value in (change.before, change.now)))
    return rows


def config_of_checkpoint(checkpoint: Path) -> Path | None:
    """The configuration of the run that a checkpoint is in."""
    path = checkpoint.parent.parent / CONFIG_FILE
    return path if checkpoint.parent.name == "checkpoints" and path.is_file() else None


def read_config(path: Path) -> dict[str, Any]:
    """A run's configuration as nested dicts.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        content = yaml.safe_load(path.read_text())
        json.dumps(content, ensure_ascii=False, skipkeys=True, default=str).encode()  # all of it can be printed
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {DAMAGED}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: got {type(content).__name__}, expected a run's configuration; {DAMAGED}")
    return content


def _fill(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Give what one of them leaves out of ``env.init_params`` its default, where both have the same adapter."""
    env_type = now.get("env.env_type")
    if env_type is None or before.get("env.env_type") != env_type:
        return
    for key, value in flat(default_params(str(env_type)), "env.init_params"):
        if (key in before) != (key in now):
            before.setdefault(key, value)
            now.setdefault(key, value)


def _refusal(key: str, before: Mapping[str, Any], now: Mapping[str, Any], config: Config) -> str | None:
    if key in ("algorithm.adv_type", "algorithm.reward_type", "critic.enable"):
        saved, wanted = _value_head(before), _value_head(now)
        if saved != wanted:
            return f"the value head would be {wanted}, and the checkpoint's is {saved}"
    if key in ("model.path", "model.tokenizer_path", "critic.path") and _moved(before.get(key), now.get(key)):
        return None
    # The newest was taken before; a commit now says which one that is.
    if key in ("model.revision", "critic.revision") and _was_open(key, before) and _COMMIT.fullmatch(str(now.get(key))):
        return None
    if config.critic.enable and key.startswith(("critic.path", "critic.params", "critic.hf_overrides")):
        return _OTHER_CRITIC
    if key not in before and not key.startswith(_OPEN):  # it is new here, and did nothing before
        return None
    for fixed, why in _FIXED.items():
        if _within(key, fixed) and key not in _FREE:
            return why
    if LEARNERS[config.algorithm.learner].replays:
        if _of_outcomes(key, str(now.get("env.env_type"))):
            return "the rewards to come would be of another kind; the replay buffer's are those of before"
        if key in _SHAPES_OF_CRITICS:
            return _OTHER_CRITIC
        if key == "algorithm.sac.temperature_lr" and None in (before[key], now[key]):
            return "moments of the temperature are there exactly where it is trained"
    if key in _OF_REFERENCE and config.algorithm.kl_beta > 0:
        return "the reference policy (algorithm.kl_beta) would be another"
    return None


def _of_outcomes(key: str, env_type: str) -> bool:
    section, _, name = key.rpartition(".")
    free = section == "env.init_params" and name in params_of_the_machine(env_type)
    return not free and any(_within(key, part) for part in _OF_OUTCOMES)


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _was_open(key: str, before: Mapping[str, Any]) -> bool:
    """Whether the newest revision was taken. A critic in the model's folder has the model's, where it has none."""
    shared = key == "critic.revision" and before.get("critic.path") in (None, before.get("model.path"))
    return before.get(key) is None and not (shared and before.get("model.revision"))


def _moved(before: Any, now: Any) -> bool:
    """Whether a folder has moved: one of the same name is there, and none at the old path."""
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    old, new = Path(before), Path(now)
    # Not absolute: a name on a hub, or of another working directory; neither says that something is gone.
    return old.is_absolute() and old.name == new.name and new.is_dir() and not old.exists()


def _value_head(flat: Mapping[str, Any]) -> str:
    entry = ADVANTAGES.get(str(flat.get("algorithm.adv_type")))
    if entry is None or not entry.needs_values:
        return "none"
    whose = " in a critic of its own" if flat.get("critic.enable") else ""
    return f"one at {flat.get('algorithm.reward_type')}{whose}"
