"""A policy of one's own: a Gaussian whose mean is linear in the state. Run: python examples/own_policy.py"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributions import Normal

import embodied_rl as er
from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import Evaluation, Policy, PolicyOutput, PolicySpec


@dataclass(frozen=True, kw_only=True)
class LinearParams:
    spread: Annotated[float, Field(gt=0)] = 0.5
    """Standard deviation of the actions at temperature 1."""


class LinearPolicy(Policy):
    Params = LinearParams

    def __init__(self, spec: PolicySpec, params: LinearParams) -> None:
        super().__init__()
        self.spec, self.params = spec, params
        self.mean = nn.Linear(spec.state_dim, spec.num_action_chunks * spec.action_dim)
        self.value_head = nn.Linear(spec.state_dim, spec.values_per_chunk) if spec.values_per_chunk else None

    @torch.no_grad()
    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        normal = self._normal(obs.state, temperature)
        noise = torch.randn(normal.mean.shape, generator=generator, device=normal.mean.device)
        sample = normal.mean if greedy else normal.mean + normal.stddev * noise
        return PolicyOutput(
            actions=sample.clamp(-1, 1),
            logprobs=normal.log_prob(sample),
            values=self.values(obs) if self.value_head else None,
            replay_inputs={"state": obs.state, "sample": sample},
        )

    @torch.no_grad()
    def values(self, obs: EnvObs) -> Tensor:
        assert self.value_head is not None
        return self.value_head(obs.state.to(self.mean.weight.device))

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        state, sample = replay_inputs["state"], replay_inputs["sample"]
        normal = self._normal(state, temperature)
        values = self.value_head(state) if self.value_head else None
        return Evaluation(logprobs=normal.log_prob(sample), entropy=normal.entropy(), values=values)

    def _normal(self, state: Tensor, temperature: float) -> Normal:
        shape = (self.spec.num_action_chunks, self.spec.action_dim)
        mean = self.mean(state.to(self.mean.weight.device)).unflatten(-1, shape)
        return Normal(mean, self.params.spread * temperature)


if __name__ == "__main__":  # the run loads this file for LinearPolicy
    run = er.train(
        "env=dummy",
        "model=mlp",
        f"model.model_type={__file__}:LinearPolicy",
        "algorithm=grpo",
        "actor.optim.lr=0.02",
        "runner.max_steps=20",
        "runner.val_before_train=true",
        "env.eval.video_cfg.save_video=false",
        "runner.report=false",
        "cluster=serial",
    )
    print(f"success: {run.evaluations[0].rate:.0%} before training, {run.success:.0%} after")
