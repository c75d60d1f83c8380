from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from embodied_rl.algorithms.advantages import AdvantageInputs, gae
from embodied_rl.contracts import EpisodeRecord, RolloutStart
from embodied_rl.envs.base import SimStep
from embodied_rl.envs.chunked import ChunkedEnv, FrameRecorder
from embodied_rl.models.base import PolicyOutput
from embodied_rl.workers.trajectory import TrajectoryBuilder
from tests.fakes import Script, ScriptedSim, seen_after

NEVER = Script(rewards=[0.0] * 64, success=[False] * 64)


def succeeds_at(step: int, length: int = 64) -> Script:
    """Level 1 and success at ``step`` (counted from 1) alone."""
    return Script(
        rewards=[float(t == step) for t in range(1, length + 1)], success=[t == step for t in range(1, length + 1)]
    )


def chunked(sim: ScriptedSim, num_envs: int, chunk: int, **overrides: Any) -> ChunkedEnv:
    options: dict[str, Any] = {
        "env_ids": range(100, 100 + num_envs),
        "num_action_chunks": chunk,
        "max_episode_steps": 50,
        "auto_reset": False,
        "ignore_terminations": False,
        "use_rel_reward": False,
        "reward_coef": 1.0,
    }
    return ChunkedEnv(sim, **{**options, **overrides})


def numbered_actions(num_envs: int, chunk: int) -> torch.Tensor:
    """Component 0 of step c in slot s is s + c / 10."""
    steps = torch.arange(num_envs).float()[:, None] + torch.arange(chunk).float()[None, :] / 10
    return torch.stack([steps, torch.zeros_like(steps)], dim=-1)


@dataclass
class ListRecorder:
    wanted: Collection[int] = range(100, 200)
    frames: list[tuple[int, int, str, int, float, bool]] = field(default_factory=list)

    def wants(self, env_index: int) -> bool:
        return env_index in self.wanted

    def record(
        self,
        env_index: int,
        frame: NDArray[np.uint8],
        *,
        instruction: str,
        episode_step: int,
        reward: float,
        success: bool,
    ) -> None:
        self.frames.append((env_index, int(frame[0, 0, 0]), instruction, episode_step, reward, success))


class _Negating(ScriptedSim):
    """Takes its actions for its own."""

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        outcome = super().step(slots, actions)
        actions *= -1
        return outcome


@pytest.mark.parametrize("batched", [False, True])
def test_an_adapter_changes_no_action_that_is_recorded(batched: bool) -> None:
    env, actions = chunked(_Negating(2, [NEVER] * 2, batched=batched), 2, 3), numbered_actions(2, 3)
    env.reset([0, 1])
    env.chunk_step(actions)
    assert torch.equal(actions, numbered_actions(2, 3))


@pytest.mark.parametrize("batched", [False, True])
def test_masks_of_a_chunk_with_early_late_and_no_success(batched: bool) -> None:
    sim = ScriptedSim(4, [succeeds_at(1), succeeds_at(2), succeeds_at(3), NEVER], batched=batched)
    env = chunked(sim, 4, 3)
    env.reset([0, 1, 2, 3])
    result = env.chunk_step(numbered_actions(4, 3))
    assert result.valid.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert result.terminated.int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert not result.truncated.any()
    assert result.rewards.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert torch.equal(result.success, result.terminated)
    assert result.final_obs is None
    # (slot, reset state, episode step, last action): each env stands where its episode ended.
    expected = torch.tensor([[0, 0, 1, 0.0], [1, 1, 2, 1.1], [2, 2, 3, 2.2], [3, 3, 3, 3.2]])
    torch.testing.assert_close(seen_after(result).state, expected)


@pytest.mark.parametrize("batched", [False, True])
def test_done_env_is_never_touched_again(batched: bool) -> None:
    recorder = ListRecorder()
    sim = ScriptedSim(2, [succeeds_at(1, length=1), NEVER], batched=batched, image_size=2)
    env = chunked(sim, 2, 2, recorder=recorder)
    env.reset([0, 1])
    first = env.chunk_step(numbered_actions(2, 2))
    sim.calls.clear()
    second = env.chunk_step(numbered_actions(2, 2))
    assert {slot for _, slots in sim.calls for slot in slots} == {1}
    assert second.valid.int().tolist() == [[0, 0], [1, 1]]
    assert not (second.terminated | second.truncated).any()
    assert not second.rewards.any()
    assert seen_after(second).state[0].equal(seen_after(first).state[0])
    assert seen_after(second).images["cam"][0].equal(seen_after(first).images["cam"][0])
    assert seen_after(second).state[1, 2] == 4
    assert not env.all_done


