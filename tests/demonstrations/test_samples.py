from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.demonstrations.dataset import demonstration_trajectory, frames_of_step, mixed_frames_of_step
from embodied_rl.demonstrations.mixture import shares_of


def drawn(num_frames: int, batch_size: int, steps: int, seed: int = 0) -> list[int]:
    parts = [frames_of_step(num_frames, seed=seed, step=step, batch_size=batch_size) for step in range(steps)]
    assert all(len(part) == batch_size for part in parts)
    return torch.cat(parts).tolist()


@settings(max_examples=50, deadline=None)
@given(num_frames=st.integers(1, 40), batch_size=st.integers(1, 60), epochs=st.integers(1, 4))
def test_each_pass_has_every_frame_once(num_frames: int, batch_size: int, epochs: int) -> None:
    steps = -(-num_frames * epochs // batch_size)
    frames = drawn(num_frames, batch_size, steps)
    for epoch in range(epochs):
        assert sorted(frames[epoch * num_frames : (epoch + 1) * num_frames]) == list(range(num_frames))


def test_the_order_is_a_function_of_seed_and_step() -> None:
    first = drawn(100, 30, 7)
    assert first == drawn(100, 30, 7)
    assert first != drawn(100, 30, 7, seed=1)
    assert first[:100] != first[100:200], "each pass has an order of its own"
    assert frames_of_step(100, seed=0, step=5, batch_size=30).tolist() == first[150:180], "without those before"


def test_what_the_actor_gets() -> None:
    valid = torch.tensor([[True, True, True], [True, False, False]])
    t = demonstration_trajectory(
        positions=torch.tensor([4, 6]),
        replay_inputs={"state": torch.tensor([[1.0], [2.0]])},
        valid=valid,
        action_dim=2,
        policy_version=3,
    )
    assert t.env_ids.tolist() == t.group_ids.tolist() == [4, 6]
    assert torch.equal(t.valid, valid[None])
    assert t.logprobs.shape == (1, 2, 3, 2)
    assert t.rewards.abs().sum() == 0
    assert t.replay_inputs["state"].tolist() == [[[1.0], [2.0]]]
    assert t.policy_versions.tolist() == [[3, 3]]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    shares=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    passes=st.integers(1, 3),
)
def test_each_set_has_its_share_and_passes_of_its_own(sizes: list[int], shares: list[int], passes: int) -> None:
    shares, starts = shares[: len(sizes)], np.cumsum([0, *sizes])
    steps = max(-(-size * passes // share) for size, share in zip(sizes, shares, strict=True))
    drawn = [mixed_frames_of_step(sizes, shares, seed=3, step=step).numpy() for step in range(steps)]
    for number, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        own = [frames[(starts[number] <= frames) & (frames < starts[number + 1])] - starts[number] for frames in drawn]
        assert {len(frames) for frames in own} == {share}
        counts = np.bincount(np.concatenate(own), minlength=size)
        assert counts.max() - counts.min() <= 1, "a pass has each frame once"


def test_a_mixture_is_shuffled_and_a_function_of_seed_and_step() -> None:
    def frames(seed: int, step: int) -> list[int]:
        return mixed_frames_of_step([50, 50], [8, 8], seed=seed, step=step).tolist()

    assert frames(0, 4) == frames(0, 4)
    assert frames(0, 4) != frames(1, 4)
    first = [frame < 50 for frame in frames(0, 4)]
    assert first != sorted(first, reverse=True), "an optimiser step has some of each"
    assert first != [frame < 50 for frame in frames(0, 5)]
    halves = mixed_frames_of_step([50, 50], [50, 50], seed=0, step=0).numpy()
    assert (halves[halves < 50] != halves[halves >= 50] - 50).any(), "sets of one size have orders of their own"


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([1, 1], [5, 5]), ([1, 1, 1], [4, 3, 3]), ([0.3, 0.6], [3, 7]), ([1, 99], [0, 10]), ([2.5], [10])],
)
def test_shares_of_a_batch_of_ten(weights: list[float], shares: list[int]) -> None:
    assert shares_of(weights, 10) == shares
