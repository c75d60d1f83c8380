"""One training step's optimisation: losses over mini-batches and micro-batches, exact for any split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from embodied_rl.algorithms.catalog import POLICY_LOSSES
from embodied_rl.algorithms.diagnostics import Diagnostics
from embodied_rl.algorithms.granularity import mask_at_level, reduce_to_level
from embodied_rl.algorithms.losses import entropy_loss, token_mean, value_loss
from embodied_rl.contracts import TrainBatch
from embodied_rl.data.batch import minibatches
from embodied_rl.models.base import Evaluation, Policy
from embodied_rl.schema import ActorConfig, AlgorithmConfig
from embodied_rl.training.fsdp import gather_ids, max_over_ranks, sum_over_ranks


class Updater:
    """Trains the (sharded) policy on a rank's samples, in step with the other ranks.

    Losses are sums divided by counts taken over all micro-batches and ranks of a mini-batch, and each rank runs as many
    passes as the one with the most samples, so neither micro-batch size nor world size changes a gradient.
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
    ) -> None:
        self._policy, self._optimizer = policy, optimizer
        self._actor, self._algorithm = actor, algorithm
        self._device, self._world_size = device, world_size
        self._report_progress = report_progress
        self._sum, self._max = sum_over_ranks(device), max_over_ranks(device)
        entry = POLICY_LOSSES[algorithm.loss_type]
        self._policy_loss = entry.load()
        self._loss_options = {name: getattr(algorithm, name) for name in entry.options}

    def run(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        """Optimise on ``batch`` and return diagnostics, equal on all ranks.

        Raises:
            FloatingPointError: a gradient is not finite; the weights are those before the failing optimiser step.
        """
        algorithm = self._algorithm
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
        diagnostics = Diagnostics()
        norms: list[float] = []
        total = algorithm.update_epoch * min(count, len(all_ids))
        for epoch in range(algorithm.update_epoch):
            for place in minibatches(all_ids, own_ids, seed=self._actor.seed, step=step, epoch=epoch, count=count):
                norms.append(self._optimizer_step(batch, trainable[place], diagnostics))
                self._report_progress("update", len(norms), total)
        diagnostics.reduce(self._sum, self._max)
        return {
            **diagnostics.result(),
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "optimizer_steps": float(len(norms)),
            "samples": float(len(all_ids)),
        }

    def _optimizer_step(self, batch: TrainBatch, index: Tensor, diagnostics: Diagnostics) -> float:
        """One mini-batch; returns the gradient's norm before clipping."""
        size = self._actor.micro_batch_size
        passes = int(self._max(torch.tensor([-(-len(index) // size)]))[0])
        counts = self._sum(self._counts(batch, index))
        self._optimizer.zero_grad(set_to_none=True)
        for number in range(passes):
            part = index[number * size : (number + 1) * size]
            # A rank that has run out of samples repeats one, masked: FSDP's collectives need it to take part, and those
            # of the diagnostics need it to know their names.
            micro = batch.select(part) if len(part) else _masked(batch.select(torch.zeros(1, dtype=torch.int64)))
            # FSDP averages gradients over ranks; the loss's denominators are global already.
            (self._loss(micro, counts, diagnostics) * self._world_size).backward()
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

    def _counts(self, batch: TrainBatch, index: Tensor) -> Tensor:
        """[3] float64: this rank's valid policy, value and entropy units of a mini-batch."""
        entropy_mask = self._entropy_mask(batch)[index]
        value_units = 0 if batch.value_mask is None else int(batch.value_mask[index].sum())
        return torch.tensor(
            [int(batch.loss_mask[index].sum()), value_units, int(entropy_mask.sum())], dtype=torch.float64
        )

    def _entropy_mask(self, batch: TrainBatch) -> Tensor:
        return mask_at_level(batch.valid, self._algorithm.entropy_type, self._policy.spec.action_dim)

    def _loss(self, micro: TrainBatch, counts: Tensor, diagnostics: Diagnostics) -> Tensor:
        """This micro-batch's share of the mini-batch's loss."""
        algorithm = self._algorithm
        evaluation: Evaluation = self._policy(
            {key: tensor.to(self._device) for key, tensor in micro.replay_inputs.items()},
            temperature=algorithm.sampling_params.temperature,
        )
        valid, mask = micro.valid.to(self._device), micro.loss_mask.to(self._device)
        units, found = self._policy_loss(
            logprobs=reduce_to_level(evaluation.logprobs, valid, algorithm.logprob_type),
            old_logprobs=micro.logprobs.to(self._device),
            advantages=micro.advantages.to(self._device),
            mask=mask,
            **self._loss_options,
        )
        diagnostics.merge(found)
        loss = token_mean(units, mask, denominator=float(counts[0]))

        entropy_mask = self._entropy_mask(micro).to(self._device)
        entropy = reduce_to_level(evaluation.entropy, valid, algorithm.entropy_type)
        units, found = entropy_loss(entropy=entropy, mask=entropy_mask)
        diagnostics.merge(found)
        if algorithm.entropy_bonus:
            loss = loss + algorithm.entropy_bonus * token_mean(units, entropy_mask, denominator=float(counts[2]))

        if micro.returns is not None and micro.values is not None and micro.value_mask is not None:
            assert evaluation.values is not None
            value_mask = micro.value_mask.to(self._device)
            units, found = value_loss(
                values=evaluation.values,
                old_values=micro.values.to(self._device),
                returns=micro.returns.to(self._device),
                mask=value_mask,
                value_clip=algorithm.value_clip,
                huber_delta=algorithm.huber_delta,
            )
            diagnostics.merge(found)
            loss = loss + algorithm.value_loss_coef * token_mean(units, value_mask, denominator=float(counts[1]))
        return loss


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