def test_steps_are_of_the_task_that_was_played_not_of_the_next_one() -> None:
    sim = ScriptedSim(2, [succeeds_at(1), NEVER])
    env = chunked(sim, 2, 1, auto_reset=True)
    env.reset([0, 1], lambda env_id, k: 1)
    tasks = [env.chunk_step(numbered_actions(2, 1)).task_ids.tolist() for _ in range(2)]
    assert tasks == [[sim.task(0).task_id, sim.task(1).task_id], [sim.task(1).task_id] * 2]
    assert sim.task(0).task_id != sim.task(1).task_id


def test_all_done_and_a_chunk_after_it() -> None:
    sim = ScriptedSim(2, [succeeds_at(1), succeeds_at(2)])
    env = chunked(sim, 2, 2)
    env.reset([0, 1])
    env.chunk_step(numbered_actions(2, 2))
    assert env.all_done
    sim.calls.clear()
    assert not env.chunk_step(numbered_actions(2, 2)).valid.any()
    assert sim.calls == []
    env.reset([1, 0])
    assert not env.all_done


def test_truncation_inside_a_chunk() -> None:
    env = chunked(ScriptedSim(1, [NEVER]), 1, 3, max_episode_steps=4)
    env.reset([0])
    assert not env.chunk_step(numbered_actions(1, 3)).truncated.any()
    result = env.chunk_step(numbered_actions(1, 3))
    assert result.truncated.int().tolist() == [[1, 0, 0]]
    assert result.valid.int().tolist() == [[1, 0, 0]]
    assert not result.terminated.any()
    assert env.all_done


def test_success_at_the_last_step_is_a_termination() -> None:
    env = chunked(ScriptedSim(1, [succeeds_at(2)]), 1, 2, max_episode_steps=2)
    env.reset([0])
    result = env.chunk_step(numbered_actions(1, 2))
    assert result.terminated.int().tolist() == [[0, 1]]
    assert not result.truncated.any()


def test_ignore_terminations_records_success_at_any_step() -> None:
    sim = ScriptedSim(2, [succeeds_at(2), NEVER])
    env = chunked(sim, 2, 4, max_episode_steps=4, ignore_terminations=True)
    env.reset([0, 1])
    result = env.chunk_step(numbered_actions(2, 4))
    assert not result.terminated.any()
    assert result.truncated.int().tolist() == [[0, 0, 0, 1]] * 2
    assert result.success.int().tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert result.valid.all()
    assert [(r.success, r.episode_length) for r in env.drain_episodes()] == [(True, 4), (False, 4)]


def fails_at(step: int, *, success: bool = False, horizon: int | None = None, length: int = 8) -> Script:
    """The simulator ends the episode at ``step``, or cuts it at ``horizon`` (both counted from 1); each step pays 1."""
    marks = range(1, length + 1)
    return Script(
        rewards=[1.0] * length,
        success=[success and t == step for t in marks],
        terminated=[t == step for t in marks],
        truncated=[t == horizon for t in marks],
    )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("ignore", [False, True])
def test_a_simulator_that_ends_its_episode_ends_it_whatever_is_ignored(batched: bool, ignore: bool) -> None:
    scripts = [fails_at(2), fails_at(2, success=True), fails_at(9, horizon=1), fails_at(3, horizon=3), fails_at(9)]
    env = chunked(ScriptedSim(5, scripts, batched=batched), 5, 4, ignore_terminations=ignore, max_episode_steps=4)
    env.reset(range(5))
    result = env.chunk_step(numbered_actions(5, 4))
    assert result.terminated.int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [0] * 4, [0, 0, 1, 0], [0] * 4]
    assert result.truncated.int().tolist() == [[0] * 4, [0] * 4, [1, 0, 0, 0], [0] * 4, [0, 0, 0, 1]]
    assert result.valid.sum(1).tolist() == [2, 2, 1, 3, 4]
    assert result.success.any(1).tolist() == [False, True, False, False, False]
    assert [(r.success, r.failed) for r in sorted(env.drain_episodes(), key=lambda r: r.env_id)] == [
        (False, True),
        (True, False),
        (False, False),
        (False, True),
        (False, False),
    ]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(
    ("threshold", "expected"), [(-7.0, [True, True]), (-7.5, [True, True]), (-6.5, [False, True]), (-2.0, [False] * 2)]
)
def test_success_by_the_return_is_judged_at_the_end_and_ends_nothing(
    relative: bool, threshold: float, expected: list[bool]
) -> None:
    """Returns are -7 at the horizon and -3 where the simulator ends the episode; after one step each is above both."""
    paid = [-1.0, -2.0, -4.0], [-1.0, -2.0]
    levels = [np.cumsum(rewards).tolist() if relative else rewards for rewards in paid]
    scripts = [
        Script(rewards=levels[0], success=[False] * 3, terminated=[False] * 3),
        Script(rewards=levels[1], success=[False] * 2, terminated=[False, True]),
    ]
    sim = ScriptedSim(2, scripts)
    sim.success_return = threshold  # type: ignore[attr-defined]
    env = chunked(sim, 2, 3, max_episode_steps=3, use_rel_reward=relative, reward_coef=0.5)
    env.reset([0, 1])
    result = env.chunk_step(numbered_actions(2, 3))
    assert result.success.tolist() == [[False, False, expected[0]], [False, expected[1], False]]
    assert result.truncated.int().tolist() == [[0, 0, 1], [0, 0, 0]], "a bootstrapped end, successful or not"
    assert result.terminated.int().tolist() == [[0, 0, 0], [0, 1, 0]]
    records = sorted(env.drain_episodes(), key=lambda r: r.env_id)
    assert [(r.success, r.failed, r.episode_return) for r in records] == [
        (expected[0], False, -3.5),
        (expected[1], not expected[1], -1.5),
    ]


