"""TRL's published loss (runs in the peers' environment).

``GRPOTrainer._compute_loss`` is a method that reads settings and log-probabilities from the trainer; it is called here
with an object that has just these. TRL computes advantages inside a method that also generates: nothing to call.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.peers.inputs import LENGTH, SEQUENCES, Computations, Inputs, Outputs

COMPUTATIONS = Computations()
LOSS_TYPES = {"token-mean": "bnpo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}


def policy(
    x: Inputs,
    *,
    loss_type: str,
    mask: str = "mask",
    delta: float | None = None,
    beta: float = 0.0,
    level: str = "token",
    epsilon_high: float = 0.28,
    advantages: str = "advantages",
    logprobs: str = "logprobs",
) -> dict[str, Tensor]:
    leaf = x[logprobs].clone().requires_grad_()
    one_process = SimpleNamespace(num_processes=1, reduce=lambda t, reduction: t, gather=lambda t: t)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
        get_off_policy_mask=None,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=epsilon_high,
        max_completion_length=LENGTH,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=one_process,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
    )
    given = x[advantages]
    completion_mask = x[mask].float()
    empty = torch.zeros(SEQUENCES, 0)
    loss = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": torch.zeros(SEQUENCES, LENGTH),
            "completion_mask": completion_mask,
            "advantages": given[:, 0] if advantages == "sequence_advantages" else given,
            "old_per_token_logps": x["old_logprobs"],
            "ref_per_token_logps": x["reference_logprobs"],
            "num_items_in_batch": completion_mask.sum(),
        },
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": leaf.grad}  # type: ignore[dict-item]


for _mode, _loss_type in LOSS_TYPES.items():
    for _mask in ("mask", "mask_without_one"):
        COMPUTATIONS[f"ppo: {_mode}, {_mask}"] = partial(policy, loss_type=_loss_type, mask=_mask)
        COMPUTATIONS[f"ppo, dual clip: {_mode}, {_mask}"] = partial(policy, loss_type=_loss_type, mask=_mask, delta=3.0)
    COMPUTATIONS[f"ppo with KL: {_mode}"] = partial(
        policy, loss_type=_loss_type, beta=0.1, advantages="sequence_advantages"
    )
COMPUTATIONS["gspo: sequence_advantages"] = partial(
    policy, loss_type="grpo", level="sequence", advantages="sequence_advantages"
)


def one_log_ratio(x: Inputs, log_ratio: float) -> Outputs:
    old = torch.where(x["one_unit"], x["logprobs"] - log_ratio, x["old_logprobs"])
    return policy({**x, "old_logprobs": old}, loss_type="bnpo", delta=3.0)


COMPUTATIONS["ppo, log ratio 100"] = partial(one_log_ratio, log_ratio=100.0)
COMPUTATIONS["ppo, log ratio 20"] = partial(one_log_ratio, log_ratio=20.0)


@COMPUTATIONS("ppo, NaN at a masked unit")
def _nan(x: Inputs) -> Outputs:
    logprobs = x["logprobs"].masked_fill(x["one_unit"], float("nan"))
    return policy({**x, "logprobs": logprobs, "mask": x["mask"] & ~x["one_unit"]}, loss_type="bnpo")


@COMPUTATIONS("ppo, one unit masked")
def _masked(x: Inputs) -> Outputs:
    return policy({**x, "mask": x["mask"] & ~x["one_unit"]}, loss_type="bnpo")


def cispo(x: Inputs) -> Any:
    return policy(x, loss_type="cispo", epsilon_high=1.5)["gradient"]


COMPUTATIONS["cispo: gradient"] = lambda x: {"gradient": cispo(x)}
COMPUTATIONS["cispo: gradient below rho"] = lambda x: {
    "gradient": cispo(x) * ((x["logprobs"] - x["old_logprobs"]).exp() <= 1.5)
}
