"""RLinf's published functions (runs in the peers' environment)."""

from __future__ import annotations

from functools import partial
from typing import Any

import rlinf.algorithms  # noqa: F401  # pyright: ignore[reportMissingImports]
import torch
from rlinf.algorithms import losses  # pyright: ignore[reportMissingImports]
from rlinf.algorithms.registry import (  # pyright: ignore[reportMissingImports]
    calculate_adv_and_returns,
    policy_loss,
)
from rlinf.algorithms.utils import kl_penalty  # pyright: ignore[reportMissingImports]
from rlinf.utils.utils import get_loss_agg_func, masked_mean  # pyright: ignore[reportMissingImports]
from torch import Tensor

from benchmarks.peers.inputs import ACTION_DIM, ENVS, GROUP, LARGE_GROUP, Computations, Inputs, Outputs

COMPUTATIONS = Computations()

# Completions ---------------------------------------------------------------------------------------------------------


def reasoning(x: Inputs, mask: str, adv_type: str, *, group_size: int = GROUP, **options: Any) -> Outputs:
    given = {
        # Cloned: REINFORCE++'s baseline is subtracted in place.
        "rewards": x["scores"].clone(),
        "loss_mask": x[mask],
        "group_size": group_size,
        "adv_type": adv_type,
        "task_type": "reasoning",
    }
    advantages, _ = calculate_adv_and_returns(**given, **options)
    return {"advantages": advantages * x[mask]}


for _mask in ("mask", "mask_with_holes", "mask_late"):
    COMPUTATIONS[f"grpo: {_mask}"] = partial(reasoning, mask=_mask, adv_type="grpo")
    COMPUTATIONS[f"raw: {_mask}"] = partial(reasoning, mask=_mask, adv_type="raw")
    COMPUTATIONS[f"reinforce++: {_mask}"] = partial(reasoning, mask=_mask, adv_type="reinpp")
    COMPUTATIONS[f"reinforce++ baseline: {_mask}"] = partial(
        reasoning, mask=_mask, adv_type="reinpp", use_reinpp_baseline=True
    )


def equal_scores(x: Inputs, dtype: torch.dtype) -> Outputs:
    return reasoning({**x, "scores": x["equal_scores"].to(dtype)}, "mask", "grpo", group_size=LARGE_GROUP)


COMPUTATIONS["grpo: equal scores"] = partial(equal_scores, dtype=torch.float32)
COMPUTATIONS["grpo: equal scores, float64"] = partial(equal_scores, dtype=torch.float64)


@COMPUTATIONS("reinforce++, KL in the reward: mask")
def _reinforce_kl(x: Inputs) -> Outputs:
    # It also adds up what stands behind the end.
    reference = torch.where(x["mask"], x["reference_logprobs"], x["logprobs"])
    return reasoning(
        x, "mask", "reinpp", kl_beta=0.1, logprob=x["logprobs"], ref_logprob=reference, kl_penalty_type="k3"
    )


# Rollouts of simulators ----------------------------------------------------------------------------------------------


def embodied(
    x: Inputs,
    *,
    adv_type: str,
    level: str,
    rewards: Tensor | None = None,
    ended: str = "ended",
    normalize: bool = False,
) -> dict[str, Tensor]:
    valid = torch.ones_like(x["valid"]) if ended == "many_ends" else x["valid"]
    values = x["step_values"][..., :1] if level == "chunk_level" else x["step_values"]
    dones = torch.cat((torch.zeros_like(x[ended][:1]), x[ended]))
    found = calculate_adv_and_returns(
        task_type="embodied",
        adv_type=adv_type,
        reward_type=level,
        rewards=(x["rewards"] if rewards is None else rewards).clone(),
        dones=dones,
        values=values,
        loss_mask=valid,
        gamma=0.98,
        gae_lambda=0.95,
        group_size=GROUP,
        normalize_advantages=normalize,
    )
    mask = valid.any(-1, keepdim=True) if level == "chunk_level" else valid
    return {name: tensor * mask for name, tensor in found.items()}


def advantages_only(x: Inputs, **options: Any) -> Outputs:
    return {"advantages": embodied(x, **options)["advantages"]}


