from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from embodied_rl.contracts import ActionChunk, ChunkResult, ContractError, EnvObs, RolloutStart, TrainBatch, Trajectory

N, C, A, T, B = 2, 3, 2, 4, 5


def obs(**fields: Any) -> EnvObs:
    return EnvObs(
        **{
            "env_ids": torch.arange(N),
            "images": {"wrist": torch.zeros(N, 8, 6, 3, dtype=torch.uint8)},
            "state": torch.zeros(N, 4),
            "instructions": ("a", "b"),
            **fields,
        }
    )


def chunk(**fields: Any) -> ActionChunk:
    return ActionChunk(
        **{
            "env_ids": torch.arange(N),
            "actions": torch.zeros(N, C, A),
            "policy_version": 0,
            **fields,
        }
    )


def start(**fields: Any) -> RolloutStart:
    return RolloutStart(**{"obs": obs(), "group_ids": torch.arange(N)[None], **fields})


def result(**fields: Any) -> ChunkResult:
    flags = {name: torch.zeros(N, C, dtype=torch.bool) for name in ("terminated", "truncated", "valid", "success")}
    rest = {"task_ids": torch.zeros(N, dtype=torch.int64), "next_obs": obs(), "final_obs": None}
    return ChunkResult(**{"rewards": torch.zeros(N, C), **flags, **rest, **fields})


def trajectory(**fields: Any) -> Trajectory:
    flags = {name: torch.zeros(T, N, C, dtype=torch.bool) for name in ("terminated", "truncated", "valid")}
    return Trajectory(
        **{
            "env_ids": torch.arange(N),
            "group_ids": torch.arange(N),
            "rollout_epoch": 0,
            "rewards": torch.zeros(T, N, C),
            "scores": torch.zeros(N),
            **flags,
            "logprobs": torch.zeros(T, N, C, A),
            "values": torch.zeros(T, N, 1),
            "bootstrap_values": torch.zeros(T, N),
            "replay_inputs": {"state": torch.zeros(T, N, 4)},
            "policy_versions": torch.zeros(T, N, dtype=torch.int64),
            **fields,
        }
    )


def batch(**fields: Any) -> TrainBatch:
    """Sample i holds i everywhere."""
    number = torch.arange(B)
    return TrainBatch(
        **{
            "sample_ids": number + 100,
            "replay_inputs": {"state": number[:, None].float().expand(B, 4)},
            "logprobs": number[:, None].float().expand(B, C) + 0.1,
            "advantages": number[:, None].float().expand(B, C) + 0.2,
            "loss_mask": (number % 2 == 0)[:, None].expand(B, C),
            "valid": (number > 2)[:, None].expand(B, C),
            "values": number[:, None].float() + 0.3,
            "returns": number[:, None].float() + 0.4,
            "value_mask": (number < 2)[:, None],
            "policy_version": number + 7,
            "scores": number.float() + 0.5,
            **fields,
        }
    )


