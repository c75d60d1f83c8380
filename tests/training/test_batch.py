from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.contracts import TrainBatch, Trajectory
from embodied_rl.errors import UserError
from embodied_rl.schema import AlgorithmConfig
from embodied_rl.training.batch import build_train_batch, minibatches
from embodied_rl.workers.trajectory import split_by_rank
from tests.configs import config_of
from tests.training.rollouts import ACTION_DIM, CHUNK, rollout, small_policy

POLICY = small_policy()
CRITIC = small_policy(1)
STEP_CRITIC = small_policy(CHUNK)
GRPO = config_of("algorithm=grpo", "algorithm.group_size=2").algorithm
PPO = config_of("algorithm=ppo").algorithm


def built(config: AlgorithmConfig, *trajectories: Trajectory) -> TrainBatch:
    return build_train_batch(trajectories, config)[0]


def over_ranks(config: AlgorithmConfig, parts: list[list[Trajectory]], tasks: Tensor | None = None) -> list[TrainBatch]:
    """Each rank's batch, where ``reduce`` sums over them all: a thread a rank, which wait for each other."""
    given: dict[int, Tensor] = {}
    meeting = Barrier(len(parts), timeout=60)

    def rank(number: int) -> TrainBatch:
        def reduce(tensor: Tensor) -> Tensor:
            meeting.wait()
            given[number] = tensor
            meeting.wait()
            return torch.stack([given[n] for n in range(len(parts))]).sum(0)

        return build_train_batch(parts[number], config, tasks=tasks, reduce=reduce)[0]

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(rank, range(len(parts))))


def by_id(batches: list[TrainBatch], name: str) -> dict[int, Any]:
    return {
        sample: getattr(batch, name)[row].tolist()
        for batch in batches
        for row, sample in enumerate(batch.sample_ids.tolist())
    }


def whole_step(policy: Any) -> list[Trajectory]:
    """Two rollout epochs of 10 envs in groups of 2."""
    return [rollout(policy, rollout_epoch=epoch, groups_per_epoch=5) for epoch in range(2)]


def lanes_of(trajectory: Trajectory, sizes: list[int]) -> list[Trajectory]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    place = torch.arange(len(trajectory.env_ids))
    parts = [trajectory.select((place >= s) & (place < s + n)) for s, n in zip(starts, sizes, strict=True)]
    return [part for part in parts if part is not None]


def test_one_sample_for_each_chunk_in_which_anything_happened() -> None:
    trajectory = rollout(POLICY, num_envs=4, num_chunks=3, lengths=[1, 3, 4, 9])
    batch = built(GRPO, trajectory)
    assert len(batch) == 1 + 1 + 2 + 3
    assert batch.valid.sum() == 1 + 3 + 4 + 9
    order = batch.sample_ids.argsort()
    assert batch.policy_version[order].tolist() == [0, 0, 0, 1, 0, 1, 2]
    assert torch.equal(batch.replay_inputs["state"][order][1], trajectory.replay_inputs["state"][0, 1])
    assert torch.equal(batch.replay_inputs["state"][order][6], trajectory.replay_inputs["state"][2, 3])


def test_sample_ids_are_unique_and_independent_of_ranks_and_lanes() -> None:
    step = whole_step(POLICY)
    whole = built(GRPO, *step)
    ids = set(whole.sample_ids.tolist())
    assert len(ids) == len(whole)
    expected = by_id([whole], "policy_version")
    for sizes in ([10], [4, 6], [2, 2, 6]):
        for world_size in (1, 2, 3):
            lanes = [lane for trajectory in step for lane in lanes_of(trajectory, sizes)]
            ranks = [
                [p for p in parts if p is not None]
                for parts in zip(*[split_by_rank(x, world_size) for x in lanes], strict=True)
            ]
            batches = [built(GRPO, *part) for part in ranks]
            assert sorted(i for batch in batches for i in batch.sample_ids.tolist()) == sorted(ids)
            assert by_id(batches, "policy_version") == expected
            assert by_id(batches, "advantages") == by_id([whole], "advantages")


