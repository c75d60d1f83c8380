"""The trajectory of completions that the actor trains on: a completion is one chunk of token actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from embodied_rl.contracts import Trajectory
from embodied_rl.language.engines.base import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion with its score."""

    group_id: int
    """The prompt's number in the training step."""
    sample_id: int
    """The completion's number in the training step."""
    prompt: Sequence[int]
    """Token ids."""
    completion: Completion
    score: float | None
    """The reward function's. None: unverified."""
    penalty: float = 0.0
    """Training's addend to the score, 0 or less."""


def completion_trajectory(
    samples: Sequence[Sample], *, max_prompt_length: int, max_new_tokens: int, pad_token_id: int, policy_version: int
) -> Trajectory:
    """T=1, N samples of one to ``max_new_tokens`` tokens, C=``max_new_tokens``, A=1.

    Score and penalty together are the last token's reward, and ``valid`` goes up to that token. A completion without a
    score is valid nowhere: it is neither trained on nor compared with.
    """
    n, c = len(samples), max_new_tokens
    prompt_ids = torch.full((n, max_prompt_length), pad_token_id)
    response_ids = torch.full((n, c), pad_token_id)
    logprobs, rewards, scores = torch.zeros(n, c), torch.zeros(n, c), torch.full((n,), torch.nan)
    valid, terminated, truncated = (torch.zeros(n, c, dtype=torch.bool) for _ in range(3))
    for row, sample in enumerate(samples):
        completion, length = sample.completion, len(sample.completion.token_ids)
        prompt_ids[row, max_prompt_length - len(sample.prompt) :] = torch.tensor(sample.prompt)
        response_ids[row, :length] = torch.tensor(completion.token_ids)
        logprobs[row, :length] = torch.tensor(completion.logprobs)
        if sample.score is None:
            continue
        scores[row] = sample.score
        rewards[row, length - 1] = sample.score + sample.penalty
        valid[row, :length] = True
        ends = terminated if completion.finish_reason == "stop" else truncated
        ends[row, length - 1] = True
    return Trajectory(
        env_ids=torch.tensor([sample.sample_id for sample in samples]),
        group_ids=torch.tensor([sample.group_id for sample in samples]),
        rollout_epoch=0,
        rewards=rewards[None],
        scores=scores,
        terminated=terminated[None],
        truncated=truncated[None],
        valid=valid[None],
        logprobs=logprobs[None, ..., None],
        values=None,
        bootstrap_values=None,
        replay_inputs={
            "prompt_ids": prompt_ids[None],
            "prompt_lengths": torch.tensor([[len(sample.prompt) for sample in samples]]),
            "response_ids": response_ids[None],
            "response_lengths": torch.tensor([[len(sample.completion.token_ids) for sample in samples]]),
        },
        policy_versions=torch.full((1, len(samples)), policy_version),
        tokens=response_ids[None, ..., None],
    )
