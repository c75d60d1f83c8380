"""The trajectory of completions: every number where it belongs."""

from __future__ import annotations

import torch

from embodied_rl.language.completions import Sample, completion_trajectory
from embodied_rl.language.engines.base import Completion
from embodied_rl.workers.trajectory import split_by_rank

ENDED = Completion(token_ids=(31, 32, 1), logprobs=(-0.1, -0.2, -0.3), finish_reason="stop")
CUT = Completion(token_ids=(41, 42, 43, 44), logprobs=(-1.1, -1.2, -1.3, -1.4), finish_reason="length")
SHORT = Completion(token_ids=(1,), logprobs=(-2.0,), finish_reason="stop")


def trajectory():
    return completion_trajectory(
        [
            Sample(group_id=5, sample_id=10, prompt=(21, 22), completion=ENDED, score=0.25),
            Sample(group_id=5, sample_id=11, prompt=(21, 22), completion=CUT, score=0.5, penalty=-0.125),
            Sample(group_id=6, sample_id=12, prompt=(23, 24, 25), completion=SHORT, score=None, penalty=-1.0),
        ],
        max_prompt_length=4,
        max_new_tokens=4,
        pad_token_id=9,
        policy_version=7,
    )


def test_everything_is_where_it_belongs() -> None:
    t = trajectory()
    assert t.env_ids.tolist() == [10, 11, 12]
    assert t.group_ids.tolist() == [5, 5, 6]
    assert t.policy_versions.tolist() == [[7, 7, 7]]
    assert t.rewards.tolist() == [[[0, 0, 0.25, 0], [0, 0, 0, 0.375], [0, 0, 0, 0]]]
    assert t.scores[:2].tolist() == [0.25, 0.5]
    assert t.scores[2].isnan()
    assert t.valid.int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]]
    assert t.terminated.int().tolist() == [[[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]]
    assert t.truncated.int().tolist() == [[[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]]
    expected = torch.tensor([[-0.1, -0.2, -0.3, 0], [-1.1, -1.2, -1.3, -1.4], [-2.0, 0, 0, 0]])
    assert torch.equal(t.logprobs, expected[None, ..., None])
    inputs = t.replay_inputs
    assert inputs["prompt_ids"].tolist() == [[[9, 9, 21, 22], [9, 9, 21, 22], [9, 23, 24, 25]]]
    assert inputs["prompt_lengths"].tolist() == [[2, 2, 3]]
    assert inputs["response_ids"].tolist() == [[[31, 32, 1, 9], [41, 42, 43, 44], [1, 9, 9, 9]]]
    assert inputs["response_lengths"].tolist() == [[3, 4, 1]]
    assert t.tokens is not None
    assert t.tokens[..., 0].equal(inputs["response_ids"])
    assert t.values is None
    assert t.bootstrap_values is None


def test_groups_go_whole_to_a_rank() -> None:
    even, odd = split_by_rank(trajectory(), 2)
    assert even is not None
    assert odd is not None
    assert odd.env_ids.tolist() == [10, 11]
    assert even.env_ids.tolist() == [12]
    assert even.replay_inputs["prompt_lengths"].tolist() == [[3]]
