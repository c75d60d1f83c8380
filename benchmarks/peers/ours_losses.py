"""The losses' side of ``ours.py``: one number and its gradient, aggregated over one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.inputs import ACTION_DIM, LENGTH, SEQUENCES, STEPS, Computations, Inputs, Outputs
from embodied_rl.algorithms.filters import behaviour_filter
from embodied_rl.algorithms.losses import (
    aipo_policy_loss,
    decoupled_ppo_policy_loss,
    kl_estimate,
    loglinear_proximal_logprobs,
    ppo_policy_loss,
    value_loss,
)
from embodied_rl.algorithms.statistics import Diagnostics, explained_variance
from embodied_rl.algorithms.units import aggregate, broadcast_to_level, mask_at_level, reduce_to_level, units_of, weigh
from embodied_rl.schema.types import LossAggregation

COMPUTATIONS = Computations()
MODES: tuple[LossAggregation, ...] = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
CLIP: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
DUAL: dict[str, Any] = {**CLIP, "clip_ratio_c": 3.0}

UnitLoss = Callable[..., tuple[Tensor, Diagnostics]]


def aggregated(units: Tensor, mask: Tensor, mode: LossAggregation) -> Tensor:
    weights = weigh(units_of(mask), torch.arange(len(mask)), mode=mode, scale_factor=LENGTH)
    return aggregate(units, mask, weights=weights.per_sample, denominator=weights.count)


def loss_and_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> dict[str, Tensor]:
    leaf = at.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return {"loss": value.detach(), "gradient": leaf.grad}


def policy(
    x: Inputs,
    *,
    function: UnitLoss = ppo_policy_loss,
    mask: str = "mask",
    mode: LossAggregation = "token-mean",
    advantages: str = "advantages",
    logprobs: str = "logprobs",
    beta: float = 0.0,
    factor: float = 1.0,
    **options: Any,
) -> dict[str, Tensor]:
    def loss(new: Tensor) -> Tensor:
        units, _ = function(
            logprobs=new, old_logprobs=x["old_logprobs"], advantages=x[advantages], mask=x[mask], **options
        )
        if beta:
            units = units + beta * kl_estimate(new, x["reference_logprobs"], "k3")
        return factor * aggregated(units, x[mask], mode)

    return loss_and_gradient(loss, x[logprobs])


for _mode in MODES:
    for _mask in ("mask", "mask_without_one"):
        _about = f"{_mode}, {_mask}"
        COMPUTATIONS[f"ppo: {_about}"] = partial(policy, mask=_mask, mode=_mode, **CLIP)
        COMPUTATIONS[f"ppo, dual clip: {_about}"] = partial(policy, mask=_mask, mode=_mode, **DUAL)
    _all_counted = partial(policy, mask="mask_without_one", mode=_mode, factor=(SEQUENCES - 1) / SEQUENCES)
    COMPUTATIONS[f"ppo, as peers, all counted: {_mode}"] = partial(_all_counted, **CLIP)
    COMPUTATIONS[f"ppo, dual clip, as peers, all counted: {_mode}"] = partial(_all_counted, **DUAL)
    COMPUTATIONS[f"ppo with KL: {_mode}"] = partial(
        policy, mode=_mode, advantages="sequence_advantages", beta=0.1, **CLIP
    )
for _advantages in ("advantages", "sequence_advantages"):
    COMPUTATIONS[f"gspo: {_advantages}"] = partial(
        policy, mode="seq-mean-token-mean", advantages=_advantages, importance_sampling_level="sequence", **CLIP
    )
COMPUTATIONS["ppo, dual clip, sequence advantages"] = partial(policy, advantages="sequence_advantages", **DUAL)
COMPUTATIONS["ppo, far"] = partial(policy, logprobs="far_logprobs", **CLIP)


@COMPUTATIONS("ppo, NaN at a masked unit")
def _nan(x: Inputs) -> Outputs:
    logprobs = x["logprobs"].masked_fill(x["one_unit"], float("nan"))
    return policy({**x, "logprobs": logprobs, "mask": x["mask"] & ~x["one_unit"]}, **CLIP)


@COMPUTATIONS("ppo, one unit masked")
def _masked(x: Inputs) -> Outputs:
    return policy({**x, "mask": x["mask"] & ~x["one_unit"]}, **CLIP)


@COMPUTATIONS("ppo, log ratio 100")
def _hundred(x: Inputs) -> Outputs:
    old = torch.where(x["one_unit"], x["logprobs"] - 100.0, x["old_logprobs"])
    return policy({**x, "old_logprobs": old}, **DUAL)


@COMPUTATIONS("aipo: gradient")
def _aipo(x: Inputs) -> Outputs:
    return {"gradient": policy(x, function=aipo_policy_loss, aipo_rho=1.5)["gradient"]}


@COMPUTATIONS("aipo: gradient below rho")
def _aipo_below(x: Inputs) -> Outputs:
    below = (x["logprobs"] - x["old_logprobs"]).exp() <= 1.5
    return {"gradient": policy(x, function=aipo_policy_loss, aipo_rho=1.5)["gradient"] * below}


def decoupled(x: Inputs, *, cap: float | None = None, loglinear: bool = False) -> dict[str, Tensor]:
    mask = x["mask"] if cap is None else behaviour_filter(x["old_logprobs"], x["proximal_logprobs"], x["mask"], cap=cap)

    def loss(new: Tensor) -> Tensor:
        proximal = x["proximal_logprobs"]
        if loglinear:
            proximal = loglinear_proximal_logprobs(new, x["old_logprobs"], x["versions"], 5)
        units, _ = decoupled_ppo_policy_loss(
            logprobs=new,
            old_logprobs=x["old_logprobs"],
            proximal_logprobs=proximal,
            advantages=x["advantages"],
            mask=mask,
            **DUAL,
        )
        return aggregated(units, mask, "token-mean")

    return loss_and_gradient(loss, x["logprobs"])


COMPUTATIONS["decoupled ppo"] = decoupled
COMPUTATIONS["decoupled ppo, cap"] = partial(decoupled, cap=1.2)
COMPUTATIONS["decoupled ppo, loglinear"] = partial(decoupled, loglinear=True)


def critic(x: Inputs, *, huber_delta: float | None) -> dict[str, Tensor]:
    def loss(values: Tensor) -> Tensor:
        units, _ = value_loss(
            values=values,
            old_values=x["old_values"],
            returns=x["returns"],
            mask=x["mask"],
            value_clip=0.5,
            huber_delta=huber_delta,
        )
        return aggregated(units, x["mask"], "token-mean")

    return loss_and_gradient(loss, x["values"])


COMPUTATIONS["value loss"] = partial(critic, huber_delta=None)
COMPUTATIONS["value loss, huber"] = partial(critic, huber_delta=0.8)


def number(value: float) -> Outputs:
    return {"number": torch.tensor(value)}


def policy_diagnostics(x: Inputs) -> dict[str, float]:
    return ppo_policy_loss(
        logprobs=x["logprobs"], old_logprobs=x["old_logprobs"], advantages=x["advantages"], mask=x["mask"], **DUAL
    )[1].result()


@COMPUTATIONS("clip fraction")
def _clip(x: Inputs) -> Outputs:
    found = policy_diagnostics(x)
    return number(found["clip_fraction_low"] + found["clip_fraction_high"])


@COMPUTATIONS("dual clip fraction")
def _dual(x: Inputs) -> Outputs:
    return number(policy_diagnostics(x)["clip_fraction_dual"])


@COMPUTATIONS("approximate KL")
def _approx_kl(x: Inputs) -> Outputs:
    return number(policy_diagnostics(x)["approx_kl"])


@COMPUTATIONS("approximate KL, as peers, k1")
def _approx_k1(x: Inputs) -> Outputs:
    return number(kl_estimate(x["old_logprobs"], x["logprobs"], "k1")[x["mask"]].mean().item())


@COMPUTATIONS("value clip fraction")
def _value_clip(x: Inputs) -> Outputs:
    _, found = value_loss(
        values=x["values"], old_values=x["old_values"], returns=x["returns"], mask=x["mask"], value_clip=0.5
    )
    return number(found.result()["value_clip_fraction"])


@COMPUTATIONS("value clip fraction, as rlinf")
def _value_clip_rlinf(x: Inputs) -> Outputs:
    clipped = x["old_values"] + (x["values"] - x["old_values"]).clamp(-0.5, 0.5)
    return number(((clipped - x["old_values"]).abs() > 0.5).float().mean().item())


@COMPUTATIONS("explained variance")
def _variance(x: Inputs) -> Outputs:
    return number(explained_variance(x["values"], x["returns"], x["mask"]))


def action_chunk(x: Inputs, reward_type: Any, logprob_type: Any, *, whole: bool, factor: float = 1.0) -> Outputs:
    """PPO on action chunks; ``whole``: all steps of the chunks are valid."""
    valid = torch.ones_like(x["step_valid"]) if whole else x["step_valid"]
    # One sample without a valid step, so that there is something to mask in any case.
    valid = valid & (torch.arange(len(valid)) > 0).unsqueeze(-1)
    mask = mask_at_level(valid, logprob_type, ACTION_DIM)
    own = x["step_advantages"] if reward_type == "action_level" else x["step_advantages"][:, 0]
    advantages = broadcast_to_level(own, reward_type, logprob_type, num_action_chunks=STEPS, action_dim=ACTION_DIM)

    def loss(new: Tensor) -> Tensor:
        units, _ = ppo_policy_loss(
            logprobs=reduce_to_level(new, valid, logprob_type),
            old_logprobs=reduce_to_level(x["action_old_logprobs"], valid, logprob_type),
            advantages=advantages,
            mask=mask,
            **CLIP,
        )
        return factor * aggregated(units, mask, "token-mean")

    return loss_and_gradient(loss, x["action_logprobs"])


LEVEL_FACTORS = {
    ("chunk_level", "chunk_level"): 1,
    ("action_level", "action_level"): 1,
    ("chunk_level", "action_level"): STEPS,
    ("action_level", "token_level"): ACTION_DIM,
    ("chunk_level", "token_level"): STEPS * ACTION_DIM,
}
"""(Reward level, log-probability level) -> how many units one element of RLinf's mask stands for."""

for (_reward, _logprob), _factor in LEVEL_FACTORS.items():
    for _whole in (True, False):
        _name = f"{_reward}, {_logprob}, {'whole' if _whole else 'cut'} chunks"
        COMPUTATIONS[f"levels: {_name}"] = partial(
            action_chunk, reward_type=_reward, logprob_type=_logprob, whole=_whole
        )
        COMPUTATIONS[f"levels, as rlinf: {_name}"] = partial(
            action_chunk, reward_type=_reward, logprob_type=_logprob, whole=_whole, factor=_factor
        )
