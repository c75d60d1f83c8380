from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from embodied_rl.contracts import Trajectory
from embodied_rl.errors import UserError
from embodied_rl.evaluation.views import MOST
from embodied_rl.schema import EmbodiedConfig
from tests.workers.job import Job, easy, small
from tests.workers.test_actor import vision


def layout(env_workers: int, stages: int) -> tuple[str, str]:
    return f"cluster.component_placement.env=0-{env_workers - 1}", f"rollout.pipeline_stage_num={stages}"


def starts(trajectories: list[Trajectory]) -> dict[int, list[float]]:
    """Env id -> its first state."""
    return {
        int(env_id): trajectory.replay_inputs["state"][0, place].tolist()
        for trajectory in trajectories
        for place, env_id in enumerate(trajectory.env_ids)
    }


def test_two_workers_with_two_stages_have_the_right_envs_and_groups() -> None:
    with Job(small(*layout(2, 2), "algorithm.group_size=2", "algorithm.rollout_epoch=2")) as job:
        trajectories, reports, _ = job.roll()
    assert len(reports) == 2
    assert len(trajectories) == 2 * 2 * 2
    for place, trajectory in enumerate(trajectories):
        epoch, lane = divmod(place, 4)
        ids = [4 * lane + i for i in range(4)]
        assert trajectory.rollout_epoch == epoch
        assert trajectory.env_ids.tolist() == ids
        assert trajectory.group_ids.tolist() == [8 * epoch + i // 2 for i in ids]
    assert sum(report.env_steps for report in reports) == sum(int(t.valid.sum()) for t in trajectories)


@pytest.mark.parametrize("group_size", [2, 4])
def test_a_group_starts_from_one_state(group_size: int) -> None:
    config = small(f"algorithm.group_size={group_size}", "algorithm.rollout_epoch=2")
    seen: list[tuple[float, ...]] = []
    with Job(config) as job:
        for step in range(2):
            trajectories, _, _ = job.roll(step)
            for epoch in range(2):
                first = starts([t for t in trajectories if t.rollout_epoch == epoch])
                groups = [tuple(first[env_id]) for env_id in range(0, 16, group_size)]
                assert [tuple(first[env_id]) for env_id in range(16)] == [g for g in groups for _ in range(group_size)]
                assert len(set(groups)) == len(groups)
                seen += groups
    assert len(set(seen)) > len(seen) * 0.7, "each rollout draws anew"


def test_fixed_initial_states_stay() -> None:
    with Job(small("env.train.use_fixed_reset_state_ids=true")) as job:
        assert starts(job.roll(0)[0]) == starts(job.roll(1)[0])


def test_weights_of_tasks_are_a_list_for_the_chosen_tasks_or_come_with_the_step() -> None:
    def played(trajectories: list[Trajectory]) -> Counter[int]:
        tasks = torch.cat([t.task_ids[0] for t in trajectories if t.task_ids is not None])
        return Counter(tasks.tolist())

    chosen = ("algorithm=ppo", "env.task_ids=[3,1]")
    with Job(small(*chosen, "env.train.task_sampling=[3.0,1.0]")) as job:
        assert played(job.roll()[0]) == {3: 12, 1: 4}
    with Job(small(*chosen, "env.train.task_sampling=success")) as job:
        assert played(job.roll(0)[0]) == {3: 8, 1: 8}
        assert played(job.roll(1, task_weights={3: 0.05, 1: 0.15})[0]) == {3: 4, 1: 12}
    with pytest.raises(UserError, match=r"task_sampling: got 1 weights, expected one for each of the 2 tasks \[3, 1\]"):
        Job(small(*chosen, "env.train.task_sampling=[1.0]")).__enter__()


def test_states_that_are_left_to_evaluation_are_not_trained_on() -> None:
    few = ("algorithm=ppo", "env.init_params.states_per_task=3")
    every_state = {tuple(start) for start in starts_of_steps(*few)}
    left = {tuple(start) for start in starts_of_steps(*few, "env.train.skip_states=2")}
    assert len(every_state) == 4 * 3
    assert len(left) == 4
    assert left < every_state


def starts_of_steps(*options: str) -> list[list[float]]:
    with Job(small(*options)) as job:
        return [start for step in range(4) for start in starts(job.roll(step)[0]).values()]


def test_the_layout_does_not_change_where_envs_start() -> None:
    found = []
    for env_workers, stages in ((1, 1), (2, 2), (4, 1)):
        with Job(small(*layout(env_workers, stages))) as job:
            found.append(starts(job.roll(3)[0]))
    assert found[0] == found[1] == found[2]
    assert list(found[0]) == list(range(16))


def long_episodes(*options: str) -> EmbodiedConfig:
    """Episodes of up to 40 steps in chunks of 4, most of which end much earlier."""
    return easy(small("env.train.max_episode_steps=40", "env.eval.max_episode_steps=40", *options))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(
    ("env_workers", "stages", "rollout_workers"), [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 1, 2), (1, 4, 1)]
)
def test_lanes_that_end_early_and_at_different_times(
    algorithm: str, env_workers: int, stages: int, rollout_workers: int
) -> None:
    config = long_episodes(
        f"algorithm={algorithm}",
        *layout(env_workers, stages),
        f"cluster.component_placement.rollout=0-{rollout_workers - 1}",
        "algorithm.rollout_epoch=2",
    )
    with Job(config) as job:
        for step in range(2):
            trajectories, reports, _ = job.roll(step)
            job.update(step)
            job.sync(step + 1)
            assert len(trajectories) == 2 * env_workers * stages
            lengths = [len(t.rewards) for t in trajectories]
            assert min(lengths) < 10 or env_workers * stages == 1, "a lane ended before the last chunk"
            assert len(trajectories) == 2 or len(set(lengths)) > 1
            assert sum(len(report.episodes) for report in reports) == 2 * 16, "every env one episode an epoch"
            for trajectory in trajectories:
                ended = trajectory.terminated | trajectory.truncated
                assert (ended.sum((0, 2)) == 1).all()
                steps = trajectory.valid.transpose(0, 1).flatten(1)
                assert torch.equal(steps.sum(1), ended.transpose(0, 1).flatten(1).float().argmax(1) + 1)
                assert trajectory.valid[-1].any(), "no chunk after the last env was done"


