from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.advantages import AdvantageInputs, estimate_advantages, gae, gae_recursion

GAMMA, LAMBDA = 0.9, 0.8


def as_float(x) -> torch.Tensor:
    return torch.tensor(np.asarray(x, dtype=np.float32))


def inputs(rewards, terminated, truncated, valid, values, bootstrap, level) -> AdvantageInputs:
    as_bool = lambda x: torch.tensor(np.asarray(x, dtype=bool))  # noqa: E731
    members = np.asarray(rewards).shape[1]
    return AdvantageInputs(
        reward_level=level,
        rewards=as_float(rewards),
        terminated=as_bool(terminated),
        truncated=as_bool(truncated),
        valid=as_bool(valid),
        group_ids=torch.arange(members),
        scores=torch.full((members,), float("nan")),  # of no interest to GAE
        values=as_float(values),
        bootstrap_values=as_float(bootstrap),
    )


def one_env(rewards, terminated, truncated, values, bootstrap) -> AdvantageInputs:
    """T chunks of one step in one env, all valid."""
    column = lambda x: np.asarray(x, dtype=float)[:, None, None]  # noqa: E731
    valid = np.ones((len(rewards), 1, 1))
    return inputs(
        column(rewards), column(terminated), column(truncated), valid, column(values), np.asarray(bootstrap)[:, None],
        "chunk_level",
    )  # fmt: skip


def test_by_hand_without_ends() -> None:
    """deltas: 1 + .9*2 - 1 = 1.8;  0 + .9*3 - 2 = .7;  2 + .9*4 - 3 = 2.6."""
    got = gae(one_env([1, 0, 2], [0] * 3, [0] * 3, [1, 2, 3], [2, 3, 4]), gamma=0.9, gae_lambda=0.8)
    last, middle = 2.6, 0.7 + 0.72 * 2.6
    expected = [1.8 + 0.72 * middle, middle, last]
    assert got.advantages.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert got.returns is not None
    assert got.returns.flatten().tolist() == pytest.approx(
        [expected[0] + 1, expected[1] + 2, expected[2] + 3], abs=1e-6
    )


def test_termination_cuts_and_does_not_bootstrap() -> None:
    """The episode ends at step 1; step 2 is a new one. delta_1 = 5 - 2, whatever the bootstrap value says."""
    got = gae(one_env([0, 5, 0], [0, 1, 0], [0] * 3, [1, 2, 3], [2, 99, 4]), gamma=0.9, gae_lambda=0.8)
    assert got.advantages.flatten().tolist() == pytest.approx([0.8 + 0.72 * 3, 3.0, 0.6], abs=1e-6)


def test_truncation_cuts_and_bootstraps_from_the_final_observation() -> None:
    """delta_1 = 5 + .9*10 - 2 = 12, from V(final_obs) = 10, not from V(first obs of the next episode) = 3."""
    got = gae(one_env([0, 5, 0], [0] * 3, [0, 1, 0], [1, 2, 3], [2, 10, 4]), gamma=0.9, gae_lambda=0.8)
    assert got.advantages.flatten().tolist() == pytest.approx([0.8 + 0.72 * 12, 12.0, 0.6], abs=1e-6)


def test_positions_that_are_not_valid_hand_the_recursion_on() -> None:
    """The middle position was never taken: A_0 = 1.8 + .72 * 2.6, as if 2 followed 0 at once."""
    column = lambda *numbers: torch.tensor(numbers).unsqueeze(-1)  # noqa: E731
    advantages, returns = gae_recursion(
        rewards=column(1.0, 50.0, 2.0), values=column(1.0, 50.0, 3.0), next_values=column(2.0, 50.0, 4.0),
        terminated=column(False, True, False), truncated=column(False, True, False), valid=column(True, False, True),
        gamma=0.9, gae_lambda=0.8,
    )  # fmt: skip
    assert advantages.flatten().tolist() == pytest.approx([1.8 + 0.72 * 2.6, 0.0, 2.6], abs=1e-6)
    assert returns.flatten().tolist() == pytest.approx([2.8 + 0.72 * 2.6, 0.0, 5.6], abs=1e-6)