def test_advantages_after_a_fall_and_after_a_horizon() -> None:
    """Both envs take two steps of reward 1. Env 100 falls, so nothing follows; env 101 runs out of time, so what its
    last state was worth, 10, follows; the 70 of the next episode counts for neither."""
    scripts = [fails_at(2), fails_at(9, horizon=2)]
    env = chunked(ScriptedSim(2, scripts), 2, 1, auto_reset=True)
    obs = env.reset([0, 1], lambda env_id, k: env_id - 100)
    builder = TrajectoryBuilder(RolloutStart(obs=obs, group_ids=torch.tensor([[0, 1]])))
    for values, following, final in (([3.0, 5.0], [4.0, 6.0], None), ([4.0, 6.0], [70.0, 70.0], [10.0, 10.0])):
        action = numbered_actions(2, 1)
        column = torch.tensor(values).unsqueeze(1)
        builder.decided(PolicyOutput(actions=action, logprobs=action, values=column, replay_inputs={}), 0)
        result = replace(env.chunk_step(action), last=final is not None)
        builder.happened(result, torch.tensor(following), None if final is None else torch.tensor(final))
    [rollout] = builder.complete()
    estimate = gae(
        AdvantageInputs(
            reward_level="chunk_level",
            rewards=rollout.rewards,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            valid=rollout.valid,
            group_ids=rollout.group_ids,
            scores=rollout.scores,
            values=rollout.values,
            bootstrap_values=rollout.bootstrap_values,
        ),
        gamma=0.5,
        gae_lambda=0.5,
    )
    # Env 100: d2 = 1 + 0 - 4 = -3; d1 = 1 + 0.5*4 - 3 = 0, so A1 = 0 + 0.25*(-3) = -0.75.
    # Env 101: d2 = 1 + 0.5*10 - 6 = 0; d1 = 1 + 0.5*6 - 5 = -1, so A1 = -1.
    torch.testing.assert_close(estimate.advantages, torch.tensor([[-0.75, -1.0], [-3.0, 0.0]]))
    assert estimate.returns is not None
    torch.testing.assert_close(estimate.returns.squeeze(-1), torch.tensor([[2.25, 4.0], [1.0, 6.0]]))


def test_reward_level_relative_and_scaled() -> None:
    script = Script(rewards=[0.25, 0.75, 0.5, 1.5], success=[False, False, False, True])
    for relative, coef, expected in (
        (False, 1.0, [0.25, 0.75, 0.5, 1.5]),
        (False, 4.0, [1.0, 3.0, 2.0, 6.0]),
        (True, 1.0, [0.25, 0.5, -0.25, 1.0]),
        (True, 4.0, [1.0, 2.0, -1.0, 4.0]),
    ):
        env = chunked(ScriptedSim(1, [script]), 1, 2, use_rel_reward=relative, reward_coef=coef)
        env.reset([0])
        rewards = torch.cat([env.chunk_step(numbered_actions(1, 2)).rewards for _ in range(2)], dim=1)
        assert rewards.tolist() == [expected]
        (record,) = env.drain_episodes()
        assert record.episode_return == sum(expected)


