"""Demonstrations' part in the loss of each optimiser step, which keeps training to what was shown."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.contracts import EnvObs
from embodied_rl.seeding import derived_seed, generator
from embodied_rl.training.scoring import Training
from embodied_rl.training.sharding import sum_over_ranks


class Frames(Protocol):
    """Recorded frames, such as ``demonstrations.dataset.Demonstrations``."""

    def __len__(self) -> int: ...

    def sample(self, frames: Tensor) -> tuple[EnvObs, Tensor, Tensor]:
        """Observations, the next C actions [N,C,A] and which of these there were [N,C], at N frames ([N] int64)."""
        ...


class Demonstrated:
    """``bc_coef`` times the mean of -log π over the actions of frames drawn for an optimiser step.

    Frames and the loss's own draws follow from seed, training step and optimiser step; each rank takes its share.
    """

    def __init__(self, training: Training, frames: Frames, *, rank: int, world_size: int) -> None:
        algorithm, actor = training.algorithm, training.actor
        self._policy, self._device, self._frames = training.policy, training.device, frames
        self._coefficient, self._batch_size = algorithm.bc_coef, algorithm.bc_batch_size
        self._at_once = None if actor.micro_batch_size == "auto" else actor.micro_batch_size
        self._seed, self._rank, self._world_size = actor.seed, rank, world_size
        self._sum = sum_over_ranks(training.device)

    def backward(self, *, step: int, number: int, scale: float, diagnostics: Diagnostics) -> int:
        """Add the term's gradient, times ``scale``, to the parameters'; returns the number of this rank's frames. A
        collective over the actor's ranks.

        Args:
            number: the optimiser step, within training step ``step``.
        """
        drawn = generator(self._seed, step, number, 1).integers(len(self._frames), size=self._batch_size)
        own = torch.from_numpy(drawn[self._rank :: self._world_size])
        obs, actions, valid = self._frames.sample(own)
        draws = torch.Generator(self._device).manual_seed(derived_seed(self._seed, step, number, 2, self._rank))
        to = partial(torch.Tensor.to, device=self._device)
        with torch.no_grad():
            inputs = self._policy.demonstration(_moved(obs, self._device), to(actions), draws)
        mask = to(valid).unsqueeze(-1).expand(actions.shape)
        [count] = self._sum(mask.sum().double().reshape(1)).tolist()
        for rows in torch.arange(len(own)).split(self._at_once or len(own)):
            micro = {key: tensor[rows.to(tensor.device)] for key, tensor in inputs.items()}
            units = -self._policy(micro, temperature=1.0).logprobs
            diagnostics.add_mean("bc_loss", units, mask[rows])
            loss = torch.where(mask[rows], units, 0.0).sum() / count
            (self._coefficient * scale * loss).backward()
        return len(own)


def _moved(obs: EnvObs, device: str) -> EnvObs:
    return EnvObs(
        env_ids=obs.env_ids,
        images={camera: image.to(device) for camera, image in obs.images.items()},
        state=obs.state.to(device),
        instructions=obs.instructions,
    )
