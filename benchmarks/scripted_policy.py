"""Our side's policy in :mod:`benchmarks.lerobot_race`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lerobot_eval import Script
from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import PolicyOutput, PolicySpec
from embodied_rl.models.mlp import MlpParams, MlpPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedParams(MlpParams):
    """Those of :class:`~benchmarks.lerobot_eval.Script`."""

    file: str
    episodes: int
    steps: int


class Scripted(MlpPolicy):
    """Plays a script instead of what its weights say."""

    Params = ScriptedParams

    def __init__(self, spec: PolicySpec, params: ScriptedParams) -> None:
        super().__init__(spec, params)
        self.script = Script(Path(params.file), params.episodes, params.steps, spec.num_action_chunks)

    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        del greedy, temperature, generator
        actions = self.script.next(obs.state)
        return PolicyOutput(actions=actions, logprobs=torch.zeros_like(actions), values=None, replay_inputs={})
