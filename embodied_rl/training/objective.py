"""The training objective: the units of a batch that count in each term, and a micro-batch's share of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from embodied_rl.algorithms.units import aggregate, mask_at_level, reduce_to_level, units_of, weigh
from embodied_rl.contracts import TrainBatch
from embodied_rl.models.base import Evaluation
from embodied_rl.training.scoring import Training
from embodied_rl.training.sharding import gather_values, sum_over_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContext:
    """What is the same for all optimiser steps of an update."""

    version: int
    """Version that the update makes."""
    kl_beta: float
    return_std: float
    weighing: Weighing


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Weights of one loss term's units in an optimiser step."""

    weights: Tensor | float
    """[B] float64, in the order of the mini-batch; a number: that of all."""
    denominator: float
    """Over all ranks."""

    def of(self, rows: Tensor, units: Tensor, mask: Tensor) -> Tensor:
        """The share of the samples at ``rows`` ([k] int64); of a masked stand-in where there are none left."""
        weights = self.weights
        if isinstance(weights, Tensor):
            weights = (weights[rows] if len(rows) else weights.new_ones(len(mask))).to(units.device)
        return aggregate(units, mask, weights=weights, denominator=self.denominator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """What of a rank's samples in an update decides how they weigh in each term of an optimiser step's loss."""

    sequence_ids: Tensor
    """[B] int64."""
    units: Mapping[str, Tensor]
    """Of each term, as :func:`units_of`."""
    scale_factors: Mapping[str, float]
    """Of each term that is aggregated as ``algorithm.loss_agg_func`` says, as :func:`weigh` takes them. The others are
    means over units."""


class Objective:
    """The loss that the configuration asks for. Denominators are sums over all ranks: its methods are collectives."""

    def __init__(self, training: Training) -> None:
        self._policy, self._reference = training.policy, training.reference
        self._algorithm = algorithm = training.algorithm
        self._device, self._longest_sequence = training.device, training.longest_sequence
        self._sum = sum_over_ranks(training.device)
        entry = POLICY_LOSSES[algorithm.loss_type]
        self._policy_loss: Callable[..., tuple[Tensor, Diagnostics]] = entry.load()
        self._loss_options = entry.hyperparameters(algorithm)
        self._decoupled = "prox_logp_method" in entry.sections

    def mask_off_policy(self, batch: TrainBatch, diagnostics: Diagnostics) -> TrainBatch:
        """Leave out the units that the decoupled loss finds too far off the policy, from sums and counts alike."""
        algorithm, mask, proximal = self._algorithm, batch.loss_mask, batch.proximal_logprobs
        if not self._decoupled or proximal is None:
            return batch
        if algorithm.behav_imp_weight_cap is not None and algorithm.behav_imp_weight_mode == "mask":
            cap, level = algorithm.behav_imp_weight_cap, algorithm.importance_sampling_level
            kept = behaviour_filter(batch.logprobs, proximal, mask, cap=cap, level=level)
            diagnostics.add_mean("behaviour_capped", ~kept, mask)
            mask = kept
        if algorithm.m2_threshold is not None:
            threshold = algorithm.m2_threshold
            kept = m2po_filter(batch.logprobs, proximal, mask, m2_threshold=threshold, gather=gather_values)
            diagnostics.add_mean("m2po_masked", ~kept, mask)
            mask = kept
        return replace(batch, loss_mask=mask)

    def return_std(self, batch: TrainBatch) -> float:
        """The unit in which the value loss measures errors."""
        if not self._algorithm.normalize_returns or batch.returns is None or batch.value_mask is None:
            return 1.0
        _, variance = mean_and_variance(self._sum(masked_moments(batch.returns, batch.value_mask)))
        return math.sqrt(variance.item()) or 1.0  # equal returns have no scale

    def weighing(self, batch: TrainBatch) -> Weighing:
        """Of an update's samples, for :meth:`terms`."""
        masks = {"policy": batch.loss_mask}
        if self._algorithm.entropy_bonus:
            masks["entropy"] = self._entropy_mask(batch)
        if self._algorithm.positive_nll_coef is not None:
            masks["nll"] = _positive(batch)
        scale_factors = {name: self._scale_factor(mask) for name, mask in masks.items()}
        if batch.value_mask is not None:
            masks["value"] = batch.value_mask
        units = {name: units_of(mask) for name, mask in masks.items()}
        return Weighing(sequence_ids=batch.sequence_ids, units=units, scale_factors=scale_factors)

    def terms(self, weighing: Weighing, index: Tensor) -> dict[str, Term]:
        """Weigh the units of a mini-batch, the samples at ``index`` ([k] int64), for each term of the loss."""
        sequence_ids, aggregation = weighing.sequence_ids[index], self._algorithm.loss_agg_func
        weights = {
            name: weigh(
                units[index],
                sequence_ids,
                mode=aggregation if name in weighing.scale_factors else "token-mean",
                scale_factor=weighing.scale_factors.get(name, 1.0),
            )
            for name, units in weighing.units.items()
        }
        counts = self._sum(torch.tensor([w.count for w in weights.values()], dtype=torch.float64)).tolist()
        return {
            name: Term(weights=w.per_sample, denominator=count)
            for (name, w), count in zip(weights.items(), counts, strict=True)
        }

    def has_gradient(self, batch: TrainBatch, context: UpdateContext) -> Tensor:
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
        micro = micro.to(self._device)
        temperature = algorithm.sampling_params.temperature
        # Before the policy's own pass: they may share a module, whose gradients should be those of its last pass.
        other = None
        if exact:
            assert self._reference is not None
            other = self._reference(micro.replay_inputs, temperature=temperature, with_distribution=True)
        evaluation: Evaluation = self._policy(micro.replay_inputs, temperature=temperature, with_distribution=exact)
        logprobs = reduce_to_level(evaluation.logprobs, micro.valid, algorithm.logprob_type)
        units = self._policy_units(micro, logprobs, diagnostics, context.version)
        loss = terms["policy"].of(rows, units, micro.loss_mask)
        if context.kl_beta > 0:
            units = reduce_to_level(self._divergence(micro, evaluation, other), micro.valid, algorithm.logprob_type)
            diagnostics.add_mean("reference_kl", units, micro.loss_mask)
            loss = loss + context.kl_beta * terms["policy"].of(rows, units, micro.loss_mask)
        entropy_mask = self._entropy_mask(micro)
        entropy = reduce_to_level(evaluation.entropy, micro.valid, algorithm.entropy_type)
        units, found = entropy_loss(entropy=entropy, mask=entropy_mask)
        diagnostics.merge(found)
        if algorithm.entropy_bonus:
            loss = loss + algorithm.entropy_bonus * terms["entropy"].of(rows, units, entropy_mask)
        if algorithm.positive_nll_coef is not None:
            positive = _positive(micro)
            units, found = nll_loss(logprobs=logprobs, mask=positive)
            diagnostics.merge(found)
            loss = loss + algorithm.positive_nll_coef * terms["nll"].of(rows, units, positive)
        if micro.returns is not None and micro.values is not None and micro.value_mask is not None:
            share = self._value_share(micro, evaluation, rows, terms, diagnostics, context)
            loss = loss + algorithm.value_loss_coef * share
        return loss

    def _value_share(
        self,
        micro: TrainBatch,
        evaluation: Evaluation,
        rows: Tensor,
        terms: dict[str, Term],
        diagnostics: Diagnostics,
        context: UpdateContext,
    ) -> Tensor:
        assert micro.returns is not None and micro.values is not None and micro.value_mask is not None
        assert evaluation.values is not None
        values, old_values, returns = evaluation.values, micro.values, micro.returns
        if context.return_std != 1.0:
            values, old_values, returns = (part / context.return_std for part in (values, old_values, returns))
        units, found = value_loss(
            values=values,
            old_values=old_values,
            returns=returns,
            mask=micro.value_mask,
            value_clip=self._algorithm.value_clip,
            huber_delta=self._algorithm.huber_delta,
        )
        diagnostics.merge(found)
        return terms["value"].of(rows, units, micro.value_mask)

    def _policy_units(self, micro: TrainBatch, logprobs: Tensor, diagnostics: Diagnostics, version: int) -> Tensor:
        options = dict(self._loss_options)
        if self._decoupled:
            options["proximal_logprobs"] = self._proximal(micro, logprobs, diagnostics, version)
        units, found = self._policy_loss(
            logprobs=logprobs,
            old_logprobs=micro.logprobs,
            advantages=micro.advantages,
            mask=micro.loss_mask,
            **options,
        )
        diagnostics.merge(found)
        return units

    def _divergence(self, micro: TrainBatch, own: Evaluation, other: Evaluation | None) -> Tensor:
        """[B,C,A] from the reference policy: exact with its evaluation ``other``, else estimated."""
        if other is None:
            assert micro.reference_logprobs is not None
            kind = self._algorithm.kl_penalty_type
            return kl_estimate(own.logprobs, micro.reference_logprobs, kind, micro.valid.unsqueeze(-1))
        assert self._policy.distribution_type is not None
        assert own.distribution is not None and other.distribution is not None
        return full_kl(self._policy.distribution_type, own.distribution, other.distribution)

    def _proximal(self, micro: TrainBatch, logprobs: Tensor, diagnostics: Diagnostics, version: int) -> Tensor:
        """Log-probabilities of the policy that the decoupled loss clips about."""
        method, proximal = self._algorithm.prox_logp_method, micro.proximal_logprobs
        if method != "recompute":
            between = loglinear_proximal_logprobs(logprobs, micro.logprobs, micro.policy_version, version)
            if method == "loglinear":
                return between
            assert proximal is not None
            diagnostics.add_mean("loglinear_error", (between - proximal).abs(), micro.loss_mask)
        assert proximal is not None
        return proximal


class ValueObjective(Objective):
    """The loss of a critic of its own: that of its values alone, in samples with values."""

    def mask_off_policy(self, batch: TrainBatch, diagnostics: Diagnostics) -> TrainBatch:
        return batch

    def weighing(self, batch: TrainBatch) -> Weighing:
        assert batch.value_mask is not None
        return Weighing(sequence_ids=batch.sequence_ids, units={"value": units_of(batch.value_mask)}, scale_factors={})

    def loss(
        self,
        micro: TrainBatch,
        rows: Tensor,
        terms: dict[str, Term],
        diagnostics: Diagnostics,
        context: UpdateContext,
    ) -> Tensor:
        micro = micro.to(self._device)
        evaluation: Evaluation = self._policy(
            micro.replay_inputs, temperature=self._algorithm.sampling_params.temperature
        )
        return self._value_share(micro, evaluation, rows, terms, diagnostics, context)


def _positive(batch: TrainBatch) -> Tensor:
    """[B,*L] bool: the units of samples that succeeded."""
    scored = batch.scores > 0
    return batch.loss_mask & scored.reshape(-1, *[1] * (batch.loss_mask.ndim - 1))
