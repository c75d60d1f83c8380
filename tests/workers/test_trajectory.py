from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.contracts import ChunkResult, EnvObs, RolloutStart, Trajectory
from embodied_rl.models.base import PolicyOutput
from embodied_rl.workers.trajectory import TrajectoryBuilder, split_by_rank

N, C, A = 3, 2, 2
ENV_IDS = torch.tensor([6, 7, 8])


def numbered(t: int, *sizes: int) -> Tensor:
    """[N, *sizes] with 100 t + 10 n + c, and the last axis, if there is a third, in tenths."""
    values = 100.0 * t + 10.0 * torch.arange(N)
    for size, unit in zip(sizes, (1.0, 0.1), strict=False):
        values = values.unsqueeze(-1) + unit * torch.arange(size)
    return values


def decision(t: int, **fields: Any) -> PolicyOutput:
    return PolicyOutput(
        **{
            "actions": torch.zeros(N, C, A),
            "logprobs": -numbered(t, C, A),
            "values": numbered(t, 1) + 0.5,
            "replay_inputs": {"state": numbered(t, 4)},
            **fields,
        }
    )


def observation(env_ids: Tensor = ENV_IDS) -> EnvObs:
    n = len(env_ids)
    return EnvObs(env_ids=env_ids, images={}, state=torch.zeros(n, 4), instructions=("",) * n)


def result(t: int, *, ended: Tensor | None = None, last: bool = False) -> ChunkResult:
    step = torch.arange(N * C).view(N, C)
    return ChunkResult(
        rewards=numbered(t, C),
        terminated=step == t,
        truncated=step == t + 1,
        valid=step != t + 2,
        task_ids=torch.tensor([3, 1, t]),
        success=step == 2 * t,  # of env 0 in chunk 0, of env 1 in chunk 1, of env 2 in chunk 2
        next_obs=observation(),
        final_obs=None if ended is None else observation(ended),
        last=last,
    )


def builder(*, with_unacted: bool = False) -> TrajectoryBuilder:
    start = RolloutStart(obs=observation(), group_ids=torch.tensor([[30, 30, 31]]), rollout_epoch=5)
    return TrajectoryBuilder(start, with_unacted=with_unacted)


def built(building: TrajectoryBuilder) -> Trajectory:
    """Its only epoch, which it gives once."""
    [trajectory] = building.complete()
    assert building.complete() == []
    return trajectory


def recorded(num_chunks: int = 4, *, values: bool = True) -> Trajectory:
    """As the rollout worker does it. What chunk t led to is worth 100 (t + 1) + 10 n + 0.7."""
    building = builder()
    for t in range(num_chunks):
        building.decided(decision(t) if values else decision(t, values=None), 40 + t)
        assert building.complete() == []
        last = t + 1 == num_chunks
        building.happened(result(t, last=last), numbered(t + 1) + 0.7 if values else None, None)
    return built(building)


def test_every_value_is_stored_in_its_place() -> None:
    got = recorded()
    assert got.env_ids.tolist() == [6, 7, 8]
    assert got.group_ids.tolist() == [30, 30, 31]
    assert got.rollout_epoch == 5
    assert got.rewards.shape == (4, N, C)
    assert got.rewards[3, 2, 1] == 321
    for t in range(4):
        assert torch.equal(got.rewards[t], numbered(t, C))
        assert torch.equal(got.terminated[t], result(t).terminated)
        assert torch.equal(got.truncated[t], result(t).truncated)
        assert torch.equal(got.valid[t], result(t).valid)
        assert got.task_ids is not None
        assert got.task_ids[t].tolist() == [3, 1, t]
        assert torch.equal(got.logprobs[t], -numbered(t, C, A))
        assert got.values is not None
        assert torch.equal(got.values[t], numbered(t, 1) + 0.5)
        assert torch.equal(got.replay_inputs["state"][t], numbered(t, 4))
    assert got.policy_versions.tolist() == [[version] * N for version in (40, 41, 42, 43)]
    assert got.scores.tolist() == [1, 1, 1]
    assert recorded(2).scores.tolist() == [1, 1, 0]


def test_bootstrap_values_are_those_of_what_followed() -> None:
    got = recorded(3)
    assert got.bootstrap_values is not None
    for t in range(3):
        assert torch.equal(got.bootstrap_values[t], numbered(t + 1) + 0.7)


def test_where_an_episode_ended_its_own_last_state_is_valued() -> None:
    building = builder()
    building.decided(decision(0), 0)
    followed = torch.tensor([1.0, 2.0, 3.0])
    building.happened(result(0, ended=torch.tensor([6, 8]), last=True), followed, torch.tensor([-6.0, -8.0]))
    got = built(building)
    assert got.bootstrap_values is not None
    assert got.bootstrap_values.tolist() == [[-6, 2, -8]]
    assert followed.tolist() == [1, 2, 3], "the decision's own values stay"


