"""Forward passes without gradient before the update: what it needs to know of the rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from embodied_rl.algorithms.catalog import ADVANTAGES, POLICY_LOSSES
from embodied_rl.algorithms.losses import full_kl, kl_estimate
from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.algorithms.units import mask_at_level, reduce_to_level
from embodied_rl.contracts import TrainBatch, Trajectory
from embodied_rl.models.base import ENCODED, Evaluation, Policy, as_encoded
from embodied_rl.models.flops import SampleCost
from embodied_rl.monitoring.work import Flops
from embodied_rl.schema import ActorConfig, AlgorithmConfig
from embodied_rl.training.batch import replay_inputs_of, taken_chunks
from embodied_rl.training.micro_batch import MicroBatch
from embodied_rl.training.sharding import max_over_ranks


class Reference:
    """The policy that the run started from: a copy, sharded like the one that is trained. It is frozen here."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        """Evaluate recorded decisions as ``Policy.evaluate`` does."""
        return self.policy(replay_inputs, temperature=temperature, with_distribution=with_distribution)


class BaseReference(Reference):
    """The policy that is trained, without its adapters: no weights of its own.

    It gives what the run started from as long as adapters, and a value head, are all that is trained.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __call__(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        from embodied_rl.models.weights.lora import adapters_off  # peft takes a second to import

        with adapters_off(self.policy):
            return super().__call__(replay_inputs, temperature=temperature, with_distribution=with_distribution)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One rank's policy in training, and what scoring and update need beside it."""

    policy: Policy
    """Sharded."""
    reference: Reference | None = None
    """Needed with ``algorithm.kl_beta``."""
    actor: ActorConfig
    algorithm: AlgorithmConfig
    device: str
    longest_sequence: int = 1
    """Chunks that a sequence can have."""
    report_progress: Callable[[str, int, int], None]
    section: Literal["actor", "critic"] = "actor"
    """The configuration's section that ``policy`` is trained by."""

    @property
    def policies(self) -> list[Policy]:
        """All that a pass may go through."""
        return [self.policy] if self.reference is None else [self.policy, self.reference.policy]


def forward_in_parts(
    inputs: Mapping[str, Tensor],
    count: int,
    lengths: Tensor | None,
    forward: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    training: Training,
    micro_batch: MicroBatch,
    what: str | None,
) -> dict[str, Tensor]:
    """``forward`` on ``count`` samples, in micro-batches: its results, [count,...] each. A collective.

    Args:
        inputs: [count,...] each.
        lengths: as ``Policy.sample_lengths``.
        what: name of this in progress reports; None: there are none.
    """

    def one(rows: Tensor) -> dict[str, Tensor]:
        # A rank without samples left takes part in the others' collectives with any sample.
        own = rows if len(rows) else torch.zeros(1, dtype=torch.int64)
        results = forward({key: tensor.index_select(0, own).to(training.device) for key, tensor in inputs.items()})
        return {name: tensor[: len(rows)].float().cpu() for name, tensor in results.items()}

    def all_of(parts: list[Tensor]) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        passes = int(max_over_ranks(training.device)(torch.tensor([len(parts)]))[0])
        for number in range(passes):
            rows = parts[number] if number < len(parts) else torch.zeros(0, dtype=torch.int64)
            for name, tensor in micro_batch.attempt(one, rows).items():
                found.setdefault(name, []).append(tensor)
            if what is not None:
                training.report_progress(what, number + 1, passes)
        if micro_batch.in_vain:
            return {}
        order = torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]).argsort()  # a rank may have no sample
        return {name: torch.cat(tensors)[order] for name, tensors in found.items()}

    return micro_batch.run(count, lengths, all_of)