def test_relative_reward_counts_from_zero_in_every_episode() -> None:
    script = Script(rewards=[0.5, 2.0], success=[False, True])
    env = chunked(ScriptedSim(1, [script]), 1, 2, use_rel_reward=True, auto_reset=True)
    env.reset([0], lambda env_id, k: 0)
    for _ in range(2):
        assert env.chunk_step(numbered_actions(1, 2)).rewards.tolist() == [[0.5, 1.5]]


@pytest.mark.parametrize("batched", [False, True])
def test_auto_reset_starts_the_next_episode_and_keeps_the_last_observation(batched: bool) -> None:
    asked: list[tuple[int, int]] = []

    def next_reset_state(env_id: int, k: int) -> int:
        asked.append((env_id, k))
        return 3

    sim = ScriptedSim(3, [succeeds_at(1), NEVER, succeeds_at(3), NEVER], batched=batched, image_size=2)
    env = chunked(sim, 3, 3, auto_reset=True)
    env.reset([0, 1, 2], next_reset_state)
    result = env.chunk_step(numbered_actions(3, 3))
    assert result.valid.int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert asked == [(100, 1), (102, 1)]
    torch.testing.assert_close(seen_after(result).state, torch.tensor([[0, 3, 0, 0.0], [1, 1, 3, 1.2], [2, 3, 0, 0.0]]))
    assert seen_after(result).instructions == ("task 3", "task 1", "task 3")
    assert result.final_obs is not None
    assert result.final_obs.env_ids.tolist() == [100, 102]
    torch.testing.assert_close(result.final_obs.state, torch.tensor([[0, 0, 1, 0.0], [2, 2, 3, 2.2]]))
    assert result.final_obs.images["cam"][:, 0, 0, 0].tolist() == [1, 23]
    assert result.final_obs.instructions == ("task 0", "task 2")
    assert seen_after(result).images["cam"][:, 0, 0, 0].tolist() == [0, 13, 20]
    assert not env.all_done

    following = env.chunk_step(numbered_actions(3, 3))
    assert following.valid.all()
    assert following.final_obs is None


def test_success_of_one_episode_is_not_the_next_ones() -> None:
    env = chunked(ScriptedSim(1, [succeeds_at(1), NEVER]), 1, 1, auto_reset=True, max_episode_steps=2)
    env.reset([0], lambda env_id, k: 1)
    for _ in range(3):
        env.chunk_step(numbered_actions(1, 1))
    assert [(r.success, r.episode_length) for r in env.drain_episodes()] == [(True, 1), (False, 2)]


def test_first_episodes_may_be_of_other_lengths() -> None:
    env = chunked(ScriptedSim(3, [NEVER]), 3, 2, auto_reset=True, max_episode_steps=6, first_lengths=[2, 4, 6])
    env.reset([0, 0, 0], lambda env_id, k: 0)
    cut = [env.chunk_step(numbered_actions(3, 2)).truncated.any(1).tolist() for _ in range(6)]
    assert cut[:3] == [[True, False, False], [False, True, False], [False, False, True]]
    assert cut[3:] == cut[:3], "all others are as long as can be"
    assert [(r.env_id, r.episode_length) for r in env.drain_episodes()] == [(102, 6), (100, 6), (101, 6), (102, 6)]
    env.reset([0, 0, 0], lambda env_id, k: 0, first_episode=1)
    cut = [env.chunk_step(numbered_actions(3, 2)).truncated.any(1).tolist() for _ in range(3)]
    assert cut == [[False] * 3, [False] * 3, [True] * 3]


def test_a_first_episode_that_ends_before_its_cut_counts() -> None:
    env = chunked(ScriptedSim(2, [succeeds_at(2)]), 2, 1, auto_reset=True, max_episode_steps=6, first_lengths=[1, 3])
    env.reset([0, 0], lambda env_id, k: 0)
    for _ in range(2):
        env.chunk_step(numbered_actions(2, 1))
    assert [(r.env_id, r.success) for r in env.drain_episodes()] == [(101, True)]


def test_reset_starts_counting_episodes_again() -> None:
    asked: list[int] = []

    def next_reset_state(env_id: int, k: int) -> int:
        asked.append(k)
        return 0

    env = chunked(ScriptedSim(1, [succeeds_at(1)]), 1, 1, auto_reset=True)
    for _ in range(2):
        env.reset([0], next_reset_state)
        for _ in range(2):
            env.chunk_step(numbered_actions(1, 1))
    assert asked == [1, 2, 1, 2]