def with_bootstrap(x: Inputs, level: str) -> Outputs:
    """As its env worker does where an episode is truncated: the discounted final value is added to the reward."""
    at_limit = x["ended"] & x["by_limit"].unsqueeze(-1)
    rewards = x["rewards"] + 0.98 * at_limit * x["final_values"].unsqueeze(-1)
    return advantages_only(x, adv_type="gae", level=level, rewards=rewards)


def nothing_after_the_end(x: Inputs, level: str) -> Outputs:
    return advantages_only(x, adv_type="grpo", level=level, rewards=x["rewards"] * x["valid"])


for _level in ("chunk_level", "action_level"):
    COMPUTATIONS[f"gae, normalised: {_level}"] = partial(embodied, adv_type="gae", level=_level, normalize=True)
    COMPUTATIONS[f"gae, truncation: {_level}"] = partial(advantages_only, adv_type="gae", level=_level)
    COMPUTATIONS[f"gae, truncation in the rewards: {_level}"] = partial(with_bootstrap, level=_level)
    COMPUTATIONS[f"gae, several episodes: {_level}"] = partial(
        advantages_only, adv_type="gae", level=_level, ended="many_ends"
    )
    COMPUTATIONS[f"grpo: {_level}"] = partial(advantages_only, adv_type="grpo", level=_level)
    COMPUTATIONS[f"grpo, no reward after the end: {_level}"] = partial(nothing_after_the_end, level=_level)

# Losses --------------------------------------------------------------------------------------------------------------

CLIP: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
DUAL: dict[str, Any] = {**CLIP, "clip_ratio_c": 3.0}


