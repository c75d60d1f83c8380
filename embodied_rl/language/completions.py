"""From completions to the trajectory that the actor trains on: a completion is one chunk of token actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from embodied_rl.contracts import Trajectory
from embodied_rl.language.engines.base import Completion


def completion_trajectory(
    *,
    group_ids: Sequence[int],
    sample_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    scores: Sequence[float | None],
    penalties: Sequence[float],
    max_prompt_length: int,
    max_new_tokens: int,
    pad_token_id: int,
    policy_version: int,
) -> Trajectory:
    """T=1, C=``max_new_tokens``, A=1.

    Score and penalty together are the last token's reward, and ``valid`` goes up to that token. A completion without a
    score (None) is valid nowhere: it is neither trained on nor compared with.

    Args:
        group_ids: N, the prompt's number in the training step.
        sample_ids: N, the completion's number in the training step.
        prompts: N, token ids.
        completions: N, one to ``max_new_tokens`` tokens each.
        scores: N, what the reward function says.
        penalties: N, what training adds to that, 0 or less.
    """
    n, c = len(completions), max_new_tokens
    prompt_ids = torch.full((n, max_prompt_length), pad_token_id)
    response_ids = torch.full((n, c), pad_token_id)
    logprobs, rewards, known = torch.zeros(n, c), torch.zeros(n, c), torch.full((n,), torch.nan)
    valid, terminated, truncated = (torch.zeros(n, c, dtype=torch.bool) for _ in range(3))
    outcomes = zip(prompts, completions, scores, penalties, strict=True)
    for row, (prompt, completion, score, penalty) in enumerate(outcomes):
        length = len(completion.token_ids)
        prompt_ids[row, max_prompt_length - len(prompt) :] = torch.tensor(prompt)
        response_ids[row, :length] = torch.tensor(completion.token_ids)
        logprobs[row, :length] = torch.tensor(completion.logprobs)
        if score is None:
            continue
        known[row] = score
        rewards[row, length - 1] = score + penalty
        valid[row, :length] = True
        ends = terminated if completion.finish_reason == "stop" else truncated
        ends[row, length - 1] = True
    return Trajectory(
        env_ids=torch.tensor(sample_ids),
        group_ids=torch.tensor(group_ids),
        rollout_epoch=0,
        rewards=rewards[None],
        scores=known,
        terminated=terminated[None],
        truncated=truncated[None],
        valid=valid[None],
        logprobs=logprobs[None, ..., None],
        values=None,
        bootstrap_values=None,
        replay_inputs={
            "prompt_ids": prompt_ids[None],
            "prompt_lengths": torch.tensor([[len(prompt) for prompt in prompts]]),
            "response_ids": response_ids[None],
            "response_lengths": torch.tensor([[len(completion.token_ids) for completion in completions]]),
        },
        policy_versions=torch.tensor([policy_version]),
        tokens=response_ids[None, ..., None],
    )
