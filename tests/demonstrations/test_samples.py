from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.demonstrations.dataset import demonstration_trajectory, frames_of_step


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
    assert t.policy_versions.tolist() == [3]
