"""Small language models and samples for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodied_rl.models.base import PolicySpec
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.models.registry import build_policy

SMALL = {"type": "qwen2", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "max_length": 64}


def language_spec(max_new_tokens: int = 8, values_per_chunk: int = 0) -> PolicySpec:
    return PolicySpec(
        action_dim=1,
        num_action_chunks=max_new_tokens,
        state_dim=0,
        image_shapes={},
        values_per_chunk=values_per_chunk,
    )


def language_policy(spec: PolicySpec | None = None, *, family: str = "qwen2", seed: int = 0) -> CausalLMPolicy:
    """A fresh model whose every weight is large enough to matter."""
    torch.manual_seed(seed)
    policy = build_policy("causal_lm", spec or language_spec(), {"architecture": {**SMALL, "type": family}})
    assert isinstance(policy, CausalLMPolicy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return policy.eval()


def replay_inputs(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    max_prompt: int,
    max_response: int,
    pad: int,
) -> dict[str, Tensor]:
    """Padded as the trajectory's are."""
    rows = len(prompts)
    prompt_ids, response_ids = torch.full((rows, max_prompt), pad), torch.full((rows, max_response), pad)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        prompt_ids[row, max_prompt - len(prompt) :] = torch.tensor(prompt)
        response_ids[row, : len(response)] = torch.tensor(response)
    return {
        "prompt_ids": prompt_ids,
        "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
        "response_ids": response_ids,
        "response_lengths": torch.tensor([len(response) for response in responses]),
    }
