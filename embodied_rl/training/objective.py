"""The training objective: which units of a batch count in which term, and what a micro-batch adds to the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied_rl.algorithms.catalog import POLICY_LOSSES
from embodied_rl.algorithms.filters import behaviour_filter, m2po_filter
from embodied_rl.algorithms.losses import (
    entropy_loss,
    full_kl,
    kl_estimate,
    loglinear_proximal_logprobs,
    nll_loss,
    value_loss,
)
from embodied_rl.algorithms.statistics import Diagnostics, masked_moments, mean_and_variance
from embodied_rl.algorithms.units import aggregate, mask_at_level, reduce_to_level, weigh
from embodied_rl.contracts import TrainBatch
from embodied_rl.models.base import Evaluation, Policy
from embodied_rl.schema import AlgorithmConfig
from embodied_rl.training.scoring import Reference
from embodied_rl.training.sharding import gather_values, sum_over_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContext:
    """What is the same for all optimiser steps of an update."""

    version: int
    """That the update makes."""
    kl_beta: float
    return_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """How one loss term's units count in an optimiser step."""

    weights: Tensor
    """[B] float64, in the order of the mini-batch."""
    denominator: float
    """Over all ranks."""

    def of(self, rows: Tensor, units: Tensor, mask: Tensor) -> Tensor:
        """The share of the samples at ``rows`` ([k] int64); of a masked stand-in where there are none left."""
        weights = self.weights[rows]
        weights = weights if len(weights) else self.weights.new_ones(len(mask))
        return aggregate(units, mask, weights=weights.to(units.device), denominator=self.denominator)


