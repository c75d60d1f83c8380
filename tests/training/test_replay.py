"""The replay buffer, filled with numbers that tell where they are from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied_rl.contracts import Trajectory
from embodied_rl.errors import CheckpointError
from embodied_rl.training.replay import FILE, ReplayBuffer, Transitions

C, A = 2, 1


def rollout(
    first: float, ends: dict[tuple[int, int], tuple[str, int]] | None = None, *, chunks: int = 3, members: int = 2,
    resets: bool = True,
) -> Trajectory:  # fmt: skip
    """Env n's chunk t begins in state ``first + 100 n + 10 t``; its actions are that + 0.25, its rewards that and + 1.
    What nobody acts on is the state before + 5.

    Args:
        ends: (chunk, env) -> how the episode ends there, after how many steps of the chunk.
        resets: what follows an end begins in the chunk after it; False: the env stays done.
    """
    ends = ends or {}
    states = first + 100.0 * torch.arange(members) + 10.0 * torch.arange(chunks)[:, None]
    valid = torch.ones(chunks, members, C, dtype=torch.bool)
    flags = {name: torch.zeros_like(valid) for name in ("terminated", "truncated")}
    unacted: list[list[float]] = [[] for _ in range(members)]
    rows = torch.full((chunks, members), -1)
    for n in range(members):
        for t in range(chunks):
            if (t, n) in ends:
                how, steps = ends[t, n]
                valid[t, n, steps:] = False
                flags[how][t, n, steps - 1] = True
                if not resets:
                    valid[t + 1 :, n] = False
                    states[t + 1 :, n] = states[t, n] + 5
            if ((t, n) in ends and resets) or t + 1 == chunks:
                rows[t, n] = len(unacted[n])
                unacted[n].append(states[t, n].item() + 5)
    most = max(map(len, unacted))
    padded = torch.tensor([states_ + [states_[-1]] * (most - len(states_)) for states_ in unacted]).T
    return Trajectory(
        env_ids=torch.arange(members), group_ids=torch.arange(members), rollout_epoch=0,
        rewards=(states[..., None] + torch.arange(C)) * valid, scores=torch.zeros(members),
        **flags, valid=valid, logprobs=torch.zeros(chunks, members, C, A), values=None, bootstrap_values=None,
        replay_inputs={
            "state": states[..., None], "samples": torch.full((chunks, members, C, A), -1.0),
            "images/front": states[..., None].to(torch.uint8),
        },
        policy_versions=torch.zeros(chunks, members, dtype=torch.int64),
        actions=(states[..., None, None] + 0.25).expand(chunks, members, C, A).contiguous(),
        unacted_inputs={
            "state": padded[..., None], "samples": padded[..., None, None].expand(-1, -1, C, A),
            "images/front": padded[..., None].to(torch.uint8),
        },
        unacted_rows=rows,
    )  # fmt: skip


def buffer(capacity: int = 100) -> ReplayBuffer:
    return ReplayBuffer(capacity, gamma=0.5, left_out=("samples",))


def everything(of: ReplayBuffer) -> Transitions:
    return of.sample(torch.arange(len(of)))


def states(of: ReplayBuffer) -> list[float]:
    return everything(of).inputs["state"][:, 0].tolist()


def check(found: Transitions) -> None:
    """Every number is of the chunk that its state is of."""
    here, following = found.inputs["state"][:, 0], found.next_inputs["state"][:, 0]
    assert found.actions.shape[1:] == (C, A)
    assert torch.equal(found.actions[:, 0, 0], here + 0.25)
    assert torch.equal(found.rewards, here + 0.5 * (here + 1))
    assert ((following - here == 10) | (following - here == 5)).all()
    assert found.inputs["images/front"].dtype == torch.uint8
    assert torch.equal(found.next_inputs["images/front"][:, 0], following.to(torch.uint8))
    assert set(found.inputs) == {"state", "images/front"}, "what was decided is not what was seen"


def test_chunks_come_in_the_order_of_envs_and_time_with_what_follows() -> None:
    of = buffer()
    of.add(rollout(1000))
    found = everything(of)
    check(found)
    assert found.inputs["state"][:, 0].tolist() == [1000, 1010, 1020, 1100, 1110, 1120]
    assert found.next_inputs["state"][:, 0].tolist() == [1010, 1020, 1025, 1110, 1120, 1125]
    assert found.discounts.tolist() == [0.25] * 6
    assert (len(of), of.total) == (6, 6)


@pytest.mark.parametrize("resets", [True, False])
def test_nothing_follows_a_termination_and_the_last_observation_a_truncation(resets: bool) -> None:
    of = buffer()
    of.add(rollout(0, {(0, 0): ("terminated", 1), (1, 1): ("truncated", 1)}, resets=resets))
    found = everything(of)
    by_state = {
        state: (reward, discount, following)
        for state, reward, discount, following in zip(
            found.inputs["state"][:, 0].tolist(),
            found.rewards.tolist(),
            found.discounts.tolist(),
            found.next_inputs["state"][:, 0].tolist(),
            strict=True,
        )
    }
    assert by_state[0] == (0.0, 0.0, 5.0)
    assert by_state[100] == (100 + 0.5 * 101, 0.25, 110.0)
    assert by_state[110] == (110.0, 0.5, 115.0)
    after = {10: (10 + 0.5 * 11, 0.25, 20.0), 20: (20 + 0.5 * 21, 0.25, 25.0), 120: (120 + 0.5 * 121, 0.25, 125.0)}
    assert by_state.keys() - {0, 100, 110} == (after.keys() if resets else set())
    assert all(by_state[state] == outcome for state, outcome in after.items() if resets)


def test_the_oldest_make_room() -> None:
    """Rollouts of one env and 3 chunks take 4 rows each: of 10, the last 10."""
    of = buffer(10)
    for number in range(5):
        of.add(rollout(1000 * number, members=1))
        check(everything(of))
    assert states(of) == [2020, 3000, 3010, 3020, 4000, 4010, 4020]
    assert of.total == 15
    assert everything(of).next_inputs["state"][:, 0].tolist() == [2025, 3010, 3020, 3025, 4010, 4020, 4025]


def test_a_rollout_larger_than_the_ring_leaves_its_newest_part() -> None:
    of = buffer(3)
    of.add(rollout(0, members=1))
    assert states(of) == [10, 20]
    check(everything(of))


def test_it_is_the_same_when_read_again(tmp_path: Path) -> None:
    of = buffer(10)
    for number in range(4):
        of.add(rollout(1000 * number, members=1))
    write = of.snapshot()
    of.add(rollout(9000, members=1))  # a snapshot is of its moment
    write(tmp_path)
    again, larger, smaller = buffer(10), buffer(50), buffer(5)
    for read in (again, larger, smaller):
        read.load(tmp_path)
        check(everything(read))
    assert states(again) == states(larger) == [1020, 2000, 2010, 2020, 3000, 3010, 3020]
    assert states(smaller) == [3000, 3010, 3020]
    assert again.total == 12
    again.add(rollout(9000, members=1))
    assert states(again) == states(of)
    assert torch.equal(everything(again).rewards, everything(of).rewards)


def test_an_empty_one_is_read_again_and_a_missing_or_damaged_one_said(tmp_path: Path) -> None:
    of = buffer()
    with pytest.raises(CheckpointError, match=rf"holds no replay buffer \({FILE}\)"):
        of.load(tmp_path)
    buffer().snapshot()(tmp_path)
    of.load(tmp_path)
    assert (len(of), of.total) == (0, 0)
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        of.load(tmp_path)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_what_the_umask_lets_them(tmp_path: Path, umask: int, mode: int) -> None:
    of = buffer()
    of.add(rollout(0))
    before = os.umask(umask)
    try:
        of.snapshot()(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == mode


def test_what_was_not_recorded_is_said() -> None:
    with pytest.raises(ValueError, match="needs trajectories with executed actions"):
        buffer().add(replace(rollout(0), actions=None))
