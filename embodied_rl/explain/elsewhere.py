"""Keys of ours that other programs call otherwise, for the message of one that does not exist."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from embodied_rl.explain.catalog import SYSTEMS, load_entries

_COMMON: Final = {
    "batch_size": ("actor.global_batch_size", "algorithm.n_minibatches"),
    "clip_range": ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "ent_coef": ("algorithm.entropy_bonus",),
    "entropy_coef": ("algorithm.entropy_bonus",),
    "kl_coef": ("algorithm.kl_beta",),
    "learning_rate": ("actor.optim.lr",),
    "n_envs": ("env.train.total_num_envs",),
    "n_epochs": ("algorithm.update_epoch",),
    "n_steps": ("env.train.max_steps_per_rollout_epoch",),
    "num_envs": ("env.train.total_num_envs",),
    "num_episodes": ("env.eval.episodes_per_task",),
    "total_timesteps": ("runner.max_steps",),
    "vf_coef": ("algorithm.value_loss_coef",),
}
"""What Stable-Baselines3, Gymnasium and many scripts call what we have."""


def ours_for(key: str, known: Collection[str]) -> str:
    """``" That is 'x' here"`` for a key of another program, in full or its last part; empty where none is known, or
    a key of ours ends in the name of another system's.

    Args:
        known: our keys, in the run's configuration.
    """
    last = _last(key)
    found = _COMMON.get(last) or ()
    if not found and all(_last(name) != last for name in known):
        found = _of_systems(lambda name: name == key) or _of_systems(lambda name: _last(name) == last)
    there = [name for name in found if name in known]
    return f" That is {' and '.join(map(repr, there))} here (python train.py explain {there[0]})" if there else ""


def _of_systems(fits: Callable[[str], bool]) -> tuple[str, ...]:
    """Our keys for the key of a system that fits; none where several mean different things."""
    found = {e.ours for e in load_entries() if e.ours and any(fits(name) for s in SYSTEMS for name in e.keys(s))}
    return found.pop() if len(found) == 1 else ()


def _last(name: str) -> str:
    return name.rpartition(".")[2]
