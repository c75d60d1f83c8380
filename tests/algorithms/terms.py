"""Every term of the loss as a function of one batch, for the properties that all of them share."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from embodied_rl.algorithms.losses import (
    ESTIMATORS,
    aipo_policy_loss,
    decoupled_ppo_policy_loss,
    entropy_loss,
    full_kl,
    kl_estimate,
    nll_loss,
    ppo_policy_loss,
    value_loss,
)
from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.algorithms.units import aggregate, reduce_to_level, units_of, weigh
from embodied_rl.schema.types import LossAggregation

Batch = dict[str, Tensor]
Units = Callable[[Batch], tuple[Tensor, Diagnostics]]

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.7}
SCALE_FACTOR = 7.0


def _of(function: Callable[..., tuple[Tensor, Diagnostics]], *names: str, **options: object) -> Units:
    return lambda batch: function(**{name: batch[name] for name in (*names, "mask")}, **options)


def _kl(kind: str, batch: Batch) -> tuple[Tensor, Diagnostics]:
    return _divergence(kl_estimate(batch["logprobs"], batch["reference_logprobs"], kind, batch["mask"]), batch)


def _categorical_kl(batch: Batch) -> tuple[Tensor, Diagnostics]:
    return _divergence(full_kl(Categorical, {"logits": batch["logits"]}, {"logits": batch["reference_logits"]}), batch)


def _normal_kl(batch: Batch) -> tuple[Tensor, Diagnostics]:
    policy = {"loc": batch["values"], "scale": batch["entropy"] + 0.5}
    return _divergence(full_kl(Normal, policy, {"loc": batch["returns"], "scale": batch["scale"]}), batch)


def _divergence(kl: Tensor, batch: Batch) -> tuple[Tensor, Diagnostics]:
    """Masked as the training step does it."""
    units, diagnostics = reduce_to_level(kl.unsqueeze(-1), batch["mask"], "action_level"), Diagnostics()
    diagnostics.add_mean("reference_kl", units, batch["mask"])
    return units, diagnostics


_POLICY = ("logprobs", "old_logprobs", "advantages")
_DECOUPLED = partial(_of, decoupled_ppo_policy_loss, *_POLICY, "proximal_logprobs", **CLIPS)
_VALUE = partial(_of, value_loss, "values", "old_values", "returns")

TERMS: Mapping[str, tuple[Units, str]] = {
    "ppo": (_of(ppo_policy_loss, *_POLICY, **CLIPS), "logprobs"),
    "gspo": (_of(ppo_policy_loss, *_POLICY, importance_sampling_level="sequence", **CLIPS), "logprobs"),
    "decoupled_ppo": (_DECOUPLED(), "logprobs"),
    "decoupled_gspo": (_DECOUPLED(importance_sampling_level="sequence"), "logprobs"),
    "aipo": (_of(aipo_policy_loss, *_POLICY, aipo_rho=1.7), "logprobs"),
    "value": (_VALUE(), "values"),
    "value_clip_huber": (_VALUE(value_clip=0.3, huber_delta=0.7), "values"),
    "entropy": (_of(entropy_loss, "entropy"), "entropy"),
    "nll": (_of(nll_loss, "logprobs"), "logprobs"),
    **{kind: (partial(_kl, kind), "logprobs") for kind in ESTIMATORS},
    "full_categorical": (_categorical_kl, "logits"),
    "full_normal_loc": (_normal_kl, "values"),
    "full_normal_scale": (_normal_kl, "entropy"),
}
"""Name -> the term, and the tensor through which it has a gradient."""


def random_batch(seed: int, size: int = 8, length: int = 3) -> Batch:
    """[size,length] float64 units of samples that belong to a few sequences."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(size, length, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    old_logprobs, old_values = draw(), draw()
    return {
        "logprobs": old_logprobs + 0.4 * draw(),
        "old_logprobs": old_logprobs,
        "proximal_logprobs": old_logprobs + 0.3 * draw(),
        "reference_logprobs": old_logprobs + 0.5 * draw(),
        "advantages": draw(),
        "values": old_values + 0.4 * draw(),
        "old_values": old_values,
        "returns": draw(),
        "entropy": draw().abs(),
        "scale": draw().abs() + 0.5,
        "logits": draw(4),
        "reference_logits": draw(4),
        "mask": torch.rand(size, length, generator=generator) < 0.7,
        "sequence_ids": torch.randint(0, max(size // 2, 1), (size,), generator=generator),
    }


def in_one_go(batch: Batch) -> list[list[Tensor]]:
    return [[torch.arange(len(batch["mask"]))]]


def over_ranks(batch: Batch, ranks: int, parts: int, shuffle: random.Random) -> list[list[Tensor]]:
    """For each rank its micro-batches as places in the batch, in any order; no sequence is on two ranks."""
    rank_of = [shuffle.randrange(ranks) for _ in range(len(batch["mask"]))]
    split: list[list[Tensor]] = []
    for rank in range(ranks):
        own = [place for place, sequence in enumerate(batch["sequence_ids"].tolist()) if rank_of[sequence] == rank]
        shuffle.shuffle(own)
        if own:
            split.append([torch.tensor(own[part::parts]) for part in range(parts) if own[part::parts]])
    return split


def run(
    name: str, batch: Batch, mode: LossAggregation, split: list[list[Tensor]]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient and diagnostics, added up over the micro-batches of all ranks as the training step does it."""
    term, leaf = TERMS[name]
    batch = {**batch, leaf: batch[leaf].clone().requires_grad_()}
    mask, ids = batch["mask"], batch["sequence_ids"]
    weights = [
        weigh(units_of(mask[torch.cat(own)]), ids[torch.cat(own)], mode=mode, scale_factor=SCALE_FACTOR)
        for own in split
    ]
    denominator = sum(of_rank.count for of_rank in weights)
    loss, diagnostics = torch.zeros((), dtype=torch.float64), Diagnostics()
    for own, of_rank in zip(split, weights, strict=True):
        each = of_rank.per_sample
        of_parts = each.split([len(part) for part in own]) if isinstance(each, Tensor) else [each] * len(own)
        for part, weight in zip(own, of_parts, strict=True):
            units, found = term({key: tensor[part] for key, tensor in batch.items()})
            share = aggregate(units, mask[part], weights=weight, denominator=denominator)
            share.backward()
            loss += share.detach()
            diagnostics.merge(found)
    gradient = batch[leaf].grad
    assert gradient is not None
    return loss, gradient, diagnostics.result()
