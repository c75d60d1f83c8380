"""verl's published functions (runs in the peers' environment)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

from benchmarks.peers.inputs import Computations, Inputs, Outputs

COMPUTATIONS = Computations()
MASKS = ("mask", "mask_with_holes", "mask_late")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def outcome(x: Inputs, mask: Tensor) -> dict[str, Any]:
    """The score is paid at the first token: verl sums a completion's rewards."""
    rewards = torch.zeros_like(x["token_rewards"], dtype=x["scores"].dtype)
    rewards[:, 0] = x["scores"]
    return {"token_level_rewards": rewards, "response_mask": mask.to(rewards.dtype), "index": x["group_ids"].numpy()}


for _mask in MASKS:

    @COMPUTATIONS(f"gae: {_mask}")
    def _gae(x: Inputs, name: str = _mask) -> Outputs:
        mask = x[name].float()
        advantages, returns = core_algos.compute_gae_advantage_return(
            token_level_rewards=x["token_rewards"],
            values=x["values"],
            response_mask=mask,
            gamma=torch.tensor(0.99),
            lam=torch.tensor(0.9),
        )
        return {"whitened advantages": advantages * mask, "returns": returns * mask}

    @COMPUTATIONS(f"grpo: {_mask}")
    def _grpo(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": core_algos.compute_grpo_outcome_advantage(**outcome(x, x[name]))[0]}

    @COMPUTATIONS(f"grpo, no std: {_mask}")
    def _grpo_centred(x: Inputs, name: str = _mask) -> Outputs:
        given = outcome(x, x[name])
        return {"advantages": core_algos.compute_grpo_outcome_advantage(**given, norm_adv_by_std_in_grpo=False)[0]}

    @COMPUTATIONS(f"rloo: {_mask}")
    def _rloo(x: Inputs, name: str = _mask) -> Outputs:
        return {"advantages": core_algos.compute_rloo_outcome_advantage(**outcome(x, x[name]))[0]}

    @COMPUTATIONS(f"reinforce++: {_mask}")
    def _reinforce(x: Inputs, name: str = _mask) -> Outputs:
        # Discounted, so the score has to stand where it is paid: at the last valid token.
        mask = x[name]
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        advantages, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            token_level_rewards=last * x["scores"].unsqueeze(-1),
            response_mask=mask.float(),
            config=AlgoConfig(gamma=0.9),
        )
        return {"advantages": advantages}

    @COMPUTATIONS(f"reinforce++ baseline: {_mask}")
    def _baseline(x: Inputs, name: str = _mask) -> Outputs:
        found = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(**outcome(x, x[name]))
        return {"advantages": found[0]}


def equal_scores(x: Inputs, dtype: torch.dtype) -> Outputs:
    given = outcome({**x, "scores": x["equal_scores"].to(dtype), "group_ids": x["large_group_ids"]}, x["mask"])
    return {"advantages": core_algos.compute_grpo_outcome_advantage(**given)[0]}


COMPUTATIONS["grpo: equal scores"] = partial(equal_scores, dtype=torch.float32)
COMPUTATIONS["grpo: equal scores, float64"] = partial(equal_scores, dtype=torch.float64)


def actor(clip_ratio_c: float) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=clip_ratio_c,
    )


NO_DUAL_CLIP = 1e9
"""verl always clips; this never does."""


