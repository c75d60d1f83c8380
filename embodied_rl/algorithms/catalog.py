"""Advantage estimators and policy losses by name.

A new algorithm is one function and one line here. ``options`` are the hyperparameters that the function reads, by their
names under ``algorithm.``: the caller hands over those and no others, and the config's checks refuse the rest.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One algorithm: where it is and what it asks for."""

    function: str
    """``module:function``, imported at the first :meth:`load`."""
    options: tuple[str, ...]
    """Names of its keyword hyperparameters."""
    needs_values: bool = False
    """It needs a policy with a value head."""
    needs_groups: bool = False
    """It compares the members of a group, so groups must have two or more."""
    scores_episodes: bool = False
    """It gives a whole rollout of an env one score, so a rollout must be one episode."""
    batch_normalized: bool = False
    """Its advantages may be normalised (``algorithm.normalize_advantages``)."""
    reward_normalized: bool = False
    """Scores may be normalised for it (``algorithm.reward_norm``)."""
    weighs_by_advantage: bool = False
    """Units with an advantage of 0 have no gradient."""
    sections: tuple[str, ...] = ()
    """Further keys that the training step reads on its behalf, and on that of no entry without them."""

    def load(self) -> Callable[..., Any]:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


ADVANTAGES: Mapping[str, Entry] = {
    "gae": Entry(
        function="embodied_rl.algorithms.advantages:gae",
        options=("gamma", "gae_lambda"),
        needs_values=True,
        batch_normalized=True,
    ),
    "grpo": Entry(
        function="embodied_rl.algorithms.advantages:grpo",
        options=("norm_std",),
        needs_groups=True,
        scores_episodes=True,
    ),
    "rloo": Entry(
        function="embodied_rl.algorithms.advantages:rloo", options=(), needs_groups=True, scores_episodes=True
    ),
    "reinforce_plus_plus": Entry(
        function="embodied_rl.algorithms.advantages:reinforce_plus_plus",
        options=("gamma",),
        batch_normalized=True,
        reward_normalized=True,
        scores_episodes=True,
    ),
    "reinforce_plus_plus_baseline": Entry(
        function="embodied_rl.algorithms.advantages:reinforce_plus_plus_baseline",
        options=("gamma",),
        needs_groups=True,
        batch_normalized=True,
        scores_episodes=True,
    ),
    "raw": Entry(
        function="embodied_rl.algorithms.advantages:raw",
        options=(),
        batch_normalized=True,
        reward_normalized=True,
        scores_episodes=True,
    ),
}
"""``algorithm.adv_type``; each is a function ``(AdvantageInputs, *, <options>) -> AdvantageEstimate``."""

POLICY_LOSSES: Mapping[str, Entry] = {
    "ppo": Entry(
        function="embodied_rl.algorithms.losses:ppo_policy_loss",
        options=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "importance_sampling_level"),
        weighs_by_advantage=True,
    ),
    "decoupled_ppo": Entry(
        function="embodied_rl.algorithms.losses:decoupled_ppo_policy_loss",
        options=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "importance_sampling_level"),
        weighs_by_advantage=True,
        sections=("prox_logp_method", "behav_imp_weight_cap", "m2_threshold"),
    ),
    "aipo": Entry(
        function="embodied_rl.algorithms.losses:aipo_policy_loss",
        options=("aipo_rho", "importance_sampling_level"),
        weighs_by_advantage=True,
    ),
    "nll": Entry(function="embodied_rl.algorithms.imitation:nll_policy_loss", options=()),
}
"""``algorithm.loss_type``; each is a function (logprobs, old_logprobs, advantages, mask, <options>) -> unit losses. One
with ``prox_logp_method`` among its ``sections`` is also given ``proximal_logprobs``."""


def lookup(table: Mapping[str, Entry], key: str, name: str) -> Entry:
    """The entry called ``name``; ``key`` is the config key that names it, for the message.

    Raises:
        ValueError: no such entry; the message suggests the nearest.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"algorithm.{key}: got {name!r}, expected one of {', '.join(sorted(table))}{hint}")
