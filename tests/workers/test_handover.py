"""Envs that take the next episode when they have ended one: what is recorded is as if each had played its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.contracts import EnvObs, RolloutStart, Trajectory
from embodied_rl.envs.chunked import ChunkedEnv
from embodied_rl.envs.episode_queue import EpisodeQueue
from embodied_rl.evaluation.video import VideoRecorder
from embodied_rl.models.base import PolicyOutput
from embodied_rl.training.replay import ReplayBuffer
from embodied_rl.workers.trajectory import TrajectoryBuilder
from tests.fakes import Script, ScriptedSim
from tests.workers.job import Job, easy, small

FIRST = 100
LONGEST = 12


@dataclass(frozen=True)
class Played:
    trajectories: list[Trajectory]
    complete_at: list[int]
    """Of each epoch, how many rounds were done when it was complete."""


def of_state(obs: EnvObs) -> Tensor:
    """[N,2]: the initial state and the step, whichever env it is."""
    return obs.state[:, 1:3]


def value(obs: EnvObs) -> Tensor:
    state = of_state(obs)
    return 100 * state[:, 0] + state[:, 1]


def play(lengths: list[int], envs: int, chunk: int, *, batched: bool, epochs: int, first: int = 0) -> Played:
    """Episodes of so many steps, from ``first`` on; those that are as long as can be are truncated, the others
    succeed. As env and rollout worker do it."""
    scripts = [
        Script(rewards=[10.0 * i + t for t in range(64)], success=[t + 1 == n < LONGEST for t in range(64)])
        for i, n in enumerate(lengths)
    ]
    sim = ScriptedSim(envs, scripts, batched=batched)
    env_ids = range(FIRST, FIRST + envs)
    options = {"auto_reset": False, "ignore_terminations": False, "use_rel_reward": False, "reward_coef": 1.0}
    env = ChunkedEnv(sim, env_ids=env_ids, num_action_chunks=chunk, max_episode_steps=LONGEST, **options)
    queue = EpisodeQueue(range(first, first + epochs * envs), env_ids)
    obs = env.reset(queue.first, queue)
    groups = torch.arange(first, first + epochs * envs).view(epochs, envs)
    builder = TrajectoryBuilder(
        RolloutStart(obs=obs, group_ids=groups, rollout_epoch=first // envs), with_actions=True, with_unacted=True
    )
    trajectories, complete_at, rounds = [], [], 0

    def decide(obs: EnvObs) -> None:
        actions = value(obs)[:, None, None].expand(-1, chunk, 2) / 1000
        inputs = {"seen": of_state(obs)}
        output = PolicyOutput(actions=actions, logprobs=-actions, values=value(obs)[:, None], replay_inputs=inputs)
        builder.decided(output, 7)

    decide(obs)
    while True:
        playing = queue.playing.clone()
        result = env.chunk_step(torch.zeros(envs, chunk, 2))
        rounds += 1
        result = replace(result, episodes=playing if epochs > 1 else None, last=env.all_done)
        assert result.next_obs is not None
        final = result.final_obs
        builder.happened(result, value(result.next_obs), None if final is None else value(final))
        for ended in [result.next_obs] if result.last else []:
            builder.led_to(ended.env_ids, {"seen": of_state(ended)})
        if final is not None:
            builder.led_to(final.env_ids, {"seen": of_state(final)})
        if not result.last:
            decide(result.next_obs)
        complete = builder.complete()
        trajectories += complete
        complete_at += [rounds] * len(complete)
        if result.last:
            return Played(trajectories, complete_at)


def test_a_lane_of_two_envs_and_three_epochs() -> None:
    """Env 100 plays 0, 2, 3 and 4 while env 101 is at 1; then that has 5."""
    played = play([1, 4, 1, 1, 2, 1], 2, 1, batched=False, epochs=3)
    assert played.complete_at == [4, 4, 5], "seven rounds, if each epoch had waited for its longest"
    first, second, third = played.trajectories
    assert [t.rollout_epoch for t in played.trajectories] == [0, 1, 2]
    assert [t.group_ids.tolist() for t in played.trajectories] == [[0, 1], [2, 3], [4, 5]]
    assert all(t.env_ids.tolist() == [100, 101] for t in played.trajectories)
    assert first.valid.squeeze(-1).int().tolist() == [[1, 1], [0, 1], [0, 1], [0, 1]]
    assert first.rewards.squeeze(-1).tolist() == [[0, 10], [0, 11], [0, 12], [0, 13]]
    assert second.rewards.squeeze(-1).tolist() == [[20, 30]]
    assert third.rewards.squeeze(-1).tolist() == [[40, 50], [41, 0]]
    assert third.terminated.squeeze(-1).int().tolist() == [[0, 1], [1, 0]]
    assert all(t.scores.tolist() == [1, 1] for t in played.trajectories)
    assert third.replay_inputs["seen"].tolist() == [[[4, 0], [5, 0]], [[4, 1], [5, 0]]]
    assert first.bootstrap_values is not None and third.bootstrap_values is not None
    assert first.bootstrap_values[0, 0] == 1 and first.bootstrap_values[:, 1].tolist() == [101, 102, 103, 104]
    assert third.bootstrap_values[:, 0].tolist() == [401, 402] and third.bootstrap_values[0, 1] == 501


@settings(deadline=None, max_examples=60)
@given(data=st.data(), envs=st.integers(1, 4), epochs=st.integers(2, 4), chunk=st.integers(1, 3), batched=st.booleans())
def test_it_is_recorded_as_if_each_epoch_had_been_played_by_itself(
    data: st.DataObject, envs: int, epochs: int, chunk: int, batched: bool
) -> None:
    count = envs * epochs
    lengths = data.draw(st.lists(st.integers(1, LONGEST), min_size=count, max_size=count))
    together = play(lengths, envs, chunk, batched=batched, epochs=epochs)
    apart = [play(lengths, envs, chunk, batched=batched, epochs=1, first=e * envs) for e in range(epochs)]
    assert max(together.complete_at) <= sum(max(played.complete_at) for played in apart)
    assert together.complete_at == sorted(together.complete_at)
    replays = [ReplayBuffer(1000, gamma=0.9) for _ in range(2)]
    for ours, played in zip(together.trajectories, apart, strict=True):
        [theirs] = played.trajectories
        for name in ("env_ids", "group_ids", "rollout_epoch", "scores"):
            one, another = getattr(ours, name), getattr(theirs, name)
            assert one == another if name == "rollout_epoch" else torch.equal(one, another), name
        for name in ("rewards", "terminated", "truncated", "valid"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        taken = ours.valid.any(-1)
        for name in ("logprobs", "values", "bootstrap_values", "actions", "task_ids"):
            assert torch.equal(getattr(ours, name)[taken], getattr(theirs, name)[taken]), name
        assert torch.equal(ours.replay_inputs["seen"][taken], theirs.replay_inputs["seen"][taken])
        for buffer, trajectory in zip(replays, (ours, theirs), strict=True):
            buffer.add(trajectory)
    ours, theirs = (buffer.sample(torch.arange(len(buffer))) for buffer in replays)
    for name in ("actions", "rewards", "discounts"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert torch.equal(ours.inputs["seen"], theirs.inputs["seen"])
    assert torch.equal(ours.next_inputs["seen"], theirs.next_inputs["seen"])


GREEDY = "algorithm.sampling_params.temperature=1e-30"


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_job_with_four_epochs_records_what_four_of_one_epoch_do(algorithm: str) -> None:
    """With values of a critic, too. Which lane meets which episode does not depend on it."""
    options = (f"algorithm={algorithm}", GREEDY, "rollout.pipeline_stage_num=2", "env.train.max_episode_steps=40")
    found: list[list[Trajectory]] = []
    for epochs, rollouts in ((4, 1), (1, 4)):
        with Job(easy(small(*options, f"algorithm.rollout_epoch={epochs}"), 1.4)) as job:
            rolled = [job.roll(2, first_epoch=number) for number in range(rollouts)]
        found.append([trajectory for trajectories, _, _ in rolled for trajectory in trajectories])
        episodes = [e for _, reports, _ in rolled for report in reports for e in report.episodes]
        assert len(episodes) == 4 * 16
        assert {e.success for e in episodes} == {True, False}
    assert len(found[0]) == len(found[1]) == 4 * 4
    for ours, theirs in zip(*found, strict=True):
        assert (ours.rollout_epoch, ours.env_ids.tolist(), ours.group_ids.tolist()) == (
            theirs.rollout_epoch,
            theirs.env_ids.tolist(),
            theirs.group_ids.tolist(),
        )
        assert torch.equal(ours.valid, theirs.valid)
        assert torch.equal(ours.scores, theirs.scores)
        taken = ours.valid.any(-1)
        for name in ("rewards", "values", "bootstrap_values"):
            one, another = getattr(ours, name), getattr(theirs, name)
            if one is not None:
                torch.testing.assert_close(one[taken], another[taken], rtol=1e-4, atol=1e-5)


def test_fewer_decisions_serve_as_many_episodes() -> None:
    options = ("algorithm=ppo", "env.train.max_episode_steps=40", "rollout.pipeline_stage_num=1")
    options += ("cluster.component_placement.env=0",)
    inferences = []
    for epochs, rollouts in ((4, 1), (1, 4)):
        with Job(easy(small(*options, f"algorithm.rollout_epoch={epochs}"))) as job:
            rolled = [job.roll(2, first_epoch=number) for number in range(rollouts)]
        inferences.append(sum(report.inferences for _, _, reports in rolled for report in reports))
    assert inferences[0] < 0.9 * inferences[1], "nobody waits for the longest"


def test_each_epoch_has_its_own_video_whichever_env_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group members stand beside each other, and an epoch's film is written when its last episode has ended."""
    written: dict[str, dict[int, list[int]]] = {}

    def write(recorder: VideoRecorder, path: Path, envs: object = None) -> Path:
        written[path.name] = {env: [moment.step for moment in kept] for env, kept in recorder._moments.items()}
        return path

    monkeypatch.setattr(VideoRecorder, "write", write)
    options = ("algorithm=ppo", GREEDY, "env.train.max_episode_steps=40", "env.train.video_cfg.save_video=true")
    options += ("env.train.video_cfg.max_videos=2", "cluster.component_placement.env=0", "rollout.pipeline_stage_num=1")
    found = []
    for epochs, rollouts in ((3, 1), (1, 3)):
        with Job(easy(small(*options, f"algorithm.rollout_epoch={epochs}"), 1.4)) as job:
            for number in range(rollouts):
                job.roll(2, first_epoch=number, video_dir=tmp_path)
        found.append(dict(written))
        written.clear()
    assert found[0] == found[1]
    assert sorted(found[0]) == ["epoch0_worker0_stage0.mp4", "epoch1_worker0_stage0.mp4"]
    assert all(sorted(tiles) == list(range(16)) for tiles in found[0].values())
    assert len({len(steps) for tiles in found[0].values() for steps in tiles.values()}) > 1