def test_group_members_share_every_start_however_long_their_episodes_last() -> None:
    """Envs 100..103 are groups {100, 101} and {102, 103}; episode k of group g starts from state 4 * g + k % 4."""

    class OddSlotsFail(ScriptedSim):
        def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
            outcome = super().step(slots, actions)
            return SimStep(rewards=outcome.rewards, success=outcome.success & (np.asarray(slots) % 2 == 0))

    sim = OddSlotsFail(4, [succeeds_at(1 + state % 3) for state in range(8)])
    env = chunked(sim, 4, 2, auto_reset=True, max_episode_steps=5)
    env.reset([0, 0, 4, 4], lambda env_id, k: 4 * ((env_id - 100) // 2) + k % 4)
    for _ in range(12):
        env.chunk_step(numbered_actions(4, 2))
    starts: dict[int, list[int]] = {env_id: [] for env_id in range(100, 104)}
    for record in env.drain_episodes():
        starts[record.env_id].append(record.reset_state_id)
    assert [len(starts[env_id]) for env_id in starts] == [10, 4, 9, 4]
    assert starts[100] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert starts[101] == [0, 1, 2, 3]
    assert starts[102] == [4, 5, 6, 7, 4, 5, 6, 7, 4]
    assert starts[103] == [4, 5, 6, 7]


def test_none_ends_an_envs_sequence() -> None:
    """The way an evaluation covers 3 states with 2 envs: the state list is exhausted, the envs stay done."""
    coverage = [2, 0, 1]
    sim = ScriptedSim(2, [succeeds_at(1), succeeds_at(1), succeeds_at(2)])
    env = chunked(sim, 2, 2, auto_reset=True)

    def next_reset_state(env_id: int, k: int) -> int | None:
        place = env_id - 100 + 2 * k
        return coverage[place] if place < len(coverage) else None

    env.reset(coverage[:2], next_reset_state)
    first = env.chunk_step(numbered_actions(2, 2))
    assert first.final_obs is not None
    assert first.final_obs.env_ids.tolist() == [100]
    assert seen_after(first).state[1].tolist() == [1, 0, 1, 1]
    second = env.chunk_step(numbered_actions(2, 2))
    assert second.valid.int().tolist() == [[1, 0], [0, 0]]
    assert second.final_obs is None
    assert env.all_done
    assert sorted(r.reset_state_id for r in env.drain_episodes()) == [0, 1, 2]


def test_idle_env_is_done_from_the_start() -> None:
    sim = ScriptedSim(3, [NEVER, succeeds_at(1)], batched=True, image_size=2)
    env = chunked(sim, 3, 2)
    env.reset([0, 0, 1])
    obs = env.reset([None, 1, None])
    assert obs.state[[0, 2]].count_nonzero() == 0
    assert obs.images["cam"][[0, 2]].count_nonzero() == 0
    assert obs.state[1].tolist() == [1, 1, 0, 0]
    result = env.chunk_step(numbered_actions(3, 2))
    assert result.valid.int().tolist() == [[0, 0], [1, 0], [0, 0]]
    assert env.all_done
    assert [r.env_id for r in env.drain_episodes()] == [101]


def test_episode_record() -> None:
    sim = ScriptedSim(1, [NEVER, NEVER, NEVER, succeeds_at(3)], states_per_task=2)
    env = chunked(sim, 1, 2, reward_coef=5.0)
    env.reset([3])
    env.chunk_step(numbered_actions(1, 2))
    assert env.drain_episodes() == []
    env.chunk_step(numbered_actions(1, 2))
    assert env.drain_episodes() == [
        EpisodeRecord(
            env_id=100,
            task_id=1,
            instruction="task 1",
            reset_state_id=3,
            success=True,
            episode_return=5.0,
            episode_length=3,
            max_reward=5.0,
            suite="scripted",
        )
    ]
    assert env.drain_episodes() == []


def test_unbatched_simulator_finishes_a_slot_before_the_next() -> None:
    sim = ScriptedSim(2, [succeeds_at(2), NEVER])
    env = chunked(sim, 2, 3, auto_reset=True)
    env.reset([0, 1], lambda env_id, k: 1)
    env.chunk_step(numbered_actions(2, 3))
    assert sim.calls == [
        ("reset", (0,)),
        ("observe", (0,)),
        ("reset", (1,)),
        ("observe", (1,)),
        ("step", (0,)),
        ("step", (0,)),
        ("observe", (0,)),
        ("reset", (0,)),
        ("observe", (0,)),
        ("step", (1,)),
        ("step", (1,)),
        ("step", (1,)),
        ("observe", (1,)),
    ]


def test_batched_simulator_steps_the_slots_still_alive_together() -> None:
    sim = ScriptedSim(3, [succeeds_at(2), NEVER, succeeds_at(1)], batched=True)
    env = chunked(sim, 3, 3)
    env.reset([0, 1, 2])
    env.chunk_step(numbered_actions(3, 3))
    assert sim.slots_called("step") == [(0, 1, 2), (0, 1), (1,)]
    assert sim.slots_called("observe") == [(0, 1, 2), (0, 1, 2)]


def test_recorder_gets_reset_and_step_frames_of_live_envs() -> None:
    recorder: FrameRecorder
    recorder = ListRecorder()
    sim = ScriptedSim(2, [succeeds_at(1), NEVER])
    env = chunked(sim, 2, 2, recorder=recorder, reward_coef=3.0)
    env.reset([0, 1])
    env.chunk_step(numbered_actions(2, 2))
    assert recorder.frames == [
        (100, 100, "task 0", 0, 0.0, False),
        (101, 110, "task 1", 0, 0.0, False),
        (100, 101, "task 0", 1, 3.0, True),
        (101, 111, "task 1", 1, 0.0, False),
        (101, 112, "task 1", 2, 0.0, False),
    ]


def test_nothing_is_rendered_while_no_frames_are_wanted() -> None:
    recorder = ListRecorder(wanted=())
    for chosen in (None, recorder):
        sim = ScriptedSim(1, [NEVER])
        env = chunked(sim, 1, 2, recorder=chosen)
        env.reset([0])
        env.chunk_step(numbered_actions(1, 2))
        assert sim.slots_called("render") == []
        # The policy looks only at the reset and at the chunk's end.
        assert len(sim.slots_called("observe")) == 2
    recorder.wanted = [100]
    env.chunk_step(numbered_actions(1, 2))
    assert [frame[3] for frame in recorder.frames] == [3, 4]


def test_only_the_envs_that_are_wanted_are_rendered() -> None:
    recorder = ListRecorder(wanted=[101])
    sim = ScriptedSim(2, [NEVER, succeeds_at(1)])
    env = chunked(sim, 2, 2, recorder=recorder)
    env.reset([0, 1])
    env.chunk_step(numbered_actions(2, 2))
    assert set(sim.slots_called("render")) == {(1,)}
    assert recorder.frames == [(101, 110, "task 1", 0, 0.0, False), (101, 111, "task 1", 1, 1.0, True)]


def test_messages_do_not_share_memory_with_later_ones() -> None:
    sim = ScriptedSim(1, [NEVER], image_size=2)
    env = chunked(sim, 1, 1)
    first = env.reset([0])
    env.chunk_step(numbered_actions(1, 1))
    assert first.state[0, 2] == 0
    assert first.images["cam"][0, 0, 0, 0] == 0


def test_wrong_inputs_are_refused() -> None:
    sim = ScriptedSim(2, [NEVER])
    env = chunked(sim, 2, 3)
    with pytest.raises(RuntimeError, match="before the first reset"):
        env.chunk_step(numbered_actions(2, 3))
    with pytest.raises(ValueError, match="got 1 reset state ids, expected one for each of 2 envs"):
        env.reset([0])
    with pytest.raises(ValueError, match="got no next_reset_state, expected one with auto_reset=True"):
        chunked(sim, 2, 3, auto_reset=True).reset([0, 0])
    env.reset([0, 0])
    with pytest.raises(ValueError, match=r"got actions \[2, 2, 2\] torch.float32, expected \[2, 3, 2\]"):
        env.chunk_step(numbered_actions(2, 2))
    broken = numbered_actions(2, 3)
    broken[1, 2, 0] = float("nan")
    with pytest.raises(ValueError, match=r"envs \[101\] are NaN"):
        env.chunk_step(broken)
    with pytest.raises(ValueError, match="max_episode_steps: got 0"):
        chunked(sim, 2, 3, max_episode_steps=0)


def test_adapter_that_breaks_the_protocol_is_named() -> None:
    class WrongState(ScriptedSim):
        state_dim = 5

    with pytest.raises(ValueError, match=r"WrongState\.observe"):
        chunked(WrongState(1, [NEVER]), 1, 1).reset([0])


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans(), st.integers(1, 4), st.integers(0, 8))
def test_a_resumed_env_goes_on_as_the_one_it_takes_the_place_of(
    data: st.DataObject, batched: bool, n: int, before: int
) -> None:
    scripts = [NEVER, *(succeeds_at(data.draw(st.integers(1, 9))) for _ in range(4))]

    lengths = data.draw(st.none() | st.lists(st.integers(1, 7), min_size=n, max_size=n))

    def env() -> ChunkedEnv:
        sim = ScriptedSim(n, scripts, batched=batched)
        shaped = {"use_rel_reward": True, "reward_coef": 0.3}
        return chunked(sim, n, 2, auto_reset=True, max_episode_steps=7, first_lengths=lengths, **shaped)

    def starts(env_id: int, k: int) -> int:
        return (env_id + k) % len(scripts)

    first, second = env(), env()
    first.reset([starts(100 + slot, 0) for slot in range(n)], starts)
    for _ in range(before):
        first.chunk_step(numbered_actions(n, 2))
    first.drain_episodes()
    assert second.resume(first.open_episodes(), starts) == []
    assert second.drain_episodes() == []
    assert second.current_obs().state.equal(first.current_obs().state)
    for _ in range(5):
        results = [env.chunk_step(numbered_actions(n, 2)) for env in (first, second)]
        for name in ("rewards", "terminated", "truncated", "valid"):
            assert getattr(results[0], name).equal(getattr(results[1], name))
        assert seen_after(results[0]).state.equal(seen_after(results[1]).state)
    assert first.drain_episodes() == second.drain_episodes()


def test_a_batched_simulator_resumes_with_all_envs_at_their_last_step_together() -> None:
    """It may move what waits, as ManiSkill's batch does, so nothing may wait after its last step."""
    sim = ScriptedSim(2, [succeeds_at(3), NEVER], batched=True)
    env = chunked(sim, 2, 1, auto_reset=True)
    env.reset([0, 1], lambda env_id, k: 1)
    for _ in range(5):
        env.chunk_step(numbered_actions(2, 1))
    again = ScriptedSim(2, [succeeds_at(3), NEVER], batched=True)
    chunked(again, 2, 1, auto_reset=True).resume(env.open_episodes(), lambda env_id, k: 1)
    assert again.calls == [
        ("reset", (1,)),
        *[("step", (1,))] * 3,
        ("reset", (0,)),
        *[("step", (0, 1))] * 2,
        ("observe", (0, 1)),
    ]


def test_envs_that_come_elsewhere_are_named_and_go_on() -> None:
    def starts(env_id: int, k: int) -> int:
        return 0

    env = chunked(ScriptedSim(3, [NEVER]), 3, 1, auto_reset=True)
    env.reset([0, 0, 0], starts)
    for _ in range(3):
        env.chunk_step(numbered_actions(3, 1))
    left = env.open_episodes()
    left[1] = replace(left[1], state=left[1].state + 1)
    assert chunked(ScriptedSim(3, [NEVER]), 3, 1, auto_reset=True).resume(left, starts) == [101]
    changed = chunked(ScriptedSim(3, [succeeds_at(2)]), 3, 1, auto_reset=True)
    assert changed.resume(left, starts) == [100, 101, 102]
    assert [(e.number, len(e.actions)) for e in changed.open_episodes()] == [(1, 0)] * 3, "the next episodes"
    assert changed.drain_episodes() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env_id": 7}, r"got episodes of envs \[7, 101\], expected \[100, 101\]"),
        ({"actions": np.zeros((50, 2), np.float32)}, "got 50 actions of 2 components for env 100, expected fewer"),
        ({"actions": np.zeros((1, 3), np.float32)}, "got 1 actions of 3 components for env 100"),
    ],
)
def test_episodes_of_other_envs_are_refused(change: dict[str, Any], message: str) -> None:
    env = chunked(ScriptedSim(2, [NEVER]), 2, 1, auto_reset=True)
    env.reset([0, 0], lambda env_id, k: 0)
    left = env.open_episodes()
    left[0] = replace(left[0], **change)
    with pytest.raises(ValueError, match=message):
        env.resume(left, lambda env_id, k: 0)


