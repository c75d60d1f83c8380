"""Updates of soft actor-critic: critics, policy and temperature on batches that are drawn from a buffer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from embodied_rl.algorithms.soft_q import critic_loss, policy_loss, soft_targets, temperature_loss
from embodied_rl.models.base import Policy
from embodied_rl.schema import OptimConfig, SacConfig
from embodied_rl.seeding import derived_seed, generator
from embodied_rl.training.optimizer import build_optimizer, set_learning_rates
from embodied_rl.training.replay import Transitions
from embodied_rl.training.sharding import is_distributed
from embodied_rl.training.soft_critics import SoftCritics

_NOISE, _TARGETS, _DROPOUT = 1, 2, 3
"""Draws of an update, beside its batch."""


def build_critics_optimizer(critics: SoftCritics, config: SacConfig, optim: OptimConfig) -> Optimizer:
    """That of the critics and, at a rate of its own, of the temperature."""
    return build_optimizer(critics, replace(optim, value_lr=config.temperature_lr))


class SacUpdater:
    """Trains a policy through critics of its actions.

    Every random number follows from the seed and the number of the update, counted from the run's first.

    Args:
        draw: (number of an update) -> its batch.
        optim: the policy's and the critics' optimiser: limits of gradients.
    """

    def __init__(
        self,
        policy: Policy,
        critics: SoftCritics,
        optimizers: tuple[Optimizer, Optimizer],
        config: SacConfig,
        *,
        optim: tuple[OptimConfig, OptimConfig],
        draw: Callable[[int], Transitions],
        seed: int,
        device: str,
        report_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        self._policy, self._critics, self._optimizers = policy, critics, optimizers
        self._config, self._optim, self._draw = config, optim, draw
        self._seed, self._device, self._report_progress = seed, device, report_progress
        self._target_entropy = config.target_entropy * math.prod(policy.decision_shape)

    def run(
        self, updates: range, *, learning_rate_factor: float = 1.0, critics_alone: bool = False
    ) -> dict[str, float]:
        """Make the updates of these numbers; returns the means of what they show.

        Args:
            critics_alone: the policy and the temperature stay as they are.

        Raises:
            FloatingPointError: a gradient is not finite, and ``skip_nonfinite`` is false.
        """
        for optimizer in self._optimizers:
            set_learning_rates(optimizer, learning_rate_factor)
        found: defaultdict[str, list[Tensor]] = defaultdict(list)
        for done, number in enumerate(updates):
            for name, value in self._update(number, critics_alone).items():
                found[name].append(value)
            self._report_progress("update", done + 1, len(updates))
        metrics = {name: torch.stack(values).double().nanmean().item() for name, values in found.items()}
        metrics["updates"], metrics["temperature"] = float(len(updates)), self._critics.temperature.item()
        for name in ("nonfinite_steps", "critic_nonfinite_steps"):
            if name in found:
                metrics[name] = torch.stack(found[name]).sum().item()
        return metrics

    def _update(self, number: int, critics_alone: bool) -> dict[str, Tensor]:
        torch.manual_seed(derived_seed(self._seed, number, _DROPOUT, bits=32))
        batch = self._draw(number).to(self._device)
        noise = torch.Generator(self._device).manual_seed(derived_seed(self._seed, number, _NOISE))
        features = self._policy.features(batch.inputs).detach()
        found = self._train_critics(batch, features, number, noise)
        if not critics_alone and (number + 1) % self._config.policy_interval == 0:
            found |= self._train_policy(batch, features, noise)
        self._critics.follow()
        return found

    def _train_critics(
        self, batch: Transitions, features: Tensor, number: int, noise: torch.Generator
    ) -> dict[str, Tensor]:
        config, critics = self._config, self._critics
        with torch.no_grad():
            actions, logprobs = self._policy.rsample(batch.next_inputs, generator=noise)
            values = critics.target(self._policy.features(batch.next_inputs), actions)
            if config.target_critics < config.num_critics:
                rng = generator(self._seed, number, _TARGETS)
                values = values[rng.choice(config.num_critics, config.target_critics, replace=False)]
            targets = soft_targets(
                batch.rewards,
                batch.discounts,
                values,
                logprobs.sum((1, 2)) if config.backup_entropy else None,
                temperature=critics.temperature,
            )
        q = critics.online(features, self._policy.decisions(batch.inputs, batch.actions))
        loss = critic_loss(q, targets)
        self._optimizers[1].zero_grad(set_to_none=True)
        loss.backward()
        norm = self._step(1, critics.online.parameters())
        found = {"critic_loss": loss.detach() / len(q), "q_mean": q.detach().mean()}
        if len(q) > 1:
            found["q_std"] = q.detach().std(0).mean()
        return found | norm

    def _train_policy(self, batch: Transitions, features: Tensor, noise: torch.Generator) -> dict[str, Tensor]:
        critics, config = self._critics, self._config
        actions, logprobs = self._policy.rsample(batch.inputs, generator=noise)
        logprobs = logprobs.sum((1, 2))
        critics.online.requires_grad_(False)
        loss = policy_loss(
            critics.online(features, actions),
            logprobs,
            actions,
            temperature=critics.temperature,
            of=config.policy_q,
            penalty=config.decision_penalty,
        )
        self._optimizers[0].zero_grad(set_to_none=True)
        loss.backward()
        critics.online.requires_grad_(True)
        norm = self._step(0, self._policy.parameters())
        if config.temperature_lr is not None and torch.isfinite(norm["grad_norm"]):
            self._train_temperature(logprobs)
        return {"policy_loss": loss.detach(), "entropy": -logprobs.detach().mean()} | norm

    def _train_temperature(self, logprobs: Tensor) -> None:
        """A step from the policy's own draws; none where they give no number, which moments would never lose again."""
        log_temperature, optimizer = self._critics.log_temperature, self._optimizers[1]
        optimizer.zero_grad(set_to_none=True)
        temperature_loss(log_temperature, logprobs, target_entropy=self._target_entropy).backward()
        assert log_temperature.grad is not None
        if torch.isfinite(log_temperature.grad):
            optimizer.step()

    def _step(self, which: int, parameters: Iterable[torch.nn.Parameter]) -> dict[str, Tensor]:
        """A step of the policy's optimiser (0) or the critics' (1); returns its gradient's norm before clipping,
        NaN where the step was left out."""
        optim, optimizer = self._optim[which], self._optimizers[which]
        limit = math.inf if optim.clip_grad is None else optim.clip_grad
        norm = torch.nn.utils.clip_grad_norm_([p for p in parameters if p.requires_grad], limit)
        norm = norm.full_tensor() if is_distributed(norm) else norm
        finite, prefix = bool(torch.isfinite(norm)), ("", "critic_")[which]
        if finite:
            optimizer.step()
        elif not optim.skip_nonfinite:
            section = ("actor", "critic")[which]
            raise FloatingPointError(
                f"the norm of the gradient of the {('policy', 'critics')[which]} is {norm.item()}, the weights are "
                f"those before it. Lower {section}.optim.lr, or look into what gave these numbers; "
                f"{section}.optim.skip_nonfinite=true goes on without such steps"
            )
        found = {f"{prefix}grad_norm": norm if finite else torch.full_like(norm, math.nan)}
        return found | ({f"{prefix}nonfinite_steps": torch.tensor(float(not finite))} if optim.skip_nonfinite else {})