def test_chunk_level_sums_valid_rewards_only() -> None:
    batch = inputs(
        rewards=[[[1, 2, 100]]], terminated=[[[0, 1, 1]]], truncated=[[[0, 0, 0]]], valid=[[[1, 1, 0]]],
        values=[[[0.5]]], bootstrap=[[7.0]], level="chunk_level",
    )  # fmt: skip
    assert gae(batch, gamma=0.9, gae_lambda=0.8).advantages.tolist() == [[2.5]]


def test_action_level_truncated_inside_a_chunk() -> None:
    """C=3, truncated at step 1: delta_1 = 1 + .9*10 - 2 = 8; delta_0 = 1 + .9*2 - 1 = 1.8; step 2 was never taken."""
    batch = inputs(
        rewards=[[[1, 1, 0]]], terminated=[[[0, 0, 0]]], truncated=[[[0, 1, 0]]], valid=[[[1, 1, 0]]],
        values=[[[1, 2, 3]]], bootstrap=[[10.0]], level="action_level",
    )  # fmt: skip
    got = gae(batch, gamma=0.9, gae_lambda=0.8)
    assert got.advantages.flatten().tolist() == pytest.approx([1.8 + 0.72 * 8, 8.0, 0.0], abs=1e-6)
    assert got.returns is not None
    assert got.returns.flatten().tolist() == pytest.approx([2.8 + 0.72 * 8, 10.0, 0.0], abs=1e-6)
    assert got.valid.tolist() == [[[True, True, False]]]


def test_undiscounted_returns_equal_the_reward_to_go() -> None:
    """lambda = gamma = 1 and termination: R is the sum of the rewards that follow, whatever the critic says."""
    rewards = np.random.default_rng(0).normal(size=6)
    consistent = one_env(rewards, [0] * 5 + [1], [0] * 6, [1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 99])
    returns = gae(consistent, gamma=1.0, gae_lambda=1.0).returns
    assert returns is not None
    assert returns.flatten().tolist() == pytest.approx(np.cumsum(rewards[::-1])[::-1].tolist(), abs=1e-5)


def random_rollout(rng: np.random.Generator, *, t: int, n: int, c: int, auto_reset: bool):
    """Episodes end anywhere in a chunk; the rest of that chunk is not valid, nor is anything later without reset."""
    rewards, terminated, truncated, valid = (np.zeros((t, n, c)) for _ in range(4))
    for env in range(n):
        over = False
        for chunk in range(t):
            for step in range(c):
                if over:
                    break
                valid[chunk, env, step] = 1
                rewards[chunk, env, step] = rng.normal()
                end = rng.random()
                terminated[chunk, env, step] = end < 0.1
                truncated[chunk, env, step] = 0.1 < end < 0.2
                over = end < 0.2
            over = over and not auto_reset
    return rewards, terminated, truncated, valid


