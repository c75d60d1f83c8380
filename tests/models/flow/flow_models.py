"""Small policies that denoise actions, and what they see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import PolicyOutput, PolicySpec
from embodied_rl.models.flow.policy import FlowPolicy
from embodied_rl.models.pi0 import Pi0Policy
from embodied_rl.models.pi05 import Pi05Policy
from embodied_rl.models.registry import build_policy
from embodied_rl.models.smolvla import SmolVlaPolicy

N, C, A, S = 4, 3, 7, 8
POLICIES: dict[str, type[Pi0Policy] | type[SmolVlaPolicy]] = {
    "pi0": Pi0Policy,
    "pi05": Pi05Policy,
    "smolvla": SmolVlaPolicy,
}
SIZES = {"agentview": (40, 32), "wrist": (32, 32)}
TEXTS = ("open the drawer", "put the black bowl in the bottom drawer of the cabinet and close it")


def flow_spec(values: int = 1, chunks: int = C) -> PolicySpec:
    return PolicySpec(action_dim=A, num_action_chunks=chunks, state_dim=S, image_shapes=SIZES, values_per_chunk=values)


def flow_policy(model: str, path: Path, *, values: int = 1, seed: int = 0, **params: Any) -> FlowPolicy:
    """With weights large enough to matter, and three denoising steps."""
    torch.manual_seed(seed)
    policy = build_policy(model, flow_spec(values), {"num_steps": 3, **params}, str(path))
    assert isinstance(policy, FlowPolicy)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def look(n: int = N, seed: int = 0) -> EnvObs:
    generator = torch.Generator().manual_seed(seed)
    return EnvObs(
        env_ids=torch.arange(n),
        images={
            name: torch.randint(0, 256, (n, *size, 3), dtype=torch.uint8, generator=generator)
            for name, size in SIZES.items()
        },
        state=torch.randn(n, S, generator=generator),
        instructions=tuple(TEXTS[i % 2] for i in range(n)),
    )


def rows(obs: EnvObs, which: slice) -> EnvObs:
    return EnvObs(
        env_ids=obs.env_ids[which],
        images={name: image[which] for name, image in obs.images.items()},
        state=obs.state[which],
        instructions=obs.instructions[which],
    )


def decide(
    policy: FlowPolicy, obs: EnvObs, *, seed: int = 0, greedy: bool = False, temperature: float = 1.0
) -> PolicyOutput:
    return policy.act(obs, greedy=greedy, temperature=temperature, generator=torch.Generator().manual_seed(seed))