class Objective:
    """The loss that the configuration asks for. Denominators are sums over all ranks: its methods are collectives.

    Args:
        reference: needed for an exact divergence in the loss.
        longest_sequence: chunks that a sequence can have.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        *,
        algorithm: AlgorithmConfig,
        device: str,
        longest_sequence: int,
    ) -> None:
        self._policy, self._reference, self._algorithm = policy, reference, algorithm
        self._device, self._longest_sequence = device, longest_sequence
        self._sum = sum_over_ranks(device)
        entry = POLICY_LOSSES[algorithm.loss_type]
        self._policy_loss: Callable[..., tuple[Tensor, Diagnostics]] = entry.load()
        self._loss_options = entry.hyperparameters(algorithm)
        self._decoupled = "prox_logp_method" in entry.sections

    def near_policy(self, batch: TrainBatch, diagnostics: Diagnostics) -> TrainBatch:
        """Without the units that the decoupled loss finds too far off the policy; they leave sums and counts alike."""
        algorithm, mask, proximal = self._algorithm, batch.loss_mask, batch.proximal_logprobs
        if not self._decoupled or proximal is None:
            return batch
        if algorithm.behav_imp_weight_cap is not None:
            cap, level = algorithm.behav_imp_weight_cap, algorithm.importance_sampling_level
            kept = behaviour_filter(batch.logprobs, proximal, mask, cap=cap, level=level)
            diagnostics.add_mean("behaviour_capped", ~kept, mask)
            mask = kept
        if algorithm.m2_threshold is not None:

            def gather(x: Tensor) -> Tensor:
                return gather_values(x, self._device)

            kept = m2po_filter(batch.logprobs, proximal, mask, m2_threshold=algorithm.m2_threshold, gather=gather)
            diagnostics.add_mean("m2po_masked", ~kept, mask)
            mask = kept
        return replace(batch, loss_mask=mask)

    def return_std(self, batch: TrainBatch) -> float:
        """What the value loss measures errors in."""
        if not self._algorithm.normalize_returns or batch.returns is None or batch.value_mask is None:
            return 1.0
        _, variance = mean_and_variance(self._sum(masked_moments(batch.returns, batch.value_mask)))
        return math.sqrt(variance.item()) or 1.0  # equal returns have no scale

    def terms(self, batch: TrainBatch) -> dict[str, Term]:
        """How the units of a mini-batch's samples count in each term of the loss."""
        algorithm = self._algorithm
        masks = {"policy": batch.loss_mask, "entropy": self._entropy_mask(batch)}
        if algorithm.positive_nll_coef is not None:
            masks["nll"] = _positive(batch)
        weights = {
            name: weigh(mask, batch.sequence_ids, mode=algorithm.loss_agg_func, scale_factor=self._scale_factor(mask))
            for name, mask in masks.items()
        }
        if batch.value_mask is not None:
            weights["value"] = weigh(batch.value_mask, batch.sequence_ids, mode="token-mean", scale_factor=1.0)
        counts = self._sum(torch.tensor([w.count for w in weights.values()], dtype=torch.float64)).tolist()
        return {
            name: Term(weights=w.per_sample, denominator=count)
            for (name, w), count in zip(weights.items(), counts, strict=True)
        }

    def teaches(self, batch: TrainBatch, context: UpdateContext) -> Tensor:
        """[B] bool: the samples whose loss can have a gradient. In the others every advantage is 0, and nothing beside
        the policy loss is asked for."""
        algorithm = self._algorithm
        everything = batch.value_mask is not None or context.kl_beta > 0 or algorithm.entropy_bonus > 0
        if everything or not POLICY_LOSSES[algorithm.loss_type].weighs_by_advantage:
            return torch.ones(len(batch), dtype=torch.bool)
        units = (batch.advantages != 0) & batch.loss_mask
        if algorithm.positive_nll_coef is not None:
            units |= _positive(batch)
        return units if units.ndim == 1 else units.flatten(1).any(1)

    def _scale_factor(self, mask: Tensor) -> float:
        if self._algorithm.loss_scale_factor is not None:
            return self._algorithm.loss_scale_factor
        return float(self._longest_sequence * mask[0].numel())

    def _entropy_mask(self, batch: TrainBatch) -> Tensor:
        return mask_at_level(batch.valid, self._algorithm.entropy_type, self._policy.spec.action_dim)

    def loss(
        self,
        micro: TrainBatch,
        rows: Tensor,
        terms: dict[str, Term],
        diagnostics: Diagnostics,
        context: UpdateContext,
    ) -> Tensor:
        """The share of a micro-batch, the samples at ``rows`` ([k] int64), in the mini-batch's loss."""
        algorithm = self._algorithm
        exact = context.kl_beta > 0 and algorithm.kl_penalty_type == "full"
        inputs = {key: tensor.to(self._device) for key, tensor in micro.replay_inputs.items()}
        temperature = algorithm.sampling_params.temperature
        # Before the policy's own pass: they may share a module, whose gradients should be those of its last pass.
        other = None
        if exact:
            assert self._reference is not None
            other = self._reference(inputs, temperature=temperature, with_distribution=True)
        evaluation: Evaluation = self._policy(inputs, temperature=temperature, with_distribution=exact)
        valid, mask = micro.valid.to(self._device), micro.loss_mask.to(self._device)
        logprobs = reduce_to_level(evaluation.logprobs, valid, algorithm.logprob_type)
        old_logprobs = micro.logprobs.to(self._device)
        given = (
            {"proximal_logprobs": self._proximal(micro, logprobs, diagnostics, context.version)}
            if self._decoupled
            else {}
        )
        units, found = self._policy_loss(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=micro.advantages.to(self._device),
            mask=mask,
            **given,
            **self._loss_options,
        )
        diagnostics.merge(found)
        loss = terms["policy"].of(rows, units, mask)

        if context.kl_beta > 0:
            if other is not None:
                assert self._policy.distribution_type is not None
                assert evaluation.distribution is not None and other.distribution is not None
                kl = full_kl(self._policy.distribution_type, evaluation.distribution, other.distribution)
            else:
                assert micro.reference_logprobs is not None
                reference_logprobs = micro.reference_logprobs.to(self._device)
                kind = algorithm.kl_penalty_type
                kl = kl_estimate(evaluation.logprobs, reference_logprobs, kind, valid.unsqueeze(-1))
            units = reduce_to_level(kl, valid, algorithm.logprob_type)
            diagnostics.add_mean("reference_kl", units, mask)
            loss = loss + context.kl_beta * terms["policy"].of(rows, units, mask)

        entropy_mask = self._entropy_mask(micro).to(self._device)
        entropy = reduce_to_level(evaluation.entropy, valid, algorithm.entropy_type)
        units, found = entropy_loss(entropy=entropy, mask=entropy_mask)
        diagnostics.merge(found)
        if algorithm.entropy_bonus:
            loss = loss + algorithm.entropy_bonus * terms["entropy"].of(rows, units, entropy_mask)

        if algorithm.positive_nll_coef is not None:
            positive = _positive(micro).to(self._device)
            units, found = nll_loss(logprobs=logprobs, mask=positive)
            diagnostics.merge(found)
            loss = loss + algorithm.positive_nll_coef * terms["nll"].of(rows, units, positive)

        if micro.returns is not None and micro.values is not None and micro.value_mask is not None:
            assert evaluation.values is not None
            value_mask = micro.value_mask.to(self._device)
            units, found = value_loss(
                values=evaluation.values / context.return_std,
                old_values=micro.values.to(self._device) / context.return_std,
                returns=micro.returns.to(self._device) / context.return_std,
                mask=value_mask,
                value_clip=algorithm.value_clip,
                huber_delta=algorithm.huber_delta,
            )
            diagnostics.merge(found)
            loss = loss + algorithm.value_loss_coef * terms["value"].of(rows, units, value_mask)
        return loss

    def _proximal(self, micro: TrainBatch, logprobs: Tensor, diagnostics: Diagnostics, version: int) -> Tensor:
        """Log-probabilities of the policy that the decoupled loss clips about."""
        method, old = self._algorithm.prox_logp_method, micro.logprobs.to(self._device)
        between = None
        if method != "recompute":
            between = loglinear_proximal_logprobs(logprobs, old, micro.policy_version.to(self._device), version)
            if method == "loglinear":
                return between
        assert micro.proximal_logprobs is not None
        proximal = micro.proximal_logprobs.to(self._device)
        if between is not None:
            diagnostics.add_mean("loglinear_error", (between - proximal).abs(), micro.loss_mask.to(self._device))
        return proximal


def _positive(batch: TrainBatch) -> Tensor:
    """[B,*L] bool: the units of samples that succeeded."""
    scored = batch.scores > 0
    return batch.loss_mask & scored.reshape(-1, *[1] * (batch.loss_mask.ndim - 1))