def slow_gae(rewards, values, following, terminated, done, valid):
    """Episode by episode, as the definition has it: A_l = sum over k of (gamma lambda)^k delta_{l+k}."""
    length, n = rewards.shape
    advantages = np.zeros((length, n))
    for env in range(n):
        episode: list[int] = []
        for step in range(length):
            if not valid[step, env]:
                continue
            episode.append(step)
            if done[step, env] or not valid[step + 1 :, env].any():
                deltas = [
                    rewards[s, env] + GAMMA * following[s, env] * (1 - terminated[s, env]) - values[s, env]
                    for s in episode
                ]
                for i, s in enumerate(episode):
                    advantages[s, env] = sum((GAMMA * LAMBDA) ** k * d for k, d in enumerate(deltas[i:]))
                episode = []
    return advantages


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", ["chunk_level", "action_level"])
def test_equals_a_slow_loop_over_episodes(level: str, seed: int, auto_reset: bool) -> None:
    rng = np.random.default_rng(seed)
    t, n, c = 9, 6, 4
    rewards, terminated, truncated, valid = random_rollout(rng, t=t, n=n, c=c, auto_reset=auto_reset)
    bootstrap = rng.normal(size=(t, n))
    if level == "chunk_level":
        values = rng.normal(size=(t, n, 1))
        expected = slow_gae(
            rewards.sum(-1),
            values[..., 0],
            bootstrap,
            terminated.any(-1),
            (terminated + truncated).any(-1),
            valid.any(-1),
        )
    else:
        values = rng.normal(size=(t, n, c))
        following = np.zeros((t, n, c))
        for chunk, env, step in np.ndindex(t, n, c):
            inside = step + 1 < c and not truncated[chunk, env, step]
            following[chunk, env, step] = values[chunk, env, step + 1] if inside else bootstrap[chunk, env]
        flat = lambda x: x.transpose(0, 2, 1).reshape(t * c, n)  # noqa: E731
        expected = slow_gae(
            flat(rewards), flat(values), flat(following), flat(terminated), flat(terminated + truncated), flat(valid)
        )
        expected = expected.reshape(t, c, n).transpose(0, 2, 1)
    batch = inputs(rewards, terminated, truncated, valid, values, bootstrap, level)
    got = gae(batch, gamma=GAMMA, gae_lambda=LAMBDA)
    np.testing.assert_allclose(got.advantages.numpy(), expected, atol=1e-5)
    assert got.returns is not None
    assert got.returns.shape == values.shape
    target = (expected.reshape(values.shape) + values) * got.valid.numpy().reshape(values.shape)
    np.testing.assert_allclose(got.returns.numpy(), target, atol=1e-5)

    spoiled = dataclasses.replace(
        batch,
        rewards=torch.where(batch.valid, batch.rewards, 1e6),
        terminated=batch.terminated | ~batch.valid,
        truncated=batch.truncated | ~batch.valid,
    )
    again = gae(spoiled, gamma=GAMMA, gae_lambda=LAMBDA)
    assert torch.equal(again.advantages, got.advantages), "steps that were not taken had an influence"

    # Rewards that are penalties taken off other rewards; a step that was not taken has none.
    penalties = as_float(rng.normal(size=rewards.shape))
    penalized = dataclasses.replace(
        batch,
        rewards=batch.rewards + penalties,
        penalties=torch.where(batch.valid, penalties, float("nan")),
    )
    again = gae(penalized, gamma=GAMMA, gae_lambda=LAMBDA)
    assert again.returns is not None
    np.testing.assert_allclose(again.advantages.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(again.returns.numpy(), target, atol=1e-5)


def test_penalties_are_taken_off_the_rewards_of_their_step() -> None:
    """A chunk of 1 + 2 with penalties .25 and .5; the third step was not taken."""
    batch = inputs(
        rewards=[[[1, 2, 0]]], terminated=[[[0, 1, 0]]], truncated=[[[0, 0, 0]]], valid=[[[1, 1, 0]]],
        values=[[[0.5]]], bootstrap=[[7.0]], level="chunk_level",
    )  # fmt: skip
    batch = dataclasses.replace(batch, penalties=torch.tensor([[[0.25, 0.5, 9.0]]]))
    assert gae(batch, gamma=0.9, gae_lambda=0.8).advantages.tolist() == [[1.75]]
    steps = dataclasses.replace(batch, reward_level="action_level", values=torch.zeros(1, 1, 3))
    got = gae(steps, gamma=0.5, gae_lambda=1.0).advantages
    assert got.tolist() == [[[0.75 + 0.5 * 1.5, 1.5, 0.0]]]


def test_by_name_and_missing_values() -> None:
    batch = one_env([1.0], [1], [0], [0.25], [0.0])
    got = estimate_advantages("gae", batch, {"gamma": 0.9, "gae_lambda": 0.8})
    assert got.advantages.tolist() == [[0.75]]
    with pytest.raises(ValueError, match="value head"):
        gae(dataclasses.replace(batch, values=None), gamma=0.9, gae_lambda=0.8)
    with pytest.raises(ValueError, match=r"got values \[1, 1, 2\], expected \[1, 1, 1\]"):
        gae(dataclasses.replace(batch, values=torch.zeros(1, 1, 2)), gamma=0.9, gae_lambda=0.8)
