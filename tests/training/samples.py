"""Every kind of model with recorded decisions to evaluate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import build_policy
from tests.models.causal_lm.language import language_policy, language_spec, replay_inputs

MODELS = ("mlp", "tiny_vla", "causal_lm")
C, A, S = 3, 2, 4


def model(name: str, seed: int = 0) -> Policy:
    """With a value head, and weights large enough to matter."""
    if name == "causal_lm":
        return language_policy(language_spec(6, values_per_chunk=6), seed=seed)
    torch.manual_seed(seed)
    images = {"agentview": (32, 32)} if name == "tiny_vla" else {}
    spec = PolicySpec(action_dim=A, num_action_chunks=C, state_dim=S, image_shapes=images, values_per_chunk=1)
    policy = build_policy(name, spec, {"hidden_size": 32, "num_layers": 2})
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def decisions(name: str, count: int = 4) -> Mapping[str, Tensor]:
    """``replay_inputs`` of what the model decides, or of given completions."""
    generator = torch.Generator().manual_seed(5)
    if name == "causal_lm":
        lengths = [(2 + n % 3, 3 + n % 4) for n in range(count)]
        prompts = [torch.randint(0, 40, (p,), generator=generator).tolist() for p, _ in lengths]
        responses = [torch.randint(0, 40, (r,), generator=generator).tolist() for _, r in lengths]
        return replay_inputs(prompts, responses, max_prompt=5, max_response=6, pad=0)
    image = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=generator)
    obs = EnvObs(
        env_ids=torch.arange(count),
        images={"agentview": image} if name == "tiny_vla" else {},
        state=torch.randn(count, S, generator=generator),
        instructions=("open the drawer",) * count,
    )
    return model(name).act(obs, greedy=False, temperature=1.0, generator=generator).replay_inputs
