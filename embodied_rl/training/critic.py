"""A critic of its own (``critic.enable``): a network beside the policy that values trajectories, and its training."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from embodied_rl.contracts import TrainBatch, Trajectory
from embodied_rl.models.base import Policy, require_values
from embodied_rl.models.weights.host import require_accelerator
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.schema import CriticConfig
from embodied_rl.training.batch import taken_chunks
from embodied_rl.training.micro_batch import MicroBatch
from embodied_rl.training.objective import ValueObjective
from embodied_rl.training.optimizer import build_optimizer, set_learning_rates
from embodied_rl.training.scoring import Training, forward_in_parts
from embodied_rl.training.sharding import TrainingState
from embodied_rl.training.update import Updater


class Critic:
    """A network of the policy's class with a value head. It reads what the policy recorded of its decisions, and no
    gradient passes between the two.

    Args:
        model: the network, sharded.
        training: that of the policy; micro-batches, epochs and mini-batches are the same, if ``config`` does not say.
    """

    def __init__(self, model: Policy, config: CriticConfig, training: Training, timer: PhaseTimer) -> None:
        actor, algorithm = training.actor, training.algorithm
        if config.micro_batch_size is not None:
            # A size of its own is meant instead of the tokens, too.
            actor = replace(actor, micro_batch_size=config.micro_batch_size, max_tokens_per_micro_batch=None)
        self.model, self.optimizer = model, build_optimizer(model, config.optim)
        self._lr = config.optim.lr
        self._timer, self._temperature = timer, algorithm.sampling_params.temperature
        self._training = replace(
            training,
            policy=model,
            reference=None,
            actor=replace(actor, optim=config.optim, skip_zero_advantages=False),
            # It does not move the policy, so there is no ratio to stop at, and nobody to leave alone.
            algorithm=replace(algorithm, early_stop_imp_ratio=None, critic_warmup_steps=0),
            section="critic",
        )
        self._micro_batch = MicroBatch(
            actor.micro_batch_size,
            model,
            max_tokens=actor.max_tokens_per_micro_batch,
            key="critic.micro_batch_size",
        )
        self._updater = Updater(self._training, self.optimizer, objective=ValueObjective(self._training))
        self._state: TrainingState | None = None
        if config.enable_offload:
            require_accelerator("critic.enable_offload", training.device)
            self._state = TrainingState([model], self.optimizer, training.device, config.offload)
            self._state.leave_device()

    @torch.no_grad()
    def value(self, trajectories: Sequence[Trajectory], *, what: str | None = "values") -> list[Trajectory]:
        """The trajectories with ``values`` and ``bootstrap_values`` under its present weights, 0 where nobody asks for
        them. A collective over the actor's ranks.

        Args:
            what: as of :func:`forward_in_parts`.
        """
        asked = [_asked(t) for t in trajectories]
        inputs = {
            key: torch.cat([_states(t, key, *a) for t, a in zip(trajectories, asked, strict=True)])
            for key in trajectories[0].replay_inputs
        }

        def forward(micro: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"values": require_values(self.model(micro, temperature=self._temperature).values)}

        self.model.eval()
        counts = [int(chunks.sum() + unacted.sum()) for chunks, unacted in asked]
        with self._on_device():
            lengths = self.model.sample_lengths(inputs)
            found = forward_in_parts(inputs, sum(counts), lengths, forward, self._training, self._micro_batch, what)
        parts = found["values"].split(counts)
        return [_valued(t, *a, part) for t, a, part in zip(trajectories, asked, parts, strict=True)]

    def train(self, batch: TrainBatch, *, step: int, learning_rate_factor: float) -> dict[str, float]:
        """Optimise on ``batch``, and return diagnostics, equal on all ranks.

        Raises:
            FloatingPointError: as :meth:`Updater.run`.
        """
        set_learning_rates(self.optimizer, learning_rate_factor)
        self.model.train()
        with self._on_device():
            metrics = self._updater.run(batch, step=step)
        shared = ("value_", "samples")
        own = {name if name.startswith(shared) else f"critic_{name}": number for name, number in metrics.items()}
        return own | {"critic_learning_rate": self._lr * learning_rate_factor}

    def leave_device(self) -> None:
        """Offload again, after a checkpoint was read."""
        if self._state is not None:
            self._state.leave_device()

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        return self._state.on_device(self._timer) if self._state else contextlib.nullcontext()


def _asked(t: Trajectory) -> tuple[Tensor, Tensor]:
    """The states whose values are asked for: [T,N] bool, those that chunks begin with, and [K,N] bool, those of
    ``unacted_inputs``: where something was done, and where that led to unless the episode terminated."""
    chunks = taken_chunks(t)
    rows = t.unacted_rows
    if rows is None or t.unacted_inputs is None:
        # A completion; nothing follows its last token.
        return chunks, torch.zeros(0, chunks.shape[1], dtype=torch.bool)
    goes_on = chunks & ~(t.terminated & t.valid).any(-1)
    unacted = torch.zeros(len(next(iter(t.unacted_inputs.values()))), chunks.shape[1], dtype=torch.bool)
    chunk, member = (goes_on & (rows >= 0)).nonzero(as_tuple=True)
    unacted[rows[chunk, member], member] = True
    chunks[1:] |= (goes_on & (rows < 0))[:-1]
    return chunks, unacted


def _states(t: Trajectory, key: str, chunks: Tensor, unacted: Tensor) -> Tensor:
    acted = t.replay_inputs[key][chunks]
    return acted if t.unacted_inputs is None else torch.cat([acted, t.unacted_inputs[key][unacted]])


def _valued(t: Trajectory, chunks: Tensor, unacted: Tensor, found: Tensor) -> Trajectory:
    """The trajectory with its values; ``found`` ([count,V]) are those of ``chunks``, then of ``unacted``."""
    values = torch.zeros(*chunks.shape, found.shape[1])
    values[chunks] = found[: int(chunks.sum())]
    following = torch.zeros(chunks.shape)
    following[:-1] = values[1:, :, 0]
    if t.unacted_rows is not None:
        last = torch.zeros(unacted.shape)
        last[unacted] = found[int(chunks.sum()) :, 0]
        of_row = last.gather(0, t.unacted_rows.clamp(min=0))
        following = torch.where(t.unacted_rows < 0, following, of_row)
    return replace(t, values=values, bootstrap_values=following)
