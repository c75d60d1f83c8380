"""Every key of the algorithm and of the optimiser changes what a run does: none is read by nobody."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import pytest
import torch

from embodied_rl.schema import (
    AlgorithmConfig,
    EmbodiedConfig,
    KLControllerConfig,
    NormConfig,
    OptimConfig,
    SamplingConfig,
)
from tests.workers.job import Job, easy, small

Observable = Literal["rollout", "update", "evaluation"]


@dataclass(frozen=True)
class Case:
    """What happens to a run in which ``key`` is ``value`` instead of its default."""

    key: str
    value: Any
    algorithm: Literal["ppo", "grpo"] = "ppo"
    given: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of both runs, without which this one means nothing."""
    changes: Observable = "update"
    """The first thing that it changes; what comes before it stays."""


RAW = {
    "algorithm.adv_type": "raw",
    "algorithm.normalize_advantages": False,
    "actor.optim.adam_eps": 0.1,  # Adam hardly sees by what factor a gradient is larger
}
MEAN, STD = "algorithm.reward_norm.mean_level", "algorithm.reward_norm.std_level"
COARSE = {"actor.optim.adam_eps": 0.1}
LARGE_STEPS = {"actor.optim.lr": 0.05, "algorithm.update_epoch": 4}
"""So that ratios and values leave their clipping ranges."""
FILTER = {
    "algorithm.filter_rewards": True,
    "algorithm.rewards_lower_bound": 0.0,
    "algorithm.rewards_upper_bound": 1.0,
}

CASES = [
    Case("algorithm.adv_type", "grpo"),
    Case("algorithm.group_size", 4, "grpo", changes="rollout"),
    Case("algorithm.rollout_epoch", 2, changes="rollout"),
    Case("algorithm.update_epoch", 2),
    Case("algorithm.n_minibatches", 2),
    Case("algorithm.reward_type", "action_level", changes="rollout"),
    Case("algorithm.logprob_type", "chunk_level", given=LARGE_STEPS),
    Case("algorithm.entropy_type", "chunk_level", given={"algorithm.entropy_bonus": 0.1}),
    Case("algorithm.gamma", 0.5),
    Case("algorithm.gae_lambda", 0.2),
    Case("algorithm.normalize_advantages", False),
    Case("algorithm.reward_norm.mean_level", "group", "grpo", given=RAW),
    Case("algorithm.reward_norm.std_level", "batch", "grpo", given=RAW),
    Case("algorithm.reward_norm.leave_one_out", True, "grpo", given={**RAW, MEAN: "batch"}),
    Case("algorithm.reward_norm.unbiased_std", False, "grpo", given={**RAW, STD: "group"}),
    Case("algorithm.reward_norm.eps", 1.0, "grpo", given={**RAW, STD: "group"}),
    Case("algorithm.adv_norm.mean_level", "group", given=COARSE),
    Case("algorithm.adv_norm.std_level", "none", given=COARSE),
    Case("algorithm.adv_norm.leave_one_out", True, given=COARSE),
    Case("algorithm.adv_norm.unbiased_std", False, given=COARSE),
    Case("algorithm.adv_norm.eps", 1.0, given=COARSE),
    Case("algorithm.normalize_returns", True),
    Case("algorithm.norm_std", False, "grpo"),
    Case("algorithm.filter_rewards", True, "grpo", given={"algorithm.rewards_lower_bound": 0.5}),
    Case("algorithm.rewards_lower_bound", 1.0, "grpo", given=FILTER),
    Case("algorithm.rewards_upper_bound", 0.4, "grpo", given=FILTER),
    Case("algorithm.importance_sampling_level", "sequence", given=LARGE_STEPS),
    Case("algorithm.clip_ratio_low", 0.01, given=LARGE_STEPS),
    Case("algorithm.clip_ratio_high", 0.01, given=LARGE_STEPS),
    Case("algorithm.clip_ratio_c", 1.01, given=LARGE_STEPS),
    Case("algorithm.loss_type", "aipo", given=LARGE_STEPS),
    Case("algorithm.aipo_rho", 1.01, given={**LARGE_STEPS, "algorithm.loss_type": "aipo"}),
    Case("algorithm.early_stop_imp_ratio", 0.5, given=LARGE_STEPS),
    Case("algorithm.positive_nll_coef", 0.5),
    Case("algorithm.loss_agg_func", "seq-mean-token-mean"),
    Case("algorithm.loss_scale_factor", 2.0, given={**COARSE, "algorithm.loss_agg_func": "seq-mean-token-sum-norm"}),
    Case("algorithm.kl_beta", 0.5, given=LARGE_STEPS),
    Case("algorithm.kl_penalty_type", "k2", given={**LARGE_STEPS, "algorithm.kl_beta": 0.5}),
    Case("algorithm.critic_warmup_steps", 1),
    Case("algorithm.value_loss_coef", 2.0),
    Case("algorithm.value_clip", 0.001, given=LARGE_STEPS),
    Case("algorithm.huber_delta", 0.01),
    Case("algorithm.entropy_bonus", 0.1),
    Case("algorithm.sampling_params.temperature", 2.0, changes="rollout"),
    Case("algorithm.sampling_params.temperature_eval", 2.0, changes="evaluation"),
    Case("actor.optim.lr", 0.002),
    Case("actor.optim.value_lr", 0.01),
    Case("actor.optim.adam_beta1", 0.5, given={"algorithm.update_epoch": 3}),
    Case("actor.optim.adam_beta2", 0.5, given={"algorithm.update_epoch": 3}),
    Case("actor.optim.adam_eps", 0.01),
    Case("actor.optim.weight_decay", 0.5),
    Case("actor.optim.clip_grad", 0.01),
    Case("actor.optim.state_dtype", "bfloat16", given={"algorithm.update_epoch": 3}),
]