def policy(
    x: Inputs,
    *,
    function: Any = core_algos.compute_policy_loss_vanilla,
    mask: str = "mask",
    mode: str = "token-mean",
    advantages: str = "advantages",
    logprobs: str = "logprobs",
    clip_ratio_c: float = NO_DUAL_CLIP,
) -> dict[str, Tensor]:
    leaf = x[logprobs].clone().requires_grad_()
    loss, _ = function(
        old_log_prob=x["old_logprobs"],
        log_prob=leaf,
        advantages=x[advantages],
        response_mask=x[mask].float(),
        loss_agg_mode=mode,
        config=actor(clip_ratio_c),
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": leaf.grad}  # type: ignore[dict-item]


for _mode in MODES:
    for _mask in ("mask", "mask_without_one"):
        COMPUTATIONS[f"ppo: {_mode}, {_mask}"] = partial(policy, mask=_mask, mode=_mode)
        COMPUTATIONS[f"ppo, dual clip: {_mode}, {_mask}"] = partial(policy, mask=_mask, mode=_mode, clip_ratio_c=3.0)
for _advantages in ("advantages", "sequence_advantages"):
    COMPUTATIONS[f"gspo: {_advantages}"] = partial(
        policy, function=core_algos.compute_policy_loss_gspo, mode="seq-mean-token-mean", advantages=_advantages
    )
COMPUTATIONS["ppo, far"] = partial(policy, logprobs="far_logprobs")


@COMPUTATIONS("ppo, NaN at a masked unit")
def _nan(x: Inputs) -> Outputs:
    logprobs = x["logprobs"].masked_fill(x["one_unit"], float("nan"))
    return policy({**x, "logprobs": logprobs, "mask": x["mask"] & ~x["one_unit"]})


@COMPUTATIONS("ppo, one unit masked")
def _masked(x: Inputs) -> Outputs:
    return policy({**x, "mask": x["mask"] & ~x["one_unit"]})


@COMPUTATIONS("ppo, log ratio 100")
def _hundred(x: Inputs) -> Outputs:
    old = torch.where(x["one_unit"], x["logprobs"] - 100.0, x["old_logprobs"])
    return policy({**x, "old_logprobs": old}, clip_ratio_c=3.0)


@COMPUTATIONS("value loss")
def _value(x: Inputs) -> Outputs:
    leaf = x["values"].clone().requires_grad_()
    loss, _ = core_algos.compute_value_loss(
        vpreds=leaf,
        returns=x["returns"],
        values=x["old_values"],
        response_mask=x["mask"].float(),
        cliprange_value=0.5,
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": leaf.grad}  # type: ignore[dict-item]


def number(value: Any) -> Outputs:
    return {"number": torch.as_tensor(value).detach().float()}


@COMPUTATIONS("value clip fraction")
def _value_clip(x: Inputs) -> Outputs:
    return number(
        core_algos.compute_value_loss(
            vpreds=x["values"],
            returns=x["returns"],
            values=x["old_values"],
            response_mask=x["mask"].float(),
            cliprange_value=0.5,
        )[1]
    )


def metric(x: Inputs, name: str) -> Outputs:
    _, found = core_algos.compute_policy_loss_vanilla(
        x["old_logprobs"], x["logprobs"], x["advantages"], x["mask"].float(), config=actor(3.0)
    )
    return number(found[name])


COMPUTATIONS["clip fraction"] = partial(metric, name="actor/pg_clipfrac")
COMPUTATIONS["dual clip fraction"] = partial(metric, name="actor/pg_clipfrac_lower")
COMPUTATIONS["approximate KL"] = partial(metric, name="actor/ppo_kl")


@COMPUTATIONS("adaptive KL")
def _adaptive(x: Inputs) -> Outputs:
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=1000)
    betas = []
    for kl in x["measured_kl"].tolist():
        controller.update(kl, 64)
        betas.append(float(controller.value))
    return {"beta": torch.tensor(np.array(betas), dtype=torch.float32)}


for _kind in ("k1", "abs", "k2", "k3"):

    @COMPUTATIONS(f"kl: {_kind}")
    def _kl(x: Inputs, kind: str = _kind) -> Outputs:
        return {"kl": core_algos.kl_penalty(x["logprobs"], x["reference_logprobs"], kind)}

    @COMPUTATIONS(f"kl, far: {_kind}")
    def _kl_far(x: Inputs, kind: str = _kind) -> Outputs:
        return {"kl": core_algos.kl_penalty(x["logprobs"], x["far_logprobs"], kind)}