@pytest.mark.parametrize(
    ("level", "shape", "units"),
    [
        ("token_level", (CHUNK, ACTION_DIM), (3 + 4) * ACTION_DIM),
        ("action_level", (CHUNK,), 3 + 4),
        ("chunk_level", (), 3),
    ],
)
def test_masks_and_logprobs_at_each_level(level: Any, shape: tuple[int, ...], units: int) -> None:
    trajectory = rollout(POLICY, num_envs=2, num_chunks=2, lengths=[3, 4])
    batch = built(replace(GRPO, logprob_type=level), trajectory)
    assert batch.logprobs.shape == batch.loss_mask.shape == batch.advantages.shape == (3, *shape)
    assert batch.loss_mask.sum() == units
    # Env 1's second chunk has one valid step of three.
    last = int(batch.sample_ids.argmax())
    recorded = trajectory.logprobs[1, 1]
    expected = {"token_level": recorded, "action_level": recorded.sum(-1), "chunk_level": recorded[0].sum()}[level]
    mask = batch.loss_mask[last]
    assert torch.allclose(batch.logprobs[last][mask], expected[mask])
    if level != "chunk_level":
        assert not batch.logprobs[last][~mask].any()


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
def test_advantages_are_copied_to_every_unit(level: Any) -> None:
    rewards = torch.zeros(2, 4, CHUNK)
    rewards[1, 0, 0] = 1.0
    trajectory = replace(rollout(POLICY, num_envs=4, num_chunks=2, group_size=4, lengths=[4, 6, 6, 6]), rewards=rewards)
    batch = built(replace(GRPO, logprob_type=level), trajectory)
    env = batch.sample_ids // (1 << 20) % (1 << 20)
    for i in range(len(batch)):
        expected = 1.5 if env[i] == 0 else -0.5
        assert batch.advantages[i][batch.loss_mask[i]].flatten().tolist() == pytest.approx(
            [expected] * int(batch.loss_mask[i].sum()), abs=1e-5
        )


def test_action_level_rewards_give_an_advantage_a_step() -> None:
    trajectory = rollout(STEP_CRITIC, num_envs=2, num_chunks=2, group_size=1, lengths=[6, 4])
    config = replace(PPO, reward_type="action_level", normalize_advantages=False, gamma=1.0, gae_lambda=0.0)
    batch = built(config, trajectory)
    assert batch.returns is not None
    assert batch.value_mask is not None
    assert batch.returns.shape == batch.value_mask.shape == (4, CHUNK)
    assert torch.equal(batch.value_mask, batch.valid)
    first = int(batch.sample_ids.argmin())
    assert trajectory.values is not None
    values, rewards = trajectory.values, trajectory.rewards
    expected = rewards[0, 0, 0] + values[0, 0, 1] - values[0, 0, 0]  # lambda 0: the one-step error
    assert batch.advantages[first, 0].tolist() == pytest.approx([expected.item()] * ACTION_DIM, abs=1e-6)


def test_chunk_level_values_have_one_unit_a_chunk() -> None:
    batch = built(PPO, rollout(CRITIC, num_envs=2, num_chunks=2, group_size=1, lengths=[6, 4]))
    assert batch.value_mask is not None
    assert batch.value_mask.tolist() == [[True]] * 4


def scored(scores: list[float], group_size: int = 2) -> Trajectory:
    """Envs whose only reward comes at their first step."""
    trajectory = rollout(POLICY, num_envs=len(scores), num_chunks=2, group_size=group_size, lengths=[6] * len(scores))
    rewards = torch.zeros_like(trajectory.rewards)
    rewards[0, :, 0] = torch.tensor(scores)
    return replace(trajectory, rewards=rewards, scores=torch.tensor(scores))


FILTER = replace(GRPO, filter_rewards=True, rewards_lower_bound=0.1, rewards_upper_bound=0.9)


