"""Advantage estimators and policy losses by name, and which levels fit together.

A built-in algorithm is one function and one line here. One from outside is one function in a file or package, declared
by :func:`advantage_estimator` or :func:`policy_loss`. A keyword parameter of the function that is a key of the section
``algorithm`` gets that key's value; all others are its own hyperparameters, the keys of ``algorithm.params``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from embodied_rl.errors import UserError
from embodied_rl.params import field_values, keyword_options, parse_params
from embodied_rl.registry import Registry, load_class
from embodied_rl.schema import AlgorithmConfig
from embodied_rl.schema.types import LogprobLevel, RewardLevel

GROUP: Final = "embodied_rl.algorithms"
"""Entry points of both kinds."""
GIVEN: Final = ("inputs", "logprobs", "old_logprobs", "proximal_logprobs", "advantages", "mask")
"""Parameters that the training step hands over; all others are hyperparameters."""
PROXIMAL: Final = ("prox_logp_method", "behav_imp_weight_cap", "m2_threshold")
"""Keys that the training step reads for a loss that takes ``proximal_logprobs``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One algorithm: where it is and what it asks for."""

    function: str | Callable[..., Any]
    """``module:function``, imported at the first :meth:`load`; or the function itself."""
    options: tuple[str, ...]
    """Names of its hyperparameters that are keys of ``algorithm``."""
    params: type | None = None
    """Dataclass of its own hyperparameters, the keys of ``algorithm.params``."""
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
        if callable(self.function):
            return self.function
        return Registry("algorithm", {}, kind="function").load(self.function)

    def own_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Its part of ``algorithm.params``, checked.

        Raises:
            ConfigError: a value that is missing or of the wrong type.
        """
        if self.params is None:
            return {}
        names = {field.name for field in dataclasses.fields(self.params)}
        own = {name: value for name, value in params.items() if name in names}
        return field_values(parse_params(self.params, own, "algorithm.params"))

    def hyperparameters(self, algorithm: AlgorithmConfig) -> dict[str, Any]:
        """The keyword arguments that it is called with, beside what the training step gives."""
        return {name: getattr(algorithm, name) for name in self.options} | self.own_params(algorithm.params)


class Catalog(Mapping[str, Entry]):
    """Entries by name. Iterating gives the built-in ones; a look-up also finds those from outside.

    Raises:
        UserError: from a look-up, where the name leads to no algorithm of this kind.
    """

    def __init__(self, key: str, declaration: str, builtin: Mapping[str, Entry]) -> None:
        self._key, self._declaration, self._builtin = key, declaration, builtin
        functions = {name: str(entry.function) for name, entry in builtin.items()}
        self._registry = Registry(f"algorithm.{key}", functions, group=GROUP, kind="function")
        self._by_function = {function: builtin[name] for name, function in functions.items()}

    def __getitem__(self, name: str) -> Entry:
        if name in self._by_function:
            return self._by_function[name]
        if problem := self._registry.problem(name):
            raise UserError(problem)
        if name in self._builtin:
            return self._builtin[name]
        declared = getattr(self._registry.load(name), "__algorithm__", {})
        if self._key not in declared:
            raise UserError(
                f"algorithm.{self._key}: got {name!r}, which is not declared as one; put @{self._declaration}() from "
                "embodied_rl.algorithms.catalog above the function"
            )
        return declared[self._key]

    def get(self, name: str, default: Any = None) -> Any:
        """The entry, or ``default`` where there is none."""
        try:
            return self[name]
        except UserError:
            return default

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._builtin)

    def __len__(self) -> int:
        return len(self._builtin)


_F = TypeVar("_F", bound=Callable[..., Any])


def advantage_estimator(
    *,
    needs_values: bool = False,
    needs_groups: bool = False,
    scores_episodes: bool = False,
    batch_normalized: bool = False,
    reward_normalized: bool = False,
) -> Callable[[_F], _F]:
    """Declare a function ``(inputs: AdvantageInputs, *, <hyperparameters>) -> AdvantageEstimate`` for
    ``algorithm.adv_type``. The arguments are those of :class:`Entry`."""
    return _declared(
        "adv_type",
        needs_values=needs_values,
        needs_groups=needs_groups,
        scores_episodes=scores_episodes,
        batch_normalized=batch_normalized,
        reward_normalized=reward_normalized,
    )