def test_auto_reset_fills_the_rollout_with_episodes() -> None:
    config = easy(
        small(
            "algorithm=ppo",
            "env.train.auto_reset=true",
            "env.train.max_episode_steps=6",
            "env.train.max_steps_per_rollout_epoch=24",
        ),
        0.95,
    )
    with Job(config) as job:
        trajectories, reports, _ = job.roll()
    assert all(len(t.rewards) == 6 for t in trajectories)
    ended = sum(int((t.terminated | t.truncated).sum()) for t in trajectories)
    assert sum(len(report.episodes) for report in reports) == ended > 2 * 16
    for trajectory in trajectories:
        assert trajectory.valid[:, :, 0].all(), "the next episode starts at the next chunk"


GOING_ON = ("algorithm=ppo", "env.train.auto_reset=true", "env.train.max_episode_steps=40")


@pytest.mark.parametrize(("env_workers", "stages"), [(1, 1), (2, 2)])
def test_first_episodes_are_cut_evenly_group_by_group(env_workers: int, stages: int) -> None:
    options = ("env.train.stagger=true", "env.train.max_steps_per_rollout_epoch=100", "algorithm.group_size=2")
    with Job(small(*GOING_ON, *options, *layout(env_workers, stages))) as job:
        trajectories, reports, _ = job.roll()
    ended: dict[int, list[int]] = {env_id: [] for env_id in range(16)}
    for t in trajectories:
        for place, env_id in enumerate(t.env_ids.tolist()):
            steps = t.valid[:, place].flatten().cumsum(0)
            ended[env_id] += steps[(t.terminated | t.truncated)[:, place].flatten()].tolist()
    firsts = {env_id: 5 * (1 + env_id // 2) for env_id in range(16)}
    # A new episode begins with a chunk of four.
    assert ended == {
        env_id: [n for n in (first, first + 40, first + 80) if n <= 100] for env_id, first in firsts.items()
    }
    told = [record for report in reports for record in report.episodes]
    assert {record.episode_length for record in told} == {40}, "nobody is told of what was cut short"


def test_with_auto_reset_episodes_go_on_in_the_next_rollout() -> None:
    """Forty steps an episode, eight a rollout: states beyond the eighth step are met, and failures counted."""
    config = small(*GOING_ON, "env.train.max_steps_per_rollout_epoch=8", "algorithm.rollout_epoch=2", *layout(2, 2))
    config = easy(config, 0.35)
    with Job(config) as job:
        rolled = [job.roll(step) for step in range(5)]
    seen = {env_id: [] for env_id in range(16)}
    for trajectories, _, _ in rolled:
        for t in trajectories:
            for place, env_id in enumerate(t.env_ids.tolist()):
                seen[env_id].append((t, place))
    for rollouts in seen.values():
        assert len(rollouts) == 10
        steps, lengths = 0, []
        for t, place in rollouts:
            for valid, ended in zip(t.valid[:, place], (t.terminated | t.truncated)[:, place], strict=True):
                steps += int(valid.sum())
                if ended.any():
                    lengths.append(steps)
                    steps = 0
        assert sum(lengths) + steps == sum(int(t.valid[:, place].sum()) for t, place in rollouts)
        assert max([*lengths, steps]) > 8, "an episode went on"
        # Whatever was met first in a rollout is what the one before it ended with, or a start.
        for (before, place), (t, same) in itertools.pairwise(rollouts):
            if not (before.terminated | before.truncated)[-1, place].any():
                moved = t.replay_inputs["state"][0, same] - before.replay_inputs["state"][-1, place]
                assert not moved[2:].any(), "the goal is that of the same episode"
    episodes = [e for _, reports, _ in rolled for report in reports for e in report.episodes]
    ended = sum(int((t.terminated | t.truncated).sum()) for trajectories, _, _ in rolled for t in trajectories)
    assert len(episodes) == ended, "each once"
    assert any(not e.success and e.episode_length == 40 for e in episodes)
    assert any(e.success for e in episodes)


@pytest.mark.parametrize("horizon", [4, 8, 40])
def test_rollouts_are_cut_anywhere(horizon: int) -> None:
    """The same policy, whose actions are the greedy ones, plays the same episodes in rollouts of any length."""
    found = []
    for steps, rollouts in ((8, 10), (80, 1)):
        options = (*GOING_ON, f"env.train.max_episode_steps={horizon}", "algorithm.sampling_params.temperature=1e-30")
        config = easy(small(*options, f"env.train.max_steps_per_rollout_epoch={steps}"))
        with Job(config) as job:
            reports = [report for step in range(rollouts) for report in job.roll(step)[1]]
        found.append(sorted((e.env_id, e.reset_state_id, e.episode_length, e.success, e.episode_return)
                            for report in reports for e in report.episodes))  # fmt: skip
    assert found[0] == found[1]
    assert found[0]


def test_an_evaluation_in_between_disturbs_nothing() -> None:
    found = []
    for evaluates in (False, True):
        with Job(easy(small(*GOING_ON, "env.train.max_steps_per_rollout_epoch=8"))) as job:
            first, _, _ = job.roll(0)
            if evaluates:
                job.evaluate()
            found.append([t.replay_inputs["state"] for t in (*first, *job.roll(1)[0])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_envs_are_resumed_by_another_number_of_workers() -> None:
    options = (*GOING_ON, "env.train.max_steps_per_rollout_epoch=8")
    with Job(easy(small(*options, *layout(2, 2)), 0.4)) as job:
        open_episodes = [e for report in [*job.roll(0)[1], *job.roll(1)[1]][-2:] for e in report.open_episodes]
    assert [e.env_id for e in open_episodes] == list(range(16))
    assert len({len(e.actions) for e in open_episodes}) > 1
    for env_workers, stages in ((1, 1), (4, 1)):
        with Job(easy(small(*options, *layout(env_workers, stages)), 0.4)) as job:
            assert job.resume(open_episodes) == []
            first = starts(job.roll(2)[0])
        assert {e.env_id: e.state.tolist() for e in open_episodes} == first


LAYOUTS = [
    # env workers, stages, rollout workers, envs, episodes per task: what it is about
    (1, 1, 1, 8, 3),  # 12 episodes: a last wave of 4
    (2, 2, 1, 8, 3),  # 3 episodes a lane of 2
    (2, 2, 2, 4, 5),  # 5 waves of one env
    (2, 2, 1, 32, 1),  # one episode a lane of 8
    (4, 2, 2, 8, 1),  # 8 lanes for 4 episodes
    (3, 1, 2, 3, 3),  # rollout workers with two lanes and with one
    (3, 1, 1, 3, 1),  # 4 episodes over 3 lanes: 2, 1 and 1 waves
]


@pytest.mark.parametrize(("env_workers", "stages", "rollout_workers", "envs", "per_task"), LAYOUTS)
def test_evaluation_runs_the_first_states_of_every_task_once(
    env_workers: int, stages: int, rollout_workers: int, envs: int, per_task: int
) -> None:
    config = long_episodes(
        f"cluster.component_placement.rollout=0-{rollout_workers - 1}",
        *layout(env_workers, stages),
        "env.train.total_num_envs=96",
        f"env.eval.total_num_envs={envs}",
        f"env.eval.episodes_per_task={per_task}",
    )
    expected = Counter((task, 64 * task + state) for task in range(4) for state in range(per_task))
    with Job(config) as job:
        first = job.evaluate()
        assert Counter((e.task_id, e.reset_state_id) for e in first) == expected
        again = job.evaluate(step=1)
        assert sorted(map(str, first)) == sorted(map(str, again)), "greedy, and no state is left over"
        trajectories, _, _ = job.roll()
        assert len(trajectories) == env_workers * stages, "training goes on after it"


def test_the_pictures_that_all_episodes_begin_with_are_reported() -> None:
    """Not those of the first ones alone, which may be of one task."""
    options = (
        "env.eval.total_num_envs=2",
        "env.eval.episodes_per_task=6",
        "algorithm=ppo",
        "algorithm.rollout_epoch=4",
    )
    config = vision(long_episodes(*options, "rollout.pipeline_stage_num=1", "cluster.component_placement.env=0"))
    with Job(config) as job:
        [evaluated] = job.evaluation()
        _, [trained], _ = job.roll()
    for report, episodes in ((evaluated, 4 * 6), (trained, 4 * 16)):
        assert report.views is not None
        assert [len(thumbnails) for thumbnails in report.views.cameras.values()] == [min(episodes, MOST)]


def test_evaluation_of_chosen_tasks() -> None:
    config = long_episodes()
    config = replace(config, env=replace(config.env, task_ids=[2, 0]))
    with Job(config) as job:
        assert {(e.task_id, e.reset_state_id) for e in job.evaluate()} == {(2, 128), (2, 129), (0, 0), (0, 1)}


def test_evaluation_alone_builds_no_training_env() -> None:
    config = small()
    config = replace(config, runner=replace(config.runner, only_eval=True))
    with Job(config) as job:
        assert len(job.evaluate()) == 8
        assert all(not worker._train for worker in job._workers(job._env))
