"""What cannot be asked of the group filter: bounds that no group can meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embodied_rl.errors import ConfigError
from embodied_rl.language.rewards.functions import PASS_OR_FAIL, parts_of, score_range
from embodied_rl.schema import Config, EmbodiedConfig, MathConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """What members of a group can score."""

    name: str
    low: float
    high: float
    pass_or_fail: bool
    """Nothing between ``low`` and ``high``."""


def filter_problems(c: Config) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    a = c.algorithm
    if a.max_resample_rounds and not a.filter_rewards:
        yield "algorithm.max_resample_rounds: nothing is filtered, so nothing is missing; set filter_rewards=true"
    lower, upper, size = a.rewards_lower_bound, a.rewards_upper_bound, a.group_size
    if lower > upper:
        yield (
            f"algorithm.rewards_lower_bound={lower} is above rewards_upper_bound={upper}: every group would be masked"
        )
    elif a.filter_rewards and (scores := _scores(c)):
        outside = [
            f"algorithm.{key}: got {bound:g}, but it is compared with a group's mean score, and {scores.name}; use "
            f"{scores.low:g} to {scores.high:g}"
            for key, bound in (("rewards_lower_bound", lower), ("rewards_upper_bound", upper))
            if not scores.low <= bound <= scores.high
        ]
        yield from outside
        means = [k / size for k in range(size + 1)]
        if scores.pass_or_fail and not outside and not any(lower <= mean <= upper for mean in means):
            yield (
                f"algorithm.rewards_lower_bound={lower:g}, rewards_upper_bound={upper:g}: no group of "
                f"group_size={size} can pass, since {scores.name}, and so means are multiples of 1/{size}; widen the "
                "bounds, or use larger groups"
            )


def _scores(c: Config) -> _Scores | None:
    """None where nothing is known of them."""
    if isinstance(c, EmbodiedConfig):
        name = "an episode's score is its success, 1 or 0, whatever its rewards (env.reward_coef)"
        return _Scores(name=name, low=0.0, high=1.0, pass_or_fail=True)
    if not isinstance(c, MathConfig):
        return None
    try:
        known = score_range(parts_of(c.reward.function, c.reward.params))
    except ConfigError:  # said where rewards are checked
        return None
    if known is None:
        return None
    low, high = known
    pass_or_fail = c.reward.function in PASS_OR_FAIL
    between = f"{high:g} or {low:g}" if pass_or_fail else f"{low:g} to {high:g}"
    name = f"a completion's score is what reward.function={c.reward.function} gives, {between}, without penalties"
    return _Scores(name=name, low=low, high=high, pass_or_fail=pass_or_fail)