def test_close_closes_the_simulator() -> None:
    sim = ScriptedSim(1, [NEVER])
    chunked(sim, 1, 1).close()
    assert sim.closed


@st.composite
def _scenarios(draw: st.DrawFn) -> dict[str, Any]:
    length = draw(st.integers(1, 12))
    levels = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=length, max_size=length)
    goals = st.lists(st.sampled_from([False, False, False, True]), min_size=length, max_size=length)
    return {
        "length": length,
        "scripts": draw(st.lists(st.builds(Script, rewards=levels, success=goals), min_size=1, max_size=5)),
        "num_envs": draw(st.integers(1, 4)),
        "chunk": draw(st.integers(1, 5)),
        "num_chunks": draw(st.integers(1, 6)),
        "batched": draw(st.booleans()),
        "auto_reset": draw(st.booleans()),
        "ignore_terminations": draw(st.booleans()),
        "use_rel_reward": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=150)
@given(_scenarios())
def test_properties_of_any_rollout(scenario: dict[str, Any]) -> None:
    scripts: Sequence[Script] = scenario["scripts"]
    n, chunk = scenario["num_envs"], scenario["chunk"]
    options = {key: scenario[key] for key in ("auto_reset", "ignore_terminations", "use_rel_reward")}

    def rollout(batched: bool) -> tuple[list[Any], list[EpisodeRecord], ScriptedSim]:
        sim = ScriptedSim(n, scripts, batched=batched)
        env = chunked(sim, n, chunk, max_episode_steps=scenario["length"], reward_coef=2.0, **options)
        following = (lambda env_id, k: (env_id + k) % len(scripts)) if scenario["auto_reset"] else None
        env.reset([slot % len(scripts) for slot in range(n)], following)
        results = [env.chunk_step(numbered_actions(n, chunk)) for _ in range(scenario["num_chunks"])]
        return results, sorted(env.drain_episodes(), key=lambda r: r.env_id), sim

    results, records, sim = rollout(scenario["batched"])
    rewards, valid, terminated, truncated = (
        torch.stack([getattr(r, name) for r in results]) for name in ("rewards", "valid", "terminated", "truncated")
    )
    done = terminated | truncated

    # Simulator steps are exactly the valid ones.
    assert int(valid.sum()) == sum(len(slots) for slots in sim.slots_called("step"))
    # Within a chunk validity is a prefix that ends at the first done; nothing is reported outside it.
    assert not (valid[..., 1:] & ~valid[..., :-1]).any()
    assert not (valid[..., 1:] & done[..., :-1]).any()
    assert not (done & ~valid).any()
    assert not (terminated & truncated).any()
    assert not rewards[~valid].any()
    if not scenario["auto_reset"]:
        # Over the whole rollout too: an env that is done stays done.
        rows = valid.transpose(0, 1).reshape(n, -1)
        assert not (rows[:, 1:] & ~rows[:, :-1]).any()
        assert (done.sum(dim=(0, 2)) <= 1).all()
    # Every episode's return and length are the sums over its steps.
    per_env: dict[int, list[tuple[float, int]]] = {100 + slot: [] for slot in range(n)}
    for slot in range(n):
        total, steps = 0.0, 0
        for t in range(len(results)):
            for c in range(chunk):
                total, steps = total + float(rewards[t, slot, c]), steps + int(valid[t, slot, c])
                if done[t, slot, c]:
                    per_env[100 + slot].append((total, steps))
                    total, steps = 0.0, 0
    for env_id, expected in per_env.items():
        got = [(r.episode_return, r.episode_length) for r in records if r.env_id == env_id]
        assert got == expected
    # Batching is an order of calls, not a result.
    other, other_records, _ = rollout(not scenario["batched"])
    assert records == other_records
    for ours, theirs in zip(results, other, strict=True):
        assert ours.rewards.equal(theirs.rewards)
        assert ours.valid.equal(theirs.valid)
        assert seen_after(ours).state.equal(seen_after(theirs).state)
        assert (ours.final_obs is None) == (theirs.final_obs is None)
        if ours.final_obs is not None and theirs.final_obs is not None:
            assert ours.final_obs.state.equal(theirs.final_obs.state)


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("step", None, r"ScriptedSim\.step: got None \(NoneType\), expected a SimStep"),
        ("observe", None, r"ScriptedSim\.observe: got None \(NoneType\), expected a SimObs"),
        (
            "step",
            "reward",
            r"ScriptedSim\.step: the reward is NaN or infinite in env 100, step 0 of an episode from initial",
        ),
        (
            "observe",
            "state",
            r"ScriptedSim\.observe: the state is NaN or infinite in env 100, step 2 of an episode from",
        ),
    ],
)
def test_what_an_adapter_gives_is_blamed_on_it(
    monkeypatch: pytest.MonkeyPatch, method: str, answer: str | None, message: str
) -> None:
    sim = ScriptedSim(1, [NEVER])
    env = chunked(sim, 1, 2)
    env.reset([0])
    original = getattr(sim, method)

    def broken(*arguments: object) -> object:
        given = original(*arguments)
        if answer is None:
            return None
        bad = np.full((1,) if method == "step" else (1, 4), np.nan, np.float32)
        return replace(given, **{"rewards" if method == "step" else "state": bad})

    monkeypatch.setattr(sim, method, broken)
    with pytest.raises((ValueError, TypeError), match=message):
        env.chunk_step(numbered_actions(1, 2))
