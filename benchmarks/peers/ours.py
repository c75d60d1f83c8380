"""What is compared: the functions of ``embodied_rl.algorithms``, called as the workers call them.

Names have the form ``function: variant``. A variant named ``as <peer>`` adopts one convention of that peer, to prove
that it explains a difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.inputs import CHUNKS, ENVS, LENGTH, SEQUENCES, Computations, Inputs, Outputs
from embodied_rl.algorithms.advantages import (
    AdvantageEstimate,
    AdvantageInputs,
    gae,
    grpo,
    raw,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from embodied_rl.algorithms.losses import KLController, kl_estimate
from embodied_rl.algorithms.statistics import normalize, rollout_returns
from embodied_rl.schema.types import RewardLevel

COMPUTATIONS = Computations()


def whiten(advantages: Tensor, mask: Tensor, **how: Any) -> Tensor:
    options: dict[str, Any] = {"mean_level": "batch", "std_level": "batch", "eps": 0.0, **how}
    return normalize(advantages, mask, **options)


# Completions: a token is a chunk of one step, time is the first axis. ------------------------------------------------


def tokens(x: Inputs, mask: Tensor, *, penalties: Tensor | None = None) -> AdvantageInputs:
    """[B,L] as a rollout; the reward of a completion is paid at its last valid token."""

    def in_time(t: Tensor) -> Tensor:
        return t.T.unsqueeze(-1).contiguous()

    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    # The value of what follows a token: that of the next valid token, and 0 after the last.
    following = torch.zeros_like(x["values"])
    ahead = torch.zeros(SEQUENCES)
    for t in range(LENGTH - 1, -1, -1):
        following[:, t] = ahead
        ahead = torch.where(mask[:, t], x["values"][:, t], ahead)
    return AdvantageInputs(
        reward_level="chunk_level",
        rewards=in_time(x["token_rewards"]),
        terminated=in_time(last),
        truncated=in_time(torch.zeros_like(mask)),
        valid=in_time(mask),
        group_ids=x["group_ids"],
        scores=x["scores"],
        penalties=None if penalties is None else in_time(penalties),
        values=in_time(x["values"]),
        bootstrap_values=following.T.contiguous(),
    )


def per_token(estimate: AdvantageEstimate) -> Tensor:
    return estimate.advantages.T


for _mask in ("mask", "mask_with_holes", "mask_late"):

    @COMPUTATIONS(f"gae: {_mask}")
    def _gae(x: Inputs, name: str = _mask) -> Outputs:
        estimate = gae(tokens(x, x[name]), gamma=0.99, gae_lambda=0.9)
        assert estimate.returns is not None
        return {
            "whitened advantages": whiten(per_token(estimate), x[name]),
            "returns": estimate.returns.squeeze(-1).T,
        }

    @COMPUTATIONS(f"grpo: {_mask}")
    def _grpo(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": per_token(grpo(tokens(x, x[name])))}

    @COMPUTATIONS(f"grpo, no std: {_mask}")
    def _grpo_centred(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": per_token(grpo(tokens(x, x[name]), norm_std=False))}

    @COMPUTATIONS(f"rloo: {_mask}")
    def _rloo(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": per_token(rloo(tokens(x, x[name])))}

    @COMPUTATIONS(f"raw: {_mask}")
    def _raw(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": per_token(raw(tokens(x, x[name])))}

    @COMPUTATIONS(f"reinforce++: {_mask}")
    def _reinforce(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": whiten(per_token(reinforce_plus_plus(tokens(x, x[name]), gamma=0.9)), x[name])}

    @COMPUTATIONS(f"reinforce++, gamma 1: {_mask}")
    def _reinforce_undiscounted(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": whiten(per_token(reinforce_plus_plus(tokens(x, x[name]), gamma=1.0)), x[name])}

    @COMPUTATIONS(f"reinforce++, gamma 1, biased std: {_mask}")
    def _reinforce_biased(x: Inputs, name: str = _mask) -> Outputs:
        a = per_token(reinforce_plus_plus(tokens(x, x[name]), gamma=1.0))
        return {"advantages": whiten(a, x[name], unbiased_std=False)}

    @COMPUTATIONS(f"reinforce++ baseline, gamma 1: {_mask}")
    def _baseline(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": whiten(per_token(reinforce_plus_plus_baseline(tokens(x, x[name]), gamma=1.0)), x[name])}

    @COMPUTATIONS(f"reinforce++, KL in the reward: {_mask}")
    def _reinforce_kl(x: Inputs, name: str = _mask) -> Outputs:
        penalties = 0.1 * kl_estimate(x["logprobs"], x["reference_logprobs"], "k3")
        a = per_token(reinforce_plus_plus(tokens(x, x[name], penalties=penalties), gamma=1.0))
        return {"advantages": whiten(a, x[name], unbiased_std=False)}


@COMPUTATIONS("reinforce++, as rlinf, paid by the mirrored row: mask_late")
def _reinforce_mirrored(x: Inputs) -> Outputs:
    mask = x["mask_late"]
    paid_at = LENGTH - 1 - mask.flip(0).long().argmax(1, keepdim=True)
    returns = torch.where(torch.arange(LENGTH) <= paid_at, x["scores"].unsqueeze(-1), 0.0)
    return {"advantages": whiten(returns, mask, unbiased_std=False)}


@COMPUTATIONS("grpo: equal scores")
def _equal_scores(x: Inputs) -> Outputs:
    x = {**x, "group_ids": x["large_group_ids"], "scores": x["equal_scores"]}
    return {"advantages": per_token(grpo(tokens(x, x["mask"])))}


# Rollouts of simulators ----------------------------------------------------------------------------------------------


def rollout(x: Inputs, level: RewardLevel, *, truncation: bool = False, valid: Tensor | None = None) -> AdvantageInputs:
    """Episodes that end at ``ended``: by termination, or with ``truncation`` some of them by the limit."""
    valid = x["valid"] if valid is None else valid
    by_limit = x["by_limit"].unsqueeze(-1) if truncation else torch.zeros(ENVS, 1, dtype=torch.bool)
    values = x["step_values"][..., :1] if level == "chunk_level" else x["step_values"]
    bootstrap = values[1:, :, 0]
    if truncation:
        limit_chunk = (x["ended"] & by_limit).any(-1)
        bootstrap = torch.where(limit_chunk, x["final_values"], bootstrap)
    return AdvantageInputs(
        reward_level=level,
        rewards=x["rewards"],
        terminated=x["ended"] & ~by_limit,
        truncated=x["ended"] & by_limit,
        valid=valid,
        group_ids=x["env_group_ids"],
        scores=rollout_returns(x["rewards"], valid),
        values=values[:-1],
        bootstrap_values=bootstrap,
    )


LEVELS: tuple[RewardLevel, ...] = ("chunk_level", "action_level")


def in_steps(estimate: AdvantageEstimate) -> Tensor:
    """[T,N,1] at chunk level, [T,N,C] at action level."""
    return estimate.advantages.reshape(CHUNKS, ENVS, -1)


for _level in LEVELS:

    @COMPUTATIONS(f"gae, normalised: {_level}")
    def _rollout_gae(x: Inputs, level: RewardLevel = _level) -> Outputs:
        # At chunk level whole chunks: how rewards after the end count is a case of its own.
        valid = x["valid_chunks"] if level == "chunk_level" else x["valid"]
        estimate = gae(rollout(x, level, valid=valid), gamma=0.98, gae_lambda=0.95)
        assert estimate.returns is not None
        normalized = whiten(estimate.advantages, estimate.valid, eps=1e-5)
        return {"advantages": normalized.reshape(CHUNKS, ENVS, -1), "returns": estimate.returns}

    @COMPUTATIONS(f"gae, truncation: {_level}")
    def _rollout_truncated(x: Inputs, level: RewardLevel = _level) -> Outputs:
        valid = x["valid_chunks"] if level == "chunk_level" else x["valid"]
        estimate = gae(rollout(x, level, truncation=True, valid=valid), gamma=0.98, gae_lambda=0.95)
        return {"advantages": in_steps(estimate)}

    @COMPUTATIONS(f"gae, several episodes: {_level}")
    def _rollout_several(x: Inputs, level: RewardLevel = _level) -> Outputs:
        everything = torch.ones_like(x["valid"])
        inputs = rollout({**x, "ended": x["many_ends"]}, level, valid=everything)
        return {"advantages": in_steps(gae(inputs, gamma=0.98, gae_lambda=0.95))}

    @COMPUTATIONS(f"grpo: {_level}")
    def _rollout_grpo(x: Inputs, level: RewardLevel = _level) -> Outputs:
        return {"advantages": in_steps(grpo(rollout(x, level)))}

    @COMPUTATIONS(f"grpo, as rlinf, rewards after the end: {_level}")
    def _rollout_grpo_whole(x: Inputs, level: RewardLevel = _level) -> Outputs:
        return {"advantages": in_steps(grpo(rollout(x, level, valid=x["valid_chunks"])))}


@COMPUTATIONS("adaptive KL")
def _adaptive(x: Inputs) -> Outputs:
    controller = KLController(0.2, target_kl=0.1, horizon=1000)
    betas = []
    for kl in x["measured_kl"].tolist():
        controller.update(kl, 64)
        betas.append(controller.beta)
    return {"beta": torch.tensor(betas)}


for _kind in ("k1", "abs", "k2", "k3"):

    @COMPUTATIONS(f"kl: {_kind}")
    def _kl(x: Inputs, kind: str = _kind) -> Outputs:
        return {"kl": kl_estimate(x["logprobs"], x["reference_logprobs"], kind)}

    @COMPUTATIONS(f"kl, far: {_kind}")
    def _kl_far(x: Inputs, kind: str = _kind) -> Outputs:
        return {"kl": kl_estimate(x["logprobs"], x["far_logprobs"], kind)}


@COMPUTATIONS("kl, far, as peers, at most 10: k3")
def _kl_cut(x: Inputs) -> Outputs:
    return {"kl": kl_estimate(x["logprobs"], x["far_logprobs"], "k3").clamp(max=10.0)}
