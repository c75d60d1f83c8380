from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.channel.in_process import InProcessChannel
from embodied_rl.contracts import ActionChunk, EnvObs, Trajectory
from embodied_rl.models.base import Policy
from embodied_rl.workers.rollout import RolloutWorker
from tests.fakes import seen_after
from tests.workers.job import ChunkSpy, Job, easy, small


def value_of(policy: Policy, obs: EnvObs) -> Tensor:
    """[N]: of the state, by the first value of a chunk."""
    return policy.values(obs)[:, 0]


def check_bootstrap(job: Job, trajectory: Trajectory, spy: ChunkSpy) -> int:
    """Compare with the policy's own values of what the envs showed; returns how many came from final observations."""
    results = spy.results[int(trajectory.env_ids[0])]
    assert trajectory.bootstrap_values is not None
    assert len(results) == len(trajectory.rewards)
    finals = 0
    for t, result in enumerate(results):
        expected = value_of(job.policy, seen_after(result))
        if result.final_obs is not None:
            place = [trajectory.env_ids.tolist().index(i) for i in result.final_obs.env_ids.tolist()]
            expected[place] = value_of(job.policy, result.final_obs)
            assert (result.truncated | result.terminated).any(-1)[place].all()
            finals += len(place)
        assert torch.allclose(trajectory.bootstrap_values[t], expected, rtol=0, atol=1e-6)
    return finals


@pytest.mark.parametrize("reward_type", ["chunk_level", "action_level"])
def test_bootstrap_values_with_auto_reset(monkeypatch: pytest.MonkeyPatch, reward_type: str) -> None:
    """Episodes of at most 6 steps end in the middle of chunks of 4; four chunks hold several of them."""
    spy = ChunkSpy(monkeypatch)
    config = small(
        "algorithm=ppo",
        f"algorithm.reward_type={reward_type}",
        "env.train.auto_reset=true",
        "env.train.max_episode_steps=6",
        "env.train.max_steps_per_rollout_epoch=16",
    )
    finals = {"terminated": 0, "truncated": 0}
    with Job(easy(config, 0.95)) as job:
        trajectories, _, _ = job.roll()
        for trajectory in trajectories:
            ended = check_bootstrap(job, trajectory, spy)
            assert ended == int((trajectory.terminated | trajectory.truncated).sum())
            for name in finals:
                finals[name] += int(getattr(trajectory, name).sum())
            assert trajectory.bootstrap_values is not None
            assert trajectory.values is not None
            # Where an episode ended, V(final_obs) is another value than that of the next chunk's first state.
            ended_chunks = (trajectory.terminated | trajectory.truncated).any(-1)[:-1]
            same = torch.isclose(trajectory.bootstrap_values[:-1], trajectory.values[1:, :, 0], rtol=0, atol=1e-6)
            assert not same[ended_chunks].any()
            assert same[~ended_chunks].all()
    assert min(finals.values()) > 0, "both kinds of end occur"


@pytest.mark.parametrize("reward_type", ["chunk_level", "action_level"])
def test_bootstrap_values_without_auto_reset(monkeypatch: pytest.MonkeyPatch, reward_type: str) -> None:
    spy = ChunkSpy(monkeypatch)
    config = small("algorithm=ppo", f"algorithm.reward_type={reward_type}", "env.train.max_episode_steps=6")
    with Job(config) as job:
        trajectories, _, _ = job.roll()
        for trajectory in trajectories:
            assert check_bootstrap(job, trajectory, spy) == 0
            assert trajectory.truncated[1, :, 1].all(), "the sixth step of eight"
            last = seen_after(spy.results[int(trajectory.env_ids[0])][-1])
            assert trajectory.bootstrap_values is not None
            expected = value_of(job.policy, last)
            assert torch.allclose(trajectory.bootstrap_values[-1], expected, rtol=0, atol=1e-6), "V(final_obs)"


def test_recorded_values_and_logprobs_are_the_policys_own() -> None:
    with Job(small("algorithm=ppo", "algorithm.sampling_params.temperature=1.3")) as job:
        trajectories, _, _ = job.roll()
        for trajectory in trajectories:
            flat = {key: tensor.flatten(0, 1) for key, tensor in trajectory.replay_inputs.items()}
            evaluation = job.policy.evaluate(flat, temperature=1.3)
            assert torch.allclose(trajectory.logprobs.flatten(0, 1), evaluation.logprobs, rtol=0, atol=1e-5)
            assert trajectory.values is not None
            assert evaluation.values is not None
            assert torch.allclose(trajectory.values.flatten(0, 1), evaluation.values, rtol=0, atol=1e-6)