def test_too_few_episodes_are_refused() -> None:
    with pytest.raises(ValueError, match="got 1 episodes, expected one at least for 2 envs"):
        EpisodeQueue([0], range(2))


def lengths_of(queue: EpisodeQueue, lengths: list[int], envs: int) -> tuple[int, int, list[int]]:
    """Rounds until all has been played, the most tasks at once of a queue with one task for two numbers, and the order
    in which episodes ended."""
    left, rounds, most, ended = {slot: lengths[slot] for slot in range(envs)}, 0, 0, []
    while left:
        rounds += 1
        assert rounds <= sum(lengths), "somebody plays"
        most = max(most, len({int(queue.playing[slot]) // 2 for slot in left}))
        waiting = [slot for slot in range(envs) if slot not in left]
        over = [slot for slot in sorted(left) if left[slot] == 1]
        ended += [int(queue.playing[slot]) for slot in over]
        left = {slot: rest - 1 for slot, rest in left.items() if rest > 1}
        for slot in (*over, *waiting):  # as the env asks
            if queue(slot, 0) is not None:
                left[slot] = lengths[int(queue.playing[slot])]
    return rounds, most, ended


@settings(deadline=None, max_examples=200)
@given(data=st.data(), envs=st.integers(1, 6), rows=st.integers(1, 5), at_once=st.integers(1, 4) | st.none())
def test_all_is_played_in_time_however_few_tasks_fit(
    data: st.DataObject, envs: int, rows: int, at_once: int | None
) -> None:
    longest, count = 5, envs * rows
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=count, max_size=count))
    tasks = [number // 2 for number in range(count)]
    queue = EpisodeQueue(range(count), range(envs), tasks=tasks, at_once=at_once)
    rounds, most, ended = lengths_of(queue, lengths, envs)
    assert sorted(ended) == list(range(count)), "each once"
    assert rounds <= longest * rows
    of_a_row = envs // 2 + 1
    assert at_once is None or most <= max(at_once, of_a_row)


def test_a_straggler_keeps_the_tasks_together() -> None:
    lengths = [40, *[1] * 11]
    alone, few = (
        lengths_of(EpisodeQueue(range(12), range(2), tasks=[n // 2 for n in range(12)], at_once=n), lengths, 2)
        for n in (None, 2)
    )
    assert alone[:2] == (40, 2) and few[:2] == (40, 2)
    lengths = [40, *[1] * 23]
    of_four = [
        lengths_of(EpisodeQueue(range(24), range(4), tasks=[n // 2 for n in range(24)], at_once=n), lengths, 4)[:2]
        for n in (None, 2)
    ]
    assert of_four[0] == (40, 3) and of_four[1][1] == 2


def test_what_a_queue_says_of_itself() -> None:
    queue = EpisodeQueue([7, None], range(5, 7))
    assert (len(queue), queue.begun, queue.first, queue(5, 1)) == (1, 1, [7, None], None)
    assert queue.further is None
    queue = EpisodeQueue([7, 8, 9], range(5, 7))
    assert (len(queue), queue.begun, queue.played_by(6)) == (3, 2, 1)
    assert queue.further is queue
    assert (queue(6, 1), queue.begun, queue.played_by(6), queue(5, 1)) == (9, 3, 2, None)