class Scorer:
    """Fills in a step's trajectories: log-probabilities under the present weights and under the reference policy, the
    divergence of the two, and values where the rollout has none. A collective over the actor's ranks.
    """

    def __init__(self, training: Training) -> None:
        actor, algorithm = training.actor, training.algorithm
        self._policy, self._reference = training.policy, training.reference
        self._algorithm, self._recompute = algorithm, actor.recompute_logprobs
        self.cost: SampleCost | None = None
        self.flops = Flops()
        """Of the last call of :meth:`score`; nothing without :attr:`cost`."""
        self._micro_batch = MicroBatch(
            actor.logprob_micro_batch_size or actor.micro_batch_size,
            *training.policies,
            # A size of its own is meant for the scoring alone.
            max_tokens=None if actor.logprob_micro_batch_size else actor.max_tokens_per_micro_batch,
            key="actor.logprob_micro_batch_size",
        )
        self._training = training
        decoupled = "prox_logp_method" in POLICY_LOSSES[algorithm.loss_type].sections
        self._proximal = decoupled and algorithm.prox_logp_method != "loglinear"
        self._values = ADVANTAGES[algorithm.adv_type].needs_values and training.policy.spec.values_per_chunk > 0
        self._in_reward = self._reference is not None and algorithm.kl_in == "reward"
        self._full = algorithm.kl_penalty_type == "full"

    def passes(self, trajectory: Trajectory) -> bool:
        """Whether :meth:`score` asks a policy anything about it."""
        own, other, _ = self._wanted([trajectory])
        return own or other

    def _wanted(self, trajectories: Sequence[Trajectory]) -> tuple[bool, bool, bool]:
        """Whether the policy is asked, the reference, and the policy for values."""
        values = self._values and any(t.values is None for t in trajectories)
        own = self._recompute or self._proximal or values or (self._in_reward and self._full)
        # In the loss, the exact divergence needs the distribution under the weights of each optimiser step.
        other = self._reference is not None and (self._in_reward or not self._full)
        return own, other, values

    @torch.no_grad()
    def score(
        self, trajectories: Sequence[Trajectory], diagnostics: Diagnostics, *, what: str | None = "scoring"
    ) -> list[Trajectory]:
        """The trajectories with what the algorithm wants to know of them; the same ones if that is nothing.

        Adds ``reference_kl`` (with a penalty in the reward) and ``logprob_gap``, ``logprob_gap_max`` (of the rollout's
        log-probabilities from the recomputed) to ``diagnostics``.
        """
        own, other, values = self._wanted(trajectories)
        self.flops = Flops()
        if not own and not other:
            return list(trajectories)
        flat = [taken_chunks(t) for t in trajectories]
        parts = [replay_inputs_of(t, f) for t, f in zip(trajectories, flat, strict=True)]
        inputs = {key: torch.cat([part.pop(key) for part in parts]) for key in trajectories[0].replay_inputs}
        count = int(sum(f.sum() for f in flat))
        forward = partial(self._forward, own=own, other=other, values=values)

        was_training = self._policy.training
        self._policy.eval()
        lengths = self._policy.sample_lengths(inputs)
        found = forward_in_parts(inputs, count, lengths, forward, self._training, self._micro_batch, what)
        if self.cost is not None:
            each = self.cost.inferred(count, lengths)
            self.flops = each + each if own and other else each
        self._policy.train(was_training)
        sizes = [int(f.sum()) for f in flat]
        parts = {name: tensor.split(sizes) for name, tensor in found.items()}
        return [
            self._filled(t, f, {name: part[i] for name, part in parts.items()}, diagnostics)
            for i, (t, f) in enumerate(zip(trajectories, flat, strict=True))
        ]

    @torch.no_grad()
    def encode(self, batch: TrainBatch) -> TrainBatch:
        """The batch with what the policy's encoders make of pictures in the pictures' place, unless a rank has no
        sample. A collective."""
        count, inputs = len(batch.sample_ids), dict(batch.replay_inputs)
        if max_over_ranks(self._training.device)(torch.tensor([count == 0]).double())[0]:
            return batch

        def forward(micro: dict[str, Tensor]) -> dict[str, Tensor]:
            encoded = self._policy.encoded(micro)
            return {name: tensor for name, tensor in encoded.items() if name.startswith(ENCODED)}

        found = forward_in_parts(inputs, count, None, forward, self._training, self._micro_batch, "encoding")
        return replace(batch, replay_inputs=as_encoded(inputs, {}) | found)

    def _forward(self, micro: dict[str, Tensor], *, own: bool, other: bool, values: bool) -> dict[str, Tensor]:
        """[n,...] each: ``logprobs`` and ``values`` under the present weights, ``reference`` log-probabilities, and
        the exact ``divergence``."""
        exact = self._full and self._in_reward
        temperature = self._algorithm.sampling_params.temperature
        results: dict[str, Tensor] = {}
        mine = theirs = None
        if own:
            mine = self._policy(micro, temperature=temperature, with_distribution=exact)
            results["logprobs"] = mine.logprobs
            if values:
                assert mine.values is not None
                results["values"] = mine.values
        if other:
            assert self._reference is not None
            theirs = self._reference(micro, temperature=temperature, with_distribution=exact)
            results["reference"] = theirs.logprobs
        if exact:
            assert mine is not None and theirs is not None and self._policy.distribution_type is not None
            assert mine.distribution is not None and theirs.distribution is not None
            results["divergence"] = full_kl(self._policy.distribution_type, mine.distribution, theirs.distribution)
        return results

    def _filled(self, t: Trajectory, flat: Tensor, found: dict[str, Tensor], diagnostics: Diagnostics) -> Trajectory:
        def spread(name: str) -> Tensor:
            tensor = torch.zeros(*flat.shape, *found[name].shape[1:])
            tensor[flat] = found[name]
            return tensor

        if "logprobs" in found:
            present = spread("logprobs")
            mask = mask_at_level(t.valid, "token_level", t.logprobs.shape[-1])
            gap = (t.logprobs - present).abs()
            diagnostics.add_mean("logprob_gap", gap, mask)
            diagnostics.add_max("logprob_gap_max", gap, mask)
            t = replace(
                t,
                logprobs=present if self._recompute else t.logprobs,
                proximal_logprobs=present if self._proximal else None,
            )
        if "values" in found and t.values is None:
            # Only a completion comes without values, and nothing follows its last token.
            t = replace(t, values=spread("values"), bootstrap_values=torch.zeros(flat.shape))
        if "reference" in found:
            reference = spread("reference")
            if not self._in_reward:
                return replace(t, reference_logprobs=reference)
            kl = (
                spread("divergence")
                if self._full
                else kl_estimate(t.logprobs, reference, self._algorithm.kl_penalty_type, t.valid[..., None])
            )
            level = self._algorithm.logprob_type
            diagnostics.add_mean(
                "reference_kl", reduce_to_level(kl, t.valid, level), mask_at_level(t.valid, level, kl.shape[-1])
            )
            return replace(t, reference_kl=kl)
        return t