def test_without_a_value_head_nothing_is_valued() -> None:
    with Job(small("algorithm=grpo")) as job:
        trajectories, _, [report] = job.roll()
        assert all(t.values is None and t.bootstrap_values is None for t in trajectories)
        assert report.inferences == 2 * 2, "two stages of two chunks"
    with Job(small("algorithm=ppo")) as job:
        _, _, [report] = job.roll()
        assert report.inferences == 2 * 3, "and one more for the value of the last state"


def test_the_version_of_the_weights_is_recorded() -> None:
    with Job(small()) as job:
        assert {v for t in job.roll()[0] for v in t.policy_versions.unique().tolist()} == {0}
        job.update()
        job.sync(7)
        assert {v for t in job.roll()[0] for v in t.policy_versions.unique().tolist()} == {7}


def test_weights_change_at_a_sync_and_not_before() -> None:
    with Job(small()) as job:
        before = {name: tensor.clone() for name, tensor in job.policy.state_dict().items()}
        job.roll()
        job.update()
        assert all(torch.equal(tensor, before[name]) for name, tensor in job.policy.state_dict().items())
        job.sync(1)
        weights = job.weights()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in job.policy.state_dict().items())
        assert not all(torch.equal(tensor, before[name]) for name, tensor in job.policy.state_dict().items())


def equal(left: list[Trajectory], right: list[Trajectory]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.logprobs, b.logprobs) and torch.equal(a.rewards, b.rewards)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("rollout_workers", [1, 2])
def test_the_same_rollout_again(rollout_workers: int) -> None:
    """Batches are the same in each run, and so is every bit. Another number of rollout workers makes other batches and
    other random streams."""
    config = small(f"cluster.component_placement.rollout=0-{rollout_workers - 1}")
    runs = []
    for _ in range(2):
        with Job(config) as job:
            runs.append([job.roll(step)[0] for step in range(2)])
    assert equal(runs[0][0], runs[1][0])
    assert equal(runs[0][1], runs[1][1])
    assert not equal(runs[0][0], runs[0][1])


def test_every_lane_step_and_round_has_random_numbers_of_its_own() -> None:
    with Job(small("algorithm.rollout_epoch=2")) as job:
        noise: list[float] = []
        for trajectory in [t for step in range(2) for t in job.roll(step)[0]]:
            mean = job.policy.act(observations(trajectory), greedy=True, temperature=1.0, generator=None)
            samples = trajectory.replay_inputs["samples"].flatten(0, 1)
            noise += [round(x, 3) for x in (samples - mean.replay_inputs["samples"]).flatten(1)[:, :3].sum(1).tolist()]
        assert len(set(noise)) > 0.9 * len(noise)


def observations(trajectory: Trajectory) -> EnvObs:
    state = trajectory.replay_inputs["state"].flatten(0, 1)
    return EnvObs(env_ids=torch.arange(len(state)), images={}, state=state, instructions=("",) * len(state))


def test_greedy_evaluation_does_not_depend_on_the_number_of_rollout_workers() -> None:
    outcomes = []
    for ranks in ("0", "0-1"):
        with Job(easy(small(f"cluster.component_placement.rollout={ranks}"))) as job:
            outcomes.append({e.reset_state_id: (e.success, e.episode_length) for e in job.evaluate()})
    assert outcomes[0] == outcomes[1]


def test_the_envs_are_answered_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They step while the last states are valued and noted down."""
    events: list[str] = []
    put, record = InProcessChannel.put, RolloutWorker._record

    async def noted(channel: InProcessChannel, item: Any, **options: Any) -> None:
        if isinstance(item, ActionChunk):
            events.append("answer")
        await put(channel, item, **options)

    def recorded(worker: RolloutWorker, turns: Any, decisions: Any) -> None:
        events.append("record")
        record(worker, turns, decisions)

    monkeypatch.setattr(InProcessChannel, "put", noted)
    monkeypatch.setattr(RolloutWorker, "_record", recorded)
    with Job(small("algorithm=ppo", "rollout.pipeline_stage_num=1")) as job:
        job.roll()
    lanes = events.index("record")
    assert lanes > 0 and events == (["answer"] * lanes + ["record"]) * 2 + ["record"], "two chunks, and the end"