def gradient_of(loss: Tensor, leaf: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {"loss": loss.detach(), "gradient": leaf.grad}  # type: ignore[dict-item]


def aggregation(mode: str) -> Any:
    chosen = get_loss_agg_func(mode)
    # The loss passes a third argument that only its own aggregation for rollouts reads.
    return chosen if mode == "token-mean" else lambda values, mask, *_: chosen(values, mask)


def policy(
    x: Inputs, *, mask: str = "mask", mode: str = "token-mean", logprobs: str = "logprobs", **options: Any
) -> dict[str, Tensor]:
    leaf = x[logprobs].clone().requires_grad_()
    loss, _ = losses.compute_ppo_actor_loss(
        logprobs=leaf,
        old_logprobs=x["old_logprobs"],
        advantages=x["advantages"],
        loss_mask=x[mask],
        loss_agg_func=aggregation(mode),
        **{**DUAL, **options},
    )
    return gradient_of(loss, leaf)


for _mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
    for _mask in ("mask", "mask_without_one"):
        COMPUTATIONS[f"ppo: {_mode}, {_mask}"] = partial(policy, mask=_mask, mode=_mode, clip_ratio_c=None)
        COMPUTATIONS[f"ppo, dual clip: {_mode}, {_mask}"] = partial(policy, mask=_mask, mode=_mode)
COMPUTATIONS["ppo, far"] = partial(policy, logprobs="far_logprobs", clip_ratio_c=None)
COMPUTATIONS["ppo, far, cut"] = partial(
    policy, logprobs="far_logprobs", clip_ratio_c=None, clip_log_ratio_min=-20.0, clip_log_ratio_max=20.0
)


def hundred(x: Inputs, **options: Any) -> Outputs:
    old = torch.where(x["one_unit"], x["logprobs"] - 100.0, x["old_logprobs"])
    return policy({**x, "old_logprobs": old}, **options)


COMPUTATIONS["ppo, log ratio 100"] = hundred
COMPUTATIONS["ppo, log ratio 100, cut"] = partial(hundred, clip_log_ratio_max=20.0)


@COMPUTATIONS("ppo, NaN at a masked unit")
def _nan(x: Inputs) -> Outputs:
    logprobs = x["logprobs"].masked_fill(x["one_unit"], float("nan"))
    return policy({**x, "logprobs": logprobs, "mask": x["mask"] & ~x["one_unit"]}, clip_ratio_c=None)


@COMPUTATIONS("ppo, one unit masked")
def _masked(x: Inputs) -> Outputs:
    return policy({**x, "mask": x["mask"] & ~x["one_unit"]}, clip_ratio_c=None)


def decoupled(x: Inputs, *, proximal: bool = True, **options: Any) -> Outputs:
    leaf = x["logprobs"].clone().requires_grad_()
    loss, _ = losses.compute_decoupled_ppo_actor_loss(
        logprobs=leaf,
        old_logprobs=x["old_logprobs"],
        proximal_logprobs=x["proximal_logprobs"] if proximal else None,
        advantages=x["advantages"],
        loss_mask=x["mask"],
        **DUAL,
        **options,
    )
    return gradient_of(loss, leaf)


COMPUTATIONS["decoupled ppo"] = decoupled
COMPUTATIONS["decoupled ppo, cap"] = partial(decoupled, behave_weight_threshold=1.2)


@COMPUTATIONS("decoupled ppo, loglinear")
def _loglinear(x: Inputs) -> Outputs:
    versions = x["versions"].unsqueeze(-1).expand_as(x["logprobs"])
    return decoupled(x, proximal=False, versions=versions, current_version=5.0)


def critic(x: Inputs, leaf: Tensor, huber_delta: float) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.compute_ppo_critic_loss(
        values=leaf,
        returns=x["returns"],
        prev_values=x["old_values"],
        value_clip=0.5,
        huber_delta=huber_delta,
        loss_mask=x["mask"],
    )


@COMPUTATIONS("value loss, huber")
def _value(x: Inputs) -> Outputs:
    leaf = x["values"].clone().requires_grad_()
    return gradient_of(critic(x, leaf, 0.8)[0], leaf)


def number(value: Any) -> Outputs:
    return {"number": torch.as_tensor(value).detach().float()}


COMPUTATIONS["value clip fraction"] = lambda x: number(critic(x, x["values"], 1e9)[1]["critic/value_clip_ratio"])
COMPUTATIONS["explained variance"] = lambda x: number(critic(x, x["values"], 1e9)[1]["critic/explained_variance"])


def metric(x: Inputs, name: str) -> Outputs:
    _, found = losses.compute_ppo_actor_loss(
        logprobs=x["logprobs"],
        old_logprobs=x["old_logprobs"],
        advantages=x["advantages"],
        loss_mask=x["mask"],
        loss_agg_func=masked_mean,
        **DUAL,
    )
    return number(found[name])


COMPUTATIONS["clip fraction"] = partial(metric, name="actor/clip_fraction")
COMPUTATIONS["approximate KL"] = partial(metric, name="actor/approx_kl")


def action_chunk(x: Inputs, *, reward_type: str, logprob_type: str, whole: bool) -> Outputs:
    leaf = x["action_logprobs"].clone().requires_grad_()
    valid = torch.ones_like(x["step_valid"]) if whole else x["step_valid"]
    valid = valid & (torch.arange(ENVS) > 0).unsqueeze(-1)
    advantages = x["step_advantages"]
    if reward_type == "chunk_level":
        valid, advantages = valid.any(-1, keepdim=True), advantages[:, :1]
    loss, _ = policy_loss(
        task_type="embodied",
        loss_type="actor",
        reward_type=reward_type,
        logprob_type=logprob_type,
        single_action_dim=ACTION_DIM,
        logprobs=leaf,
        old_logprobs=x["action_old_logprobs"],
        advantages=advantages,
        loss_mask=valid,
        **CLIP,
    )
    return gradient_of(loss, leaf)


for _reward, _logprob in (
    ("chunk_level", "chunk_level"),
    ("action_level", "action_level"),
    ("chunk_level", "action_level"),
    ("action_level", "token_level"),
    ("chunk_level", "token_level"),
):
    for _whole in (True, False):
        COMPUTATIONS[f"levels: {_reward}, {_logprob}, {'whole' if _whole else 'cut'} chunks"] = partial(
            action_chunk, reward_type=_reward, logprob_type=_logprob, whole=_whole
        )

for _kind in ("k1", "abs", "k2", "k3"):
    COMPUTATIONS[f"kl: {_kind}"] = lambda x, kind=_kind: {
        "kl": kl_penalty(x["logprobs"], x["reference_logprobs"], kind)
    }
    COMPUTATIONS[f"kl, far: {_kind}"] = lambda x, kind=_kind: {"kl": kl_penalty(x["logprobs"], x["far_logprobs"], kind)}
