"""One training step's optimisation: losses over mini-batches and micro-batches, exact for any split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from embodied_rl.algorithms.aggregation import aggregate, weigh
from embodied_rl.algorithms.catalog import POLICY_LOSSES
from embodied_rl.algorithms.diagnostics import Diagnostics
from embodied_rl.algorithms.filters import behaviour_filter, m2po_filter
from embodied_rl.algorithms.granularity import mask_at_level, reduce_to_level
from embodied_rl.algorithms.kl import full_kl, kl_estimate
from embodied_rl.algorithms.losses import entropy_loss, loglinear_proximal_logprobs, nll_loss, value_loss
from embodied_rl.algorithms.normalization import masked_moments, mean_and_variance
from embodied_rl.contracts import TrainBatch
from embodied_rl.data.batch import minibatches
from embodied_rl.models.base import Evaluation, Policy
from embodied_rl.schema import ActorConfig, AlgorithmConfig
from embodied_rl.training.checkpoint import init_optimizer_state
from embodied_rl.training.fsdp import gather_ids, gather_values, max_over_ranks, sum_over_ranks
from embodied_rl.training.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """What is the same for all optimiser steps of an update."""

    version: int
    """That the update makes."""
    kl_beta: float
    return_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """How one loss term's units count in an optimiser step."""

    weights: Tensor
    """[B] float64, in the order of the mini-batch."""
    denominator: float
    """Over all ranks."""

    def of(self, rows: slice, units: Tensor, mask: Tensor) -> Tensor:
        """The share of the samples at ``rows``; of a masked stand-in where there are none left."""
        weights = self.weights[rows]
        weights = weights if len(weights) else self.weights.new_ones(len(mask))
        return aggregate(units, mask, weights=weights.to(units.device), denominator=self.denominator)