ELSEWHERE = {
    "algorithm.sampling_params": "a section",
    "algorithm.reward_norm": "a section",
    "algorithm.adv_norm": "a section",
    "algorithm.kl_ctrl": "a section",
    **dict.fromkeys(
        ["algorithm.bc_coef", "algorithm.bc_path", "algorithm.bc_batch_size"], "tests/training/test_demonstrated.py"
    ),
    **dict.fromkeys(
        ["algorithm.sampling_params.top_p", "algorithm.sampling_params.top_k"], "tests/models/test_truncation.py"
    ),
    "algorithm.learner": "tests/workers/test_replay.py",
    "algorithm.replay": "tests/workers/test_replay.py",
    "algorithm.sac": "tests/training/test_sac.py",
    "algorithm.params": "of functions from outside: tests/packaging/test_recipes.py",
    # Without a difference between the policies that act, are trained and are referred to, they change nothing.
    **dict.fromkeys(
        [
            "algorithm.prox_logp_method",
            "algorithm.behav_imp_weight_cap",
            "algorithm.behav_imp_weight_mode",
            "algorithm.m2_threshold",
            "algorithm.kl_in",
            "algorithm.kl_ctrl.type",
            "algorithm.kl_ctrl.target_kl",
            "algorithm.kl_ctrl.horizon",
        ],
        "tests/training/test_logprobs.py",
    ),
    "actor.optim.skip_nonfinite": "tests/training/test_update.py",
    "algorithm.max_resample_rounds": "tests/test_resampling.py",
    "algorithm.min_filter_prefix_tokens": "tests/training/test_batch.py, tests/test_presets.py",
}


def changed(config: Any, key: str, value: Any) -> Any:
    """A copy of a nested dataclass in which the dotted ``key`` is ``value``."""
    first, _, rest = key.partition(".")
    assert first in {f.name for f in dataclasses.fields(config)}, key
    new = changed(getattr(config, first), rest, value) if rest else value
    return dataclasses.replace(config, **{first: new})


