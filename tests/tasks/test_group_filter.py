"""The group filter's bounds: which are refused, and what those of documented recipes let pass."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from embodied_rl.algorithms.filters import group_filter
from embodied_rl.cli import config_of
from embodied_rl.errors import ConfigError
from embodied_rl.schema import AlgorithmConfig, EmbodiedConfig

FILTER = "algorithm=grpo", "algorithm.filter_rewards=true"


def bounds(lower: float, upper: float) -> list[str]:
    return [f"algorithm.rewards_lower_bound={lower}", f"algorithm.rewards_upper_bound={upper}"]


def problems(*overrides: str) -> list[str]:
    try:
        config_of(*overrides)
    except ConfigError as refused:
        return refused.problems
    return []


def passing(algorithm: AlgorithmConfig) -> list[int]:
    """Numbers of successes with which a group passes."""
    size = algorithm.group_size
    scores = torch.tensor([[float(place < k) for place in range(size)] for k in range(size + 1)])
    kept = group_filter(
        scores.flatten(),
        torch.arange(size + 1).repeat_interleave(size),
        rewards_lower_bound=algorithm.rewards_lower_bound,
        rewards_upper_bound=algorithm.rewards_upper_bound,
    )
    return [k for k in range(size + 1) if kept.view(size + 1, size)[k].all()]


def commands(page: str) -> list[str]:
    """Whole ``python train.py`` commands of a page."""
    text = Path(page).read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip().startswith("python train.py")]


def test_the_oft_recipes_take_groups_with_one_to_seven_successes_of_eight(tmp_path: Path) -> None:
    recipes = [command for command in commands("docs/openvla_oft.md") if "filter_rewards=true" in command]
    assert len(recipes) == 2
    for recipe in recipes:
        overrides = [word for word in shlex.split(recipe)[2:] if not word.startswith("model.path=")]
        config = config_of(*overrides, f"model.path={tmp_path}")
        assert config.algorithm.group_size == 8
        assert passing(config.algorithm) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_dapo_takes_groups_in_which_some_succeed_and_some_fail_in_every_env(size: int) -> None:
    for env in ("libero_spatial", "libero_10", "dummy"):
        config = config_of(
            f"env={env}", "algorithm=dapo", f"algorithm.group_size={size}", "env.train.total_num_envs=256"
        )
        assert isinstance(config, EmbodiedConfig)
        assert passing(config.algorithm) == list(range(1, size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 10])
def test_bounds_are_refused_exactly_where_no_group_can_pass(size: int) -> None:
    envs = f"env.train.total_num_envs={8 * size}"
    for lower, upper in ((0.0, 0.0), (0.1, 0.9), (0.3, 0.32), (0.4, 0.6), (0.45, 0.49), (0.99, 1.0), (0.9, 0.9)):
        found = problems(
            "env=dummy",
            "algorithm=grpo",
            "algorithm.adv_type=raw",
            "algorithm.filter_rewards=true",
            f"algorithm.group_size={size}",
            envs,
            *bounds(lower, upper),
        )
        possible = any(lower <= k / size <= upper for k in range(size + 1))
        assert any("no group of group_size" in text for text in found) != possible, (lower, upper)
        assert len(found) == (not possible)


WEIGHTED = "[{function: math_verify, weight: 0.9}, {function: format, weight: 0.2}]"
TENTHS = "[{function: math_verify, weight: 0.7}, {function: format, weight: 0.2}, {function: last_number, weight: 0.1}]"
OWN = "tests.language.rewards.scores:by_text"


@pytest.mark.parametrize(
    ("overrides", "lower", "upper", "message"),
    [
        (["env=libero_10"], 0.5, 4.5, "rewards_upper_bound: got 4.5, but it is compared with a group's mean score"),
        (["env=libero_spatial"], 0.5, 4.5, "an episode's score is its success, 1 or 0, whatever its rewards"),
        (["env=dummy"], -1.0, 0.5, "rewards_lower_bound: got -1, but"),
        (["env=dummy"], 0.0, 1.0, None),
        (["task=math"], 0.0, 1.5, "is what reward.function=final_answer gives, 1 or 0, without penalties; use 0 to 1"),
        (["task=math"], 0.3, 0.31, "no group of group_size=8 can pass"),
        (["task=math", "reward.function=weighted", f"++reward.params.functions={WEIGHTED}"], 0.3, 0.31, None),
        (
            ["task=math", "reward.function=weighted", f"++reward.params.functions={WEIGHTED}"],
            0.3,
            1.2,
            "0 to 1.1, without",
        ),
        (["task=math", "reward.function=weighted", f"++reward.params.functions={TENTHS}"], 0.2, 1.0, None),
        (["task=math", f"reward.function={OWN}"], -3.0, 70.0, None),
        (["task=math", f"reward.function={OWN}"], 3.0, 2.0, "every group would be masked"),
    ],
)
def test_bounds_and_the_scores_that_there_can_be(
    overrides: list[str], lower: float, upper: float, message: str | None
) -> None:
    found = problems(*overrides, *FILTER, *bounds(lower, upper))
    assert [message is None or message in text for text in found] == [True] * (message is not None), found