def test_states_on_which_nobody_acts_are_kept_for_a_critic_of_its_own() -> None:
    building = builder(with_unacted=True)
    for t in range(3):
        building.decided(decision(t, values=None), t)
        building.happened(result(t, last=t == 2), None, None)
        if t == 1:
            building.led_to(torch.tensor([7]), {"state": torch.full((1, 4), 17.0)})
    building.led_to(ENV_IDS, {"state": torch.tensor([[26.0] * 4, [27.0] * 4, [28.0] * 4])})
    building.led_to(torch.tensor([8]), {"state": torch.full((1, 4), -28.0)})  # its episode ended there
    got = built(building)
    assert got.bootstrap_values is None
    assert got.unacted_rows is not None and got.unacted_inputs is not None
    assert got.unacted_rows.tolist() == [[-1, -1, -1], [-1, 0, -1], [0, 1, 0]]
    assert got.unacted_inputs["state"][..., 0].tolist() == [[26, 17, -28], [26, 27, -28]]
    [_, part] = split_by_rank(got, 2)
    assert part is not None and part.unacted_rows is not None and part.unacted_inputs is not None
    assert (part.unacted_rows.tolist(), part.unacted_inputs["state"][..., 0].tolist()) == (
        [[-1], [-1], [0]],
        [[-28], [-28]],
    )


def test_without_a_value_head() -> None:
    got = recorded(values=False)
    assert (got.values, got.bootstrap_values) == (None, None)


def test_missing_values_of_what_followed_are_refused() -> None:
    building = builder()
    building.decided(decision(0), 0)
    with pytest.raises(ValueError, match="values of a decision or of what followed, expected both or neither"):
        building.happened(result(0), None, None)


def test_a_decision_without_a_result_is_refused() -> None:
    building = builder()
    building.decided(decision(0), 0)
    with pytest.raises(ValueError, match="decision 1 without a result"):
        building.decided(decision(1), 0)


def test_a_result_without_a_decision_is_refused() -> None:
    building = builder()
    with pytest.raises(ValueError, match="a result more than the 0 decisions"):
        building.happened(result(0), None, None)
    building.decided(decision(0), 0)
    building.happened(result(0), numbered(1), None)
    with pytest.raises(ValueError, match="a result more than the 1 decisions"):
        building.happened(result(1), numbered(2), None)


def big(group_ids: list[int]) -> Trajectory:
    """Env n holds n everywhere."""
    t, n = 2, len(group_ids)
    number = torch.arange(n)
    flags = (number % 2 == 0)[None, :, None].expand(t, n, C)
    return Trajectory(
        env_ids=number,
        group_ids=torch.tensor(group_ids),
        rollout_epoch=1,
        rewards=number[None, :, None].expand(t, n, C) + 0.1,
        scores=number + 0.6,
        terminated=flags,
        truncated=~flags,
        valid=flags,
        logprobs=number[None, :, None, None].expand(t, n, C, A) + 0.2,
        values=number[None, :, None].expand(t, n, 1) + 0.3,
        bootstrap_values=number[None, :].expand(t, n) + 0.4,
        replay_inputs={"state": number[None, :, None].expand(t, n, 3)},
        policy_versions=number + 10 * torch.arange(t)[:, None],
    )


@given(
    groups=st.lists(st.integers(0, 40), min_size=1, max_size=24),
    world_size=st.integers(1, 5),
)
def test_split_by_rank_loses_nothing_and_never_splits_a_group(groups: list[int], world_size: int) -> None:
    parts = split_by_rank(big(groups), world_size)
    assert len(parts) == world_size
    held = [part for part in parts if part is not None]
    assert sorted(i for part in held for i in part.env_ids.tolist()) == list(range(len(groups)))
    owners: dict[int, int] = {}
    for rank, part in enumerate(parts):
        if part is None:
            continue
        for group in part.group_ids.tolist():
            assert owners.setdefault(group, rank) == rank
        number = part.env_ids
        assert part.group_ids.tolist() == [groups[i] for i in number.tolist()]
        assert torch.equal(part.scores, number + 0.6)
        for t in range(2):
            assert torch.equal(part.rewards[t, :, 1], number + 0.1)
            assert torch.equal(part.terminated[t, :, 0], number % 2 == 0)
            assert torch.equal(part.truncated[t, :, 0], number % 2 == 1)
            assert torch.equal(part.valid[t, :, 0], number % 2 == 0)
            assert torch.equal(part.logprobs[t, :, 1, 1], number + 0.2)
            assert part.values is not None
            assert part.bootstrap_values is not None
            assert torch.equal(part.values[t, :, 0], number + 0.3)
            assert torch.equal(part.bootstrap_values[t], number + 0.4)
            assert torch.equal(part.replay_inputs["state"][t, :, 2], number)
            assert torch.equal(part.policy_versions[t], number + 10 * t)
        assert part.rollout_epoch == 1


@given(num_groups=st.integers(1, 30), world_size=st.integers(1, 5))
def test_neighbouring_groups_are_dealt_out_evenly(num_groups: int, world_size: int) -> None:
    parts = split_by_rank(big([i // 2 for i in range(2 * num_groups)]), world_size)
    sizes = [0 if part is None else len(part.env_ids) // 2 for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_selecting_no_env_gives_none() -> None:
    assert big([0, 1]).select(torch.zeros(2, dtype=torch.bool)) is None