@cache
def base(algorithm: str) -> EmbodiedConfig:
    one = ("algorithm.update_epoch=1", "algorithm.n_minibatches=1", "algorithm.group_size=2")
    return easy(small(f"algorithm={algorithm}", *one, "algorithm.clip_ratio_c=null"), 0.7)


def outcome(config: EmbodiedConfig) -> dict[Observable, list[Any]]:
    """Everything that a training step and an evaluation show."""
    with Job(config) as job:
        episodes = job.evaluate()
        trajectories, _, _ = job.roll()
        metrics = job.update()
        weights = job.weights()
    rollout: list[Any] = [len(trajectories), [t.group_ids.tolist() for t in trajectories]]
    rollout += [t.logprobs for t in trajectories] + [t.rewards for t in trajectories]
    rollout += [t.values for t in trajectories if t.values is not None and config.algorithm.adv_type == "gae"]
    return {
        "evaluation": sorted((e.reset_state_id, e.success, e.episode_return) for e in episodes),
        "rollout": rollout,
        # Not the metrics: a key that is only reported about is read by nobody.
        "update": [
            weights["log_std"],
            weights["policy.0.weight"],
            weights.get("value_head.0.weight", metrics["samples"]),
        ],
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and left == right


def keys(section: type, prefix: str) -> Iterator[str]:
    for f in dataclasses.fields(section):
        yield f"{prefix}.{f.name}"


def test_every_key_has_a_case() -> None:
    wanted = {
        *keys(AlgorithmConfig, "algorithm"),
        *keys(SamplingConfig, "algorithm.sampling_params"),
        *keys(NormConfig, "algorithm.reward_norm"),
        *keys(NormConfig, "algorithm.adv_norm"),
        *keys(KLControllerConfig, "algorithm.kl_ctrl"),
        *keys(OptimConfig, "actor.optim"),
    }
    assert {case.key for case in CASES} | ELSEWHERE.keys() == wanted


@cache
def base_outcome(algorithm: str, given: tuple[tuple[str, Any], ...]) -> dict[Observable, list[Any]]:
    config = base(algorithm)
    for key, value in given:
        config = changed(config, key, value)
    return outcome(config)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_same_config_gives_the_same_outcome(algorithm: str) -> None:
    """Otherwise the test below would say nothing."""
    assert same(list(base_outcome(algorithm, ()).values()), list(outcome(base(algorithm)).values()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_the_key_is_read(case: Case) -> None:
    config = base(case.algorithm)
    for key, value in case.given.items():
        config = changed(config, key, value)
    config = changed(config, case.key, case.value)
    before, after = base_outcome(case.algorithm, tuple(case.given.items())), outcome(config)
    if case.changes == "evaluation":
        assert not same(before["evaluation"], after["evaluation"])
        assert same(before["update"], after["update"])
        return
    assert not same(before["update"], after["update"])
    if case.key not in ("algorithm.adv_type", "algorithm.reward_type"):  # another value head, other initial weights
        assert same(before["evaluation"], after["evaluation"])
        assert same(before["rollout"], after["rollout"]) == (case.changes == "update")


def test_the_seed_and_the_rest_of_the_actors_keys() -> None:
    before = base_outcome("ppo", ())
    assert not same(before["update"], outcome(changed(base("ppo"), "actor.seed", 5))["update"])
    halves = changed(changed(base("ppo"), "algorithm.n_minibatches", None), "actor.global_batch_size", 10)
    assert not same(before["update"], outcome(halves)["update"])
    for key, value in (("actor.micro_batch_size", 3), ("actor.fsdp_config.reshard_after_forward", False)):
        after = outcome(changed(base("ppo"), key, value))
        assert same(before["rollout"], after["rollout"])
        for left, right in zip(before["update"], after["update"], strict=True):
            assert torch.allclose(left, right, rtol=0, atol=1e-5), f"{key} has no influence"
            assert math.isfinite(left.sum())