class Updater:
    """Trains the (sharded) policy on a rank's samples, in step with the other ranks.

    Losses are sums divided by counts taken over all micro-batches and ranks of a mini-batch, and each rank runs as many
    passes as the one with the most samples, so neither micro-batch size nor world size changes a gradient.

    Args:
        reference: needed for an exact divergence in the loss.
        longest_sequence: chunks that a sequence can have.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        *,
        actor: ActorConfig,
        algorithm: AlgorithmConfig,
        device: str,
        world_size: int,
        report_progress: Callable[[str, int, int], None],
        reference: Reference | None = None,
        longest_sequence: int = 1,
    ) -> None:
        self._policy, self._optimizer, self._reference = policy, optimizer, reference
        self._actor, self._algorithm = actor, algorithm
        self._device, self._world_size = device, world_size
        self._report_progress = report_progress
        self._sum, self._max = sum_over_ranks(device), max_over_ranks(device)
        self._entry = POLICY_LOSSES[algorithm.loss_type]
        self._policy_loss = self._entry.load()
        self._loss_options = {name: getattr(algorithm, name) for name in self._entry.options}
        self._decoupled = "prox_logp_method" in self._entry.sections
        self._longest_sequence = longest_sequence

    def run(self, batch: TrainBatch, *, step: int, kl_beta: float = 0.0) -> dict[str, float]:
        """Optimise on ``batch`` and return diagnostics, equal on all ranks.

        Args:
            kl_beta: weight of the divergence from the reference policy in the loss.

        Raises:
            FloatingPointError: a gradient is not finite; the weights are those before the failing optimiser step.
        """
        algorithm = self._algorithm
        diagnostics = Diagnostics()
        batch = self._near_policy(batch, diagnostics)
        context = _Context(version=step + 1, kl_beta=kl_beta, return_std=self._return_std(batch))
        # A rank whose groups were all filtered holds one masked sample, which must not take a place in a mini-batch:
        # another number of ranks would have another number of them.
        trainable = batch.trainable()
        own_ids = batch.sample_ids[trainable]
        all_ids = gather_ids(own_ids, self._device)
        if algorithm.n_minibatches is not None:
            count = algorithm.n_minibatches
        else:
            assert self._actor.global_batch_size is not None  # the config's checks ask for one of the two
            count = max(1, round(len(all_ids) / self._actor.global_batch_size))
        norms: list[float] = []
        total = algorithm.update_epoch * min(count, len(all_ids))
        stopped = False
        for epoch in range(algorithm.update_epoch):
            for place in minibatches(all_ids, own_ids, seed=self._actor.seed, step=step, epoch=epoch, count=count):
                norm = self._optimizer_step(batch, trainable[place], diagnostics, context)
                stopped = norm is None
                if norm is None:
                    break
                norms.append(norm)
                self._report_progress("update", len(norms), total)
            if stopped:
                break
        diagnostics.reduce(self._sum, self._max)
        metrics = {
            **diagnostics.result(),
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "optimizer_steps": float(len(norms)),
            "samples": float(len(all_ids)),
        }
        return metrics if algorithm.early_stop_imp_ratio is None else metrics | {"early_stopped": float(stopped)}

    def _near_policy(self, batch: TrainBatch, diagnostics: Diagnostics) -> TrainBatch:
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

    def _return_std(self, batch: TrainBatch) -> float:
        """What the value loss measures errors in."""
        if not self._algorithm.normalize_returns or batch.returns is None or batch.value_mask is None:
            return 1.0
        _, variance = mean_and_variance(self._sum(masked_moments(batch.returns, batch.value_mask)))
        return math.sqrt(variance.item()) or 1.0  # equal returns have no scale

    def _optimizer_step(
        self, batch: TrainBatch, index: Tensor, diagnostics: Diagnostics, context: _Context
    ) -> float | None:
        """One mini-batch; returns the gradient's norm before clipping, or None where the ratio says to stop."""
        algorithm, size = self._algorithm, self._actor.micro_batch_size
        passes = int(self._max(torch.tensor([-(-len(index) // size)]))[0])
        terms = self._terms(batch.select(index)) if len(index) else self._terms(_masked(batch))
        found = Diagnostics()
        self._optimizer.zero_grad(set_to_none=True)
        for number in range(passes):
            rows = slice(number * size, (number + 1) * size)
            part = index[rows]
            # A rank that has run out of samples repeats one, masked: FSDP's collectives need it to take part, and those
            # of the diagnostics need it to know their names.
            micro = batch.select(part) if len(part) else _masked(batch.select(torch.zeros(1, dtype=torch.int64)))
            loss = self._loss(micro, rows, terms, found, context)
            # FSDP averages gradients over ranks; the loss's denominators are global already.
            (loss * self._world_size).backward()
        diagnostics.merge(found)
        if algorithm.early_stop_imp_ratio is not None:
            total, count = self._sum(found.pair("ratio")).tolist()
            if count and total / count > algorithm.early_stop_imp_ratio:
                self._optimizer.zero_grad(set_to_none=True)
                return None
        if context.version <= algorithm.critic_warmup_steps:
            self._keep_value_gradients()
        parameters = [p for p in self._policy.parameters() if p.requires_grad]
        limit = float("inf") if self._actor.optim.clip_grad is None else self._actor.optim.clip_grad
        norm = _full(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm.item()}, the weights are those before it: lower actor.optim.lr, or look "
                "for NaN in rewards and observations"
            )
        self._optimizer.step()
        return norm.item()

    def _keep_value_gradients(self) -> None:
        """So that the optimiser leaves the rest as it is."""
        init_optimizer_state(self._policy, self._optimizer)  # or a checkpoint saved now would lack the rest's
        of_value_head = {id(p) for p in self._policy.value_parameters()}
        for parameter in self._policy.parameters():
            if id(parameter) not in of_value_head:
                parameter.grad = None

    def _terms(self, batch: TrainBatch) -> dict[str, _Term]:
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
            name: _Term(weights=w.per_sample, denominator=count)
            for (name, w), count in zip(weights.items(), counts, strict=True)
        }

    def _scale_factor(self, mask: Tensor) -> float:
        if self._algorithm.loss_scale_factor is not None:
            return self._algorithm.loss_scale_factor
        return float(self._longest_sequence * mask[0].numel())

    def _entropy_mask(self, batch: TrainBatch) -> Tensor:
        return mask_at_level(batch.valid, self._algorithm.entropy_type, self._policy.spec.action_dim)

    def _loss(
        self,
        micro: TrainBatch,
        rows: slice,
        terms: dict[str, _Term],
        diagnostics: Diagnostics,
        context: _Context,
    ) -> Tensor:
        """This micro-batch's share of the mini-batch's loss."""
        algorithm = self._algorithm
        exact = context.kl_beta > 0 and algorithm.kl_penalty_type == "full"
        inputs = {key: tensor.to(self._device) for key, tensor in micro.replay_inputs.items()}
        temperature = algorithm.sampling_params.temperature
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
            if exact:
                assert self._reference is not None and self._policy.distribution_type is not None
                other = self._reference(inputs, temperature=temperature, with_distribution=True)
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
    """[B,*L] bool: the units of samples whose rollout scored."""
    scored = batch.scores > 0
    return batch.loss_mask & scored.reshape(-1, *[1] * (batch.loss_mask.ndim - 1))


def _masked(batch: TrainBatch) -> TrainBatch:
    """The batch with nothing in it that counts."""
    return replace(
        batch,
        loss_mask=torch.zeros_like(batch.loss_mask),
        valid=torch.zeros_like(batch.valid),
        value_mask=None if batch.value_mask is None else torch.zeros_like(batch.value_mask),
    )


def _full(tensor: Tensor) -> Tensor:
    """A DTensor's whole value."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