def test_filtered_groups_vanish() -> None:
    batch, counts = build_train_batch([scored([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])], FILTER)
    assert (batch.sample_ids // (1 << 20)).unique().tolist() == [2, 3]
    assert len(batch) == 4
    assert batch.loss_mask.all()
    assert counts["groups_filtered"].tolist() == [2, 3]
    assert counts["groups_equal"].tolist() == [2, 3]


def test_if_all_groups_are_filtered_one_masked_sample_remains() -> None:
    batch, counts = build_train_batch([scored([1.0, 1.0, 0.0, 0.0])], FILTER)
    assert len(batch) == 1
    assert not batch.loss_mask.any()
    assert not batch.valid.any()
    assert counts["groups_filtered"].tolist() == [2, 2]


def test_without_the_filter_equal_groups_are_counted_and_kept() -> None:
    batch, counts = build_train_batch([scored([1.0, 1.0, 0.0, 1.0])], GRPO)
    assert len(batch) == 8
    assert counts["groups_filtered"].tolist() == [0, 2]
    assert counts["groups_equal"].tolist() == [1, 2]


def test_groups_are_equal_but_for_rounding() -> None:
    batch, counts = build_train_batch([scored([5.0, 5.0 + 1e-6, 5.0, 5.0 + 1e-4])], GRPO)
    assert counts["groups_equal"].tolist() == [1, 2]
    first = batch.sample_ids // (1 << 20) < 2
    assert not batch.advantages[first].any()
    assert batch.advantages[~first].any()


def test_groups_beyond_the_last_that_is_needed_are_left_out() -> None:
    trajectories = [scored([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]), replace(scored([0.0, 1.0]), group_ids=torch.tensor([7, 7]))]
    batch, counts = build_train_batch(trajectories, FILTER, last_group=2)
    assert (batch.sample_ids // (1 << 20)).unique().tolist() == [0, 1, 4, 5]
    assert counts["groups_filtered"].tolist() == [2, 4]
    batch, _ = build_train_batch(trajectories, FILTER, last_group=7)
    assert len(batch) == 2 * 6


def test_scores_are_the_rollouts() -> None:
    batch = built(GRPO, scored([1.0, 0.25, 0.0, 1.0]))
    assert batch.sequence_ids.tolist() == [0, 1, 2, 3] * 2
    assert batch.scores.tolist() == [1.0, 0.25, 0.0, 1.0] * 2


def unverified(trajectory: Trajectory, members: list[int]) -> Trajectory:
    valid, scores = trajectory.valid.clone(), trajectory.scores.clone()
    valid[:, members] = False
    scores[members] = torch.nan
    return replace(trajectory, valid=valid, scores=scores)


def test_a_member_whose_score_nobody_knows_leaves_its_group() -> None:
    batch = built(GRPO, unverified(scored([1.0, 0.0, 0.0, 9.0], group_size=4), [3]))
    first = {int(i): a for i, a in zip(batch.sequence_ids, batch.advantages[:, 0, 0], strict=True)}
    # Of [1, 0, 0]: mean 1/3, deviation 0.57735.
    assert first == {0: pytest.approx(1.1547, abs=1e-4), 1: pytest.approx(-0.57735, abs=1e-4), 2: first[1]}


def test_one_that_is_left_alone_has_nobody_to_be_compared_with() -> None:
    batch, counts = build_train_batch([unverified(scored([1.0, 0.0, 0.0, 1.0]), [1])], GRPO)
    assert batch.sequence_ids.unique().tolist() == [2, 3]
    assert counts["score"].tolist() == [1.0, 2.0]
    raw = replace(GRPO, adv_type="raw", normalize_advantages=False)
    assert built(raw, unverified(scored([1.0, 0.0, 0.0, 1.0]), [1])).sequence_ids.unique().tolist() == [0, 2, 3]


def test_if_nobody_is_verified_one_masked_sample_remains() -> None:
    batch, _ = build_train_batch([unverified(scored([1.0, 0.0]), [0])], GRPO)
    assert len(batch) == 1
    assert not batch.loss_mask.any()


def test_scores_are_normalised_before_the_estimator() -> None:
    norm = replace(GRPO.reward_norm, mean_level="group", leave_one_out=True)
    raw = replace(GRPO, adv_type="raw", normalize_advantages=False, reward_norm=norm)
    step = [scored([1.0, 0.0, 0.0, 0.25]), replace(scored([0.5, 0.0]), group_ids=torch.tensor([5, 5]), rollout_epoch=1)]
    rloo = replace(GRPO, adv_type="rloo")
    assert torch.allclose(built(raw, *step).advantages, built(rloo, *step).advantages)
    whitened = replace(
        raw, reward_norm=replace(raw.reward_norm, mean_level="batch", std_level="batch", leave_one_out=False)
    )
    scores = torch.tensor([1.0, 0.0, 0.0, 0.25, 0.5, 0.0])
    expected = (scores - scores.mean()) / (scores.std() + 1e-6)
    got = built(whitened, *step)
    order = {sequence: place for place, sequence in enumerate([0, 1, 2, 3, (1 << 20), (1 << 20) + 1])}
    for sequence, advantages in zip(got.sequence_ids.tolist(), got.advantages, strict=True):
        assert advantages[0, 0].item() == pytest.approx(expected[order[sequence]].item(), abs=1e-5)


def test_advantages_are_normalised_by_task() -> None:
    """Task 7 pays tens, task 2 ones; env 3 goes on from task 7 to task 2 with its second chunk."""
    scores = [10.0, 30.0, 1.0, 20.0]
    norm = replace(PPO.adv_norm, mean_level="task", std_level="task", eps=1e-9)
    config = replace(GRPO, adv_type="raw", normalize_advantages=True, adv_norm=norm)
    trajectory = replace(scored(scores), task_ids=torch.tensor([[7, 7, 2, 7], [7, 7, 2, 2]]))
    batch = built(config, trajectory)
    got = {
        (int(i) // (1 << 20), int(i) % (1 << 20)): float(a[0, 0])
        for i, a in zip(batch.sample_ids, batch.advantages, strict=True)
    }
    # Task 7: 10, 10, 30, 30, 20 (mean 20, deviation 10); task 2: 1, 1, 20 (mean 22/3, squares 722/3).
    other = (361 / 3) ** 0.5
    assert got == pytest.approx(
        {
            (0, 0): -1.0, (0, 1): -1.0, (1, 0): 1.0, (1, 1): 1.0, (3, 0): 0.0,
            (2, 0): (1 - 22 / 3) / other, (2, 1): (1 - 22 / 3) / other, (3, 1): (20 - 22 / 3) / other,
        },
        abs=1e-5,
    )  # fmt: skip
    parts = [[part for part in split if part] for split in zip(split_by_rank(trajectory, 2), strict=True)]
    both = over_ranks(config, parts, torch.tensor([2, 7]))
    for sample, advantages in by_id(both, "advantages").items():
        assert advantages == by_id([batch], "advantages")[sample]


def test_scores_are_normalised_by_task() -> None:
    norm = replace(GRPO.reward_norm, mean_level="task")
    raw = replace(GRPO, adv_type="raw", normalize_advantages=False, reward_norm=norm)
    batch = built(raw, replace(scored([10.0, 30.0, 1.0, 2.0]), task_ids=torch.tensor([[7, 7, 2, 2]] * 2)))
    first = {int(i): float(a[0, 0]) for i, a in zip(batch.sequence_ids, batch.advantages, strict=True)}
    assert first == {0: -10.0, 1: 10.0, 2: -0.5, 3: 0.5}


def with_tokens(trajectory: Trajectory, rows: list[list[int]]) -> Trajectory:
    """Tokens of each env in the order of time: chunks, steps, dimensions."""
    steps, members, chunk, dims = trajectory.logprobs.shape
    tokens = torch.tensor(rows).view(members, steps, chunk, dims).transpose(0, 1).contiguous()
    return replace(trajectory, tokens=tokens)


def test_a_prefix_shared_by_good_and_bad_is_masked() -> None:
    rows = [[*range(12)], [*range(8), 90, 91, 92, 93], [50, *range(1, 12)], [50, *range(1, 12)]]
    trajectory = with_tokens(scored([1.0, 0.0, 1.0, 1.0]), rows)
    config = replace(GRPO, min_filter_prefix_tokens=4)
    batch, counts = build_train_batch([trajectory], config)
    plain = built(GRPO, trajectory)
    units = {int(i): int(mask.sum()) for i, mask in zip(plain.sample_ids, plain.loss_mask, strict=True)}
    left = {int(i): int(mask.sum()) for i, mask in zip(batch.sample_ids, batch.loss_mask, strict=True)}
    assert set(units.values()) == {6}
    # Envs 0 and 1 share 8 tokens: their first chunks and 2 of the second. Envs 2 and 3 scored alike.
    second = 1  # its number, beside 2^20 times the env's
    assert left == {
        **{(env << 20) + second: 4 for env in (0, 1)},
        **{(env << 20) + chunk: 6 for env in (2, 3) for chunk in (0, second)},
    }
    assert counts["prefix_masked"].tolist() == [16, 48]
    assert built(replace(GRPO, min_filter_prefix_tokens=9), trajectory).loss_mask.sum() == plain.loss_mask.sum()


def test_a_prefix_filter_needs_tokens() -> None:
    with pytest.raises(UserError, match="min_filter_prefix_tokens=4 compares tokens, and this model's actions are not"):
        built(replace(GRPO, min_filter_prefix_tokens=4), scored([1.0, 0.0]))


def test_no_trajectory_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer groups than actor ranks"):
        build_train_batch([], GRPO)


def test_normalised_advantages_have_mean_0_and_deviation_1_over_valid_units() -> None:
    batch = built(PPO, *whole_step(CRITIC))
    units = batch.advantages[:, 0, 0]  # one value a chunk
    assert units.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert units.std().item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_normalised_advantages_do_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    step = whole_step(CRITIC)
    whole = built(PPO, *step)
    parts = [
        [p for p in ranks if p is not None] for ranks in zip(*[split_by_rank(t, world_size) for t in step], strict=True)
    ]
    assert len({sum(len(p.env_ids) for p in part) for part in parts}) > 1 or world_size == 2
    batches = over_ranks(PPO, parts)
    for name in ("advantages", "returns", "loss_mask", "valid"):
        expected, got = by_id([whole], name), by_id(batches, name)
        assert expected.keys() == got.keys()
        for sample, value in expected.items():
            assert torch.allclose(torch.tensor(got[sample]), torch.tensor(value), rtol=1e-6, atol=1e-6)


# Mini-batches


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[int], int]:
    ids = draw(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=40, unique=True))
    return ids, draw(st.integers(1, 12))


def parts_of(
    ids: list[int], own: list[int], count: int, *, seed: int = 0, step: int = 0, epoch: int = 0
) -> list[list[int]]:
    """Sample ids of this rank's part of each mini-batch."""
    mine = torch.tensor(own, dtype=torch.int64)
    places = minibatches(torch.tensor(ids), mine, seed=seed, step=step, epochs=epoch + 1, count=count)
    return [mine[place].tolist() for place in list(places)[-min(count, len(ids)) :]]


@given(shares())
def test_every_sample_exactly_once_in_each_epoch(drawn: tuple[list[int], int]) -> None:
    ids, count = drawn
    parts = parts_of(ids, ids, count)
    assert sorted(i for part in parts for i in part) == sorted(ids)
    assert len(parts) == min(count, len(ids))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(shares(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_same_composition_for_any_number_of_ranks_and_order_of_arrival(
    drawn: tuple[list[int], int], world_size: int, random: Any
) -> None:
    ids, count = drawn
    whole = parts_of(ids, ids, count)
    owner = {sample: random.randrange(world_size) for sample in ids}
    shuffled = random.sample(ids, len(ids))
    per_rank = [parts_of(shuffled, [i for i in shuffled if owner[i] == rank], count) for rank in range(world_size)]
    for number, part in enumerate(whole):
        held = [ranks[number] for ranks in per_rank]
        assert sorted(i for share in held for i in share) == sorted(part)
        for rank, share in enumerate(held):
            assert share == [i for i in part if owner[i] == rank], "in the order of the whole"


@settings(max_examples=25)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_order_depends_on_seed_step_and_epoch_only(seed: int, step: int, epoch: int) -> None:
    ids = list(range(100, 160))
    here = parts_of(ids, ids, 3, seed=seed, step=step, epoch=epoch)
    assert here == parts_of(ids[::-1], ids[::-1], 3, seed=seed, step=step, epoch=epoch)
    assert here != parts_of(ids, ids, 3, seed=seed, step=step, epoch=epoch + 1)
    assert here != parts_of(ids, ids, 3, seed=seed, step=step + 1, epoch=epoch)
    assert here != parts_of(ids, ids, 3, seed=seed + 1, step=step, epoch=epoch)


def test_every_epoch_has_a_permutation_of_its_own() -> None:
    ids = list(range(50))
    orders = {tuple(i for part in parts_of(ids, ids, 1, epoch=epoch) for i in part) for epoch in range(20)}
    assert len(orders) == 20


def test_no_sample_gives_no_minibatch() -> None:
    assert parts_of([], [], 4) == []