CASES: list[tuple[Callable[..., object], str, Any, str]] = [
    (obs, "env_ids", torch.zeros(()), "EnvObs.env_ids: got shape [] torch.float32, expected [*] torch.int64"),
    (obs, "env_ids", torch.arange(3), "EnvObs.state: got shape [2, 4] torch.float32, expected [3, *] torch.float32"),
    (obs, "state", torch.zeros(N), "EnvObs.state: got shape [2] torch.float32, expected [2, *] torch.float32"),
    (obs, "state", torch.zeros(N, 4).double(), "got shape [2, 4] torch.float64, expected [2, *] torch.float32"),
    (obs, "images", {"cam": torch.zeros(N, 8, 8, 3)}, "EnvObs.images['cam']: got shape [2, 8, 8, 3] torch.float32"),
    (
        obs,
        "images",
        {"cam": torch.zeros(N, 3, 8, 8, dtype=torch.uint8)},
        "got shape [2, 3, 8, 8] torch.uint8, expected [2, *, *, 3] torch.uint8",
    ),
    (obs, "instructions", ("a",), "EnvObs.instructions: got 1 texts for 2 envs"),
    (chunk, "env_ids", torch.zeros(N), "ActionChunk.env_ids: got shape [2] torch.float32, expected [*] torch.int64"),
    (chunk, "env_ids", torch.tensor(1), "ActionChunk.env_ids: got shape [] torch.int64, expected [*] torch.int64"),
    (chunk, "actions", torch.zeros(N, A), "ActionChunk.actions: got shape [2, 2] torch.float32, expected [2, *, *]"),
    (chunk, "actions", torch.zeros(3, C, A), "ActionChunk.actions: got shape [3, 3, 2]"),
    (
        start,
        "group_ids",
        torch.arange(3)[None],
        "RolloutStart.group_ids: got shape [1, 3] torch.int64, expected [*, 2]",
    ),
    (result, "episodes", torch.arange(3), "ChunkResult.episodes: got shape [3] torch.int64, expected [2]"),
    (result, "next_obs", None, "ChunkResult.next_obs: got None, expected observations unless the turn is the last"),
    (result, "rewards", torch.zeros(3, C), "ChunkResult.rewards: got shape [3, 3] torch.float32, expected [2, *]"),
    (result, "rewards", torch.zeros(()), "ChunkResult.rewards: got shape [] torch.float32, expected [2, *]"),
    (
        result,
        "valid",
        torch.zeros(N, C),
        "ChunkResult.valid: got shape [2, 3] torch.float32, expected [2, 3] torch.bool",
    ),
    (result, "terminated", torch.zeros(N, 1, dtype=torch.bool), "ChunkResult.terminated: got shape [2, 1] torch.bool"),
    (result, "truncated", torch.zeros(N, 1, dtype=torch.bool), "ChunkResult.truncated: got shape [2, 1] torch.bool"),
    (
        trajectory,
        "rewards",
        torch.zeros(T, N),
        "Trajectory.rewards: got shape [4, 2] torch.float32, expected [*, *, *]",
    ),
    (trajectory, "env_ids", torch.arange(3), "Trajectory.env_ids: got shape [3] torch.int64, expected [2] torch.int64"),
    (trajectory, "group_ids", torch.zeros(N), "Trajectory.group_ids: got shape [2] torch.float32, expected [2]"),
    (trajectory, "valid", torch.ones(T, N, dtype=torch.bool), "Trajectory.valid: got shape [4, 2] torch.bool"),
    (trajectory, "terminated", torch.ones(T, N, C), "Trajectory.terminated: got shape [4, 2, 3] torch.float32"),
    (trajectory, "truncated", torch.ones(T, N, C), "Trajectory.truncated: got shape [4, 2, 3] torch.float32"),
    (trajectory, "logprobs", torch.zeros(T, N, C), "Trajectory.logprobs: got shape [4, 2, 3]"),
    (trajectory, "values", torch.zeros(T, N), "Trajectory.values: got shape [4, 2] torch.float32, expected [4, 2, *]"),
    (trajectory, "bootstrap_values", torch.zeros(T + 1, N), "Trajectory.bootstrap_values: got shape [5, 2]"),
    (trajectory, "replay_inputs", {"x": torch.zeros(T, 3)}, "Trajectory.replay_inputs['x']: got shape [4, 3]"),
    (trajectory, "policy_versions", torch.zeros(T), "Trajectory.policy_versions: got shape [4] torch.float32"),
    (batch, "sample_ids", torch.zeros(B), "TrainBatch.sample_ids: got shape [5] torch.float32, expected [*]"),
    (batch, "logprobs", torch.zeros(3, C), "TrainBatch.logprobs: got shape [3, 3] torch.float32, expected [5, 3]"),
    (batch, "advantages", torch.zeros(B), "TrainBatch.advantages: got shape [5] torch.float32, expected [5, 3]"),
    (batch, "advantages", torch.zeros(B, C).double(), "TrainBatch.advantages: got shape [5, 3] torch.float64"),
    (batch, "loss_mask", torch.ones(B, 1, dtype=torch.bool), "TrainBatch.loss_mask: got shape [5, 1] torch.bool"),
    (batch, "valid", torch.ones(B, dtype=torch.bool), "TrainBatch.valid: got shape [5] torch.bool, expected [5, *]"),
    (batch, "values", torch.zeros(B), "TrainBatch.values: got shape [5] torch.float32, expected [5, *]"),
    (batch, "returns", torch.zeros(B), "TrainBatch.returns: got shape [5] torch.float32, expected [5, *]"),
    (batch, "value_mask", torch.zeros(B, 1), "TrainBatch.value_mask: got shape [5, 1] torch.float32, expected [5, *]"),
    (batch, "policy_version", torch.zeros(B), "TrainBatch.policy_version: got shape [5] torch.float32"),
    (batch, "replay_inputs", {"x": torch.zeros(B + 1)}, "TrainBatch.replay_inputs['x']: got shape [6], expected it to"),
]


@pytest.mark.parametrize("make", [obs, chunk, result, trajectory, batch])
def test_well_formed_messages_pass(make: Callable[[], object]) -> None:
    make()


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    CASES,
    ids=[f"{make.__name__}-{name}-{i}" for i, (make, name, *_) in enumerate(CASES)],
)
def test_a_wrong_field_is_named_with_what_was_got_and_expected(
    make: Callable[..., object], name: str, value: Any, message: str
) -> None:
    with pytest.raises(ContractError, match=re.escape(message)):
        make(**{name: value})


def test_optional_fields_may_be_none() -> None:
    start(group_ids=None)
    result(next_obs=None, last=True)
    trajectory(values=None, bootstrap_values=None)
    batch(values=None, returns=None, value_mask=None)


def test_select_takes_every_field_in_the_order_asked_for() -> None:
    got = batch().select(torch.tensor([4, 0, 3]))
    assert got.sample_ids.tolist() == [104, 100, 103]
    assert got.replay_inputs["state"][:, 0].tolist() == [4, 0, 3]
    assert got.logprobs[:, 0].tolist() == pytest.approx([4.1, 0.1, 3.1])
    assert got.advantages[:, 0].tolist() == pytest.approx([4.2, 0.2, 3.2])
    assert got.loss_mask[:, 0].tolist() == [True, True, False]
    assert got.valid[:, 0].tolist() == [True, False, True]
    assert got.values is not None
    assert got.returns is not None
    assert got.value_mask is not None
    assert got.values[:, 0].tolist() == pytest.approx([4.3, 0.3, 3.3])
    assert got.returns[:, 0].tolist() == pytest.approx([4.4, 0.4, 3.4])
    assert got.value_mask[:, 0].tolist() == [False, True, False]
    assert got.policy_version.tolist() == [11, 7, 10]


def test_select_without_a_value_head() -> None:
    got = batch(values=None, returns=None, value_mask=None).select(torch.tensor([1]))
    assert (got.values, got.returns, got.value_mask) == (None, None, None)
    assert len(got) == 1