def policy_loss(*, weighs_by_advantage: bool = False) -> Callable[[_F], _F]:
    """Declare a function ``(*, logprobs, old_logprobs, advantages, mask, <hyperparameters>) -> (unit losses,
    Diagnostics)`` for ``algorithm.loss_type``. One that takes ``proximal_logprobs`` is given them, too, and the keys in
    :data:`PROXIMAL` are read for it. The arguments are those of :class:`Entry`."""
    return _declared("loss_type", weighs_by_advantage=weighs_by_advantage)


def _declared(key: str, **needs: Any) -> Callable[[_F], _F]:
    def declare(function: _F) -> _F:
        keys = {field.name for field in dataclasses.fields(AlgorithmConfig)} - {"params"}
        names = set(inspect.signature(function).parameters)
        options = tuple(sorted(names & keys))
        own = keyword_options(function, {*GIVEN, *options})
        if own is None:
            raise UserError(f"{function.__name__}: its hyperparameters have no names; write them out instead of **")
        entry = Entry(
            function=function,
            options=options,
            params=own if dataclasses.fields(own) else None,
            sections=PROXIMAL if "proximal_logprobs" in names else (),
            **needs,
        )
        vars(function).setdefault("__algorithm__", {})[key] = entry
        return function

    return declare


ADVANTAGES: Final = Catalog(
    "adv_type",
    "advantage_estimator",
    {
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
    },
)
"""``algorithm.adv_type``; each is a function ``(AdvantageInputs, *, <options>) -> AdvantageEstimate``."""

POLICY_LOSSES: Final = Catalog(
    "loss_type",
    "policy_loss",
    {
        "ppo": Entry(
            function="embodied_rl.algorithms.losses:ppo_policy_loss",
            options=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "importance_sampling_level"),
            weighs_by_advantage=True,
        ),
        "decoupled_ppo": Entry(
            function="embodied_rl.algorithms.losses:decoupled_ppo_policy_loss",
            options=(
                *("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "importance_sampling_level"),
                *("behav_imp_weight_cap", "behav_imp_weight_mode"),
            ),
            weighs_by_advantage=True,
            sections=("prox_logp_method", "m2_threshold"),
        ),
        "aipo": Entry(
            function="embodied_rl.algorithms.losses:aipo_policy_loss",
            options=("aipo_rho", "importance_sampling_level"),
            weighs_by_advantage=True,
        ),
        "nll": Entry(function="embodied_rl.algorithms.losses:nll_policy_loss", options=()),
    },
)
"""``algorithm.loss_type``; each is a function (logprobs, old_logprobs, advantages, mask, <options>) -> unit losses. One
with ``prox_logp_method`` among its ``sections`` is also given ``proximal_logprobs``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A way to train."""

    worker: str
    """``module:Class`` of its actor."""
    replays: bool = False
    """It trains on a replay buffer: rollout workers record executed actions, and every state that is led to."""

    def load(self) -> type:
        return load_class("algorithm.learner", {}, self.worker)


LEARNERS: Final[Mapping[str, Learner]] = {
    "on_policy": Learner(worker="embodied_rl.workers.actor:ActorWorker"),
    "sac": Learner(worker="embodied_rl.workers.replay_actor:ReplayActor", replays=True),
}
"""``algorithm.learner``. What trains otherwise, such as one that steers a frozen base, is one more actor and one more
line here."""


def check_levels(reward_type: RewardLevel, logprob_type: LogprobLevel) -> None:
    """Refuse a reward level that is finer than the log-probability level: an advantage is copied to finer units, never
    merged.

    Raises:
        ValueError: action-level rewards with chunk-level log-probabilities.
    """
    if (reward_type, logprob_type) == ("action_level", "chunk_level"):
        raise ValueError(
            f"algorithm.reward_type={reward_type} with algorithm.logprob_type={logprob_type}: the C advantages "
            "of a chunk cannot share its one ratio; use logprob_type=action_level or token_level, "
            "or reward_type=chunk_level"
        )
