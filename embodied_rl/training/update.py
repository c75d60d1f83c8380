"""One training step's optimisation: losses over mini-batches and micro-batches, exact for any split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.contracts import TrainBatch
from embodied_rl.models.flops import SampleCost
from embodied_rl.monitoring.work import Flops
from embodied_rl.training.batch import minibatches
from embodied_rl.training.demonstrated import Demonstrated
from embodied_rl.training.micro_batch import MicroBatch
from embodied_rl.training.nonfinite import origin
from embodied_rl.training.objective import Objective, Term, UpdateContext
from embodied_rl.training.optimizer import init_optimizer_state
from embodied_rl.training.scoring import Training
from embodied_rl.training.sharding import gather_values, is_distributed, is_sharded, max_over_ranks, sum_over_ranks


class Updater:
    """Trains the (sharded) policy on a rank's samples, in step with the other ranks.

    Losses are sums divided by counts taken over all micro-batches and ranks of a mini-batch, and each rank runs as many
    passes as the one with the most samples, so neither micro-batch size nor world size changes a gradient.
    """

    def __init__(
        self,
        training: Training,
        optimizer: Optimizer,
        demonstrated: Demonstrated | None = None,
        objective: Objective | None = None,
    ) -> None:
        self._demonstrated = demonstrated
        self._policy, self._optimizer, self._section = training.policy, optimizer, training.section
        self._whose = "" if self._section == "actor" else f"{self._section}'s "
        self._actor, self._algorithm, self._device = training.actor, training.algorithm, training.device
        self._report_progress = training.report_progress
        self._sum, self._max = sum_over_ranks(training.device), max_over_ranks(training.device)
        self._objective = objective or Objective(training)
        self.cost: SampleCost | None = None
        self.flops = Flops()
        """Of the last update; nothing without :attr:`cost`."""
        self._left_out = self._seen = 0
        """Samples of this update's optimiser steps."""
        self.without_gradient: dict[str, Tensor] = {}
        """Trainable parameters, by name, that no loss of the last update reached: nothing reads them."""
        self._teaching: Tensor | None = None
        """[B] bool: the samples of this update whose loss can have a gradient; None: all are gone through."""
        self._trainable: list[Tensor] = []
        """The policy's parameters that this update trains."""
        self._alone: list[Tensor] | None = None
        """The value head's parameters in the critic's warm-up: no others are to have a gradient. None: all are."""
        self._losses: list[tuple[Tensor, Tensor]] = []
        """Of each micro-batch of the last mini-batch, its samples' ids and its loss."""
        self._under_way = ""
        """Name of the update and mini-batch in progress reports."""
        self._micro_batch = MicroBatch(
            self._actor.micro_batch_size,
            *training.policies,
            max_tokens=self._actor.max_tokens_per_micro_batch,
            key=f"{self._section}.micro_batch_size",
        )

    def run(self, batch: TrainBatch, *, step: int, kl_beta: float = 0.0) -> dict[str, float]:
        """Optimise on ``batch`` and return diagnostics, equal on all ranks.

        Args:
            kl_beta: weight of the divergence from the reference policy in the loss.

        Raises:
            FloatingPointError: a gradient is not finite, and ``skip_nonfinite`` is false; the weights are those before
                the failing optimiser step.
        """
        algorithm = self._algorithm
        diagnostics = Diagnostics()
        batch = self._objective.mask_off_policy(batch, diagnostics)
        context = UpdateContext(
            version=step + 1,
            kl_beta=kl_beta,
            return_std=self._objective.return_std(batch),
            weighing=self._objective.weighing(batch),
        )
        # A rank whose groups were all filtered holds one masked sample, which must not count in a mini-batch:
        # another number of ranks would have another number of them.
        trainable = batch.trainable()
        own_ids = batch.sample_ids[trainable]
        all_ids = gather_values(own_ids)
        count = self._minibatch_count(len(all_ids))
        total = algorithm.update_epoch * min(count, len(all_ids))
        self._left_out = self._seen = 0
        self.flops = Flops()
        parameters: dict[str, Tensor] = {name: p for name, p in self._policy.named_parameters() if p.requires_grad}
        self._trainable = list(parameters.values())
        value_head = self._policy.value_parameters() if context.version <= algorithm.critic_warmup_steps else []
        self._alone = [p for p in value_head if p.requires_grad] if value_head else None
        self.without_gradient = parameters if total and self._alone is None else {}
        self._teaching = self._objective.has_gradient(batch, context) if self._skips else None
        norms: list[float] = []
        stopped = False
        seed, epochs = self._actor.seed, algorithm.update_epoch
        for index in minibatches(all_ids, own_ids, seed=seed, step=step, epochs=epochs, count=count):
            self._under_way = f"{self._whose}update {len(norms) + 1}/{total}: micro-batch"
            norm = self._optimizer_step(batch, trainable[index], diagnostics, context, number=len(norms))
            stopped = norm is None
            if norm is None:
                break
            norms.append(norm)
        diagnostics.reduce(self._sum, self._max)
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics = {
            **diagnostics.result(),
            "grad_norm": sum(finite) / len(finite) if finite else 0.0,
            "optimizer_steps": float(len(finite)),
            "samples": float(len(all_ids)),
        }
        if self._skips:
            left_out, seen = self._sum(torch.tensor([self._left_out, self._seen], dtype=torch.float64)).tolist()
            metrics["samples_skipped"] = left_out / seen if seen else 0.0
        if self._micro_batch.fitting is not None:
            metrics["micro_batch_size"] = float(self._micro_batch.fitting)
        if self._actor.optim.skip_nonfinite:
            metrics["nonfinite_steps"] = float(len(norms) - len(finite))
        if algorithm.early_stop_imp_ratio is not None:
            metrics["early_stopped"] = float(stopped)
        return metrics

    @property
    def _skips(self) -> bool:
        """Samples without a gradient are left out. An early stop asks for the ratio of all."""
        return self._actor.skip_zero_advantages and self._algorithm.early_stop_imp_ratio is None

    def _minibatch_count(self, samples: int) -> int:
        if self._algorithm.n_minibatches is not None:
            return self._algorithm.n_minibatches
        assert self._actor.global_batch_size is not None  # the config's checks ask for one of the two
        return max(1, round(samples / self._actor.global_batch_size))

    def _optimizer_step(
        self, batch: TrainBatch, index: Tensor, diagnostics: Diagnostics, context: UpdateContext, *, number: int
    ) -> float | None:
        """One mini-batch; returns the gradient's norm before clipping, or None where the ratio says to stop.

        Where the norm is not finite there was no step.
        """
        actor, algorithm = self._actor, self._algorithm
        terms, teaching = self._objective.terms(context.weighing, index), self._taught(index)
        lengths = self._policy.sample_lengths(batch.replay_inputs)
        lengths = None if lengths is None else lengths[index[teaching]]
        limit = float("inf") if actor.optim.clip_grad is None else actor.optim.clip_grad
        size, finite = 0.0, True
        found = Diagnostics()
        for loss_scale in self._loss_scales():
            accumulate = partial(self._accumulate, batch, index, teaching, terms, context, loss_scale)
            found = self._micro_batch.run(len(teaching), lengths, accumulate)
            if self.cost is not None:
                cost = self.cost.trained if self._leaves is None else self.cost.inferred
                self.flops += cost(len(teaching), lengths)
            if self._demonstrated is not None:
                # FSDP averages gradients over ranks; the loss's denominator is global already.
                scale = dist.get_world_size() * loss_scale
                frames = self._demonstrated.backward(
                    step=context.version - 1, number=number, scale=scale, diagnostics=found
                )
                if self.cost is not None:
                    self.flops += self.cost.trained(frames, None)
            if algorithm.early_stop_imp_ratio is not None:
                total, count = self._sum(found.pair("ratio")).tolist()
                if count and total / count > algorithm.early_stop_imp_ratio:
                    diagnostics.merge(found)
                    self._drop_gradients()
                    return None
            if self._alone is not None:
                self._keep_value_gradients(self._alone)
            if loss_scale != 1:
                for gradient in [p.grad for p in self._trainable if p.grad is not None]:
                    gradient.div_(loss_scale)
            norm = torch.nn.utils.get_total_norm([p.grad for p in self._trainable if p.grad is not None])
            size = (norm.full_tensor() if is_distributed(norm) else norm).item()
            finite = math.isfinite(size)
            if finite and size > limit:
                torch.nn.utils.clip_grads_with_norm_(self._trainable, limit, norm)
            if finite:
                break
        diagnostics.merge(found)
        if finite:
            self._optimizer.step()
        elif actor.optim.skip_nonfinite:
            self._drop_gradients()
        else:
            raise FloatingPointError(
                f"training step {context.version}: the {self._whose}gradient's norm is {size}, the weights are "
                f"those before it. {origin(self._policy, batch.select(index), self._losses)}. Lower "
                f"{self._section}.optim.lr, or look into what gave these numbers; "
                f"{self._section}.optim.skip_nonfinite=true goes on without such steps"
            )
        return size

    def _taught(self, index: Tensor) -> Tensor:
        """A mini-batch's samples to go through, [k] int64 into ``index``."""
        if self._teaching is None:
            return torch.arange(len(index))
        teaching = self._teaching[index].nonzero().squeeze(-1)
        self._seen += len(index)
        self._left_out += len(index) - len(teaching)
        return teaching

    def _loss_scales(self) -> tuple[float, ...]:
        """Factors to multiply the loss by; the next one where gradients overflow.

        float16 has numbers from 6e-8 to 65504, and most gradients are at its lower end. Each step starts from the
        largest scale, so that there is none to save.
        """
        precision = self._actor.fsdp_config.mixed_precision
        if "float16" not in (precision.param_dtype, precision.reduce_dtype):
            return (1.0,)
        return tuple(2.0**exponent for exponent in (16, 12, 8, 4, 0))

    def _accumulate(
        self,
        batch: TrainBatch,
        index: Tensor,
        teaching: Tensor,
        terms: dict[str, Term],
        context: UpdateContext,
        loss_scale: float,
        parts: list[Tensor],
    ) -> Diagnostics:
        """Leave a mini-batch's gradient, times ``loss_scale``, in the parameters.

        Args:
            index: indices into ``batch`` of the mini-batch's samples.
            teaching: indices into ``index`` of the samples to go through.
            parts: indices into ``teaching`` of each micro-batch.
        """
        diagnostics = Diagnostics()
        passes = max(1, int(self._max(torch.tensor([len(parts)]))[0]))
        self._drop_gradients()
        self._losses = []
        for number in range(passes):
            rows = teaching[parts[number]] if number < len(parts) else torch.zeros(0, dtype=torch.int64)
            last = number == passes - 1
            if is_sharded(self._policy):
                once = self._actor.fsdp_config.enable_gradient_accumulation
                self._policy.set_requires_gradient_sync(last or not once)
            self._micro_batch.attempt(
                partial(self._backward, batch, index, terms, context, loss_scale, diagnostics), rows
            )
            self._report_progress(self._under_way, number + 1, passes)
        if self.without_gradient:
            self.without_gradient = {name: p for name, p in self.without_gradient.items() if p.grad is None}
        return diagnostics

    def _backward(
        self,
        batch: TrainBatch,
        index: Tensor,
        terms: dict[str, Term],
        context: UpdateContext,
        loss_scale: float,
        diagnostics: Diagnostics,
        rows: Tensor,
    ) -> None:
        """Add a micro-batch's gradient.

        Args:
            rows: indices into ``index`` of its samples.
        """
        # A rank that has run out of samples repeats one, masked: FSDP's collectives need it to take part, and those
        # of the diagnostics need it to know their names.
        own = batch.select(index[rows] if len(rows) else torch.zeros(1, dtype=torch.int64))
        micro = own if len(rows) else _masked(own)
        loss = self._objective.loss(micro, rows, terms, diagnostics, context)
        self._losses.append((micro.sample_ids, loss.detach()))
        # FSDP averages gradients over ranks; the loss's denominators are global already.
        factor = dist.get_world_size() * loss_scale
        (loss if factor == 1 else loss * factor).backward(inputs=self._leaves)

    @property
    def _leaves(self) -> list[Tensor] | None:
        """The parameters that backward passes compute gradients of; None: all.

        FSDP's parameters are not those that losses are computed with, so all of them get one.
        """
        return None if is_sharded(self._policy) else self._alone or None

    def _drop_gradients(self) -> None:
        """As the optimiser's own method, which costs a small network more: it looks up groups and a profiler."""
        for parameter in self._trainable:
            parameter.grad = None

    def _keep_value_gradients(self, value_head: Sequence[Tensor]) -> None:
        """Drop the others' gradients, which FSDP and demonstrations leave, so that the optimiser leaves them alone."""
        init_optimizer_state(self._optimizer)  # or a checkpoint saved now would lack the rest's
        of_value_head = {id(p) for p in value_head}
        for parameter in self._trainable:
            if id(parameter) not in of_value_head:
                parameter.grad = None


def _masked(batch: TrainBatch) -> TrainBatch:
    """The batch with nothing in it that counts."""
    return replace(
        batch,
        loss_mask=torch.zeros_like(batch.loss_mask),
        valid=torch.zeros_like(batch.valid),
        value_mask=None if batch.value_mask is None else torch.zeros_like(batch.value_mask),
    )
