"""What rollout workers hand to the actor in ``task=embodied_sft``: its order, masks, and how far they read ahead."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.contracts import Trajectory
from embodied_rl.demonstrations.dataset import Demonstrations, frames_of_step
from embodied_rl.errors import UserError
from embodied_rl.launch import connect, make_backend
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.tiny_vla import TinyVlaPolicy
from embodied_rl.runtime.serial import SerialGroup
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.demonstrator import ImitationWorker
from tests.configs import embodied_sft
from tests.demonstrations.recording import record

CHUNK = 4


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("data"), range(0, 256, 32))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("pictures"), range(0, 256, 64), image_size=32, step_size=2.0)


class Job:
    """Connected workers with version 0 of the weights. Use as a context manager."""

    def __init__(self, path: Path, *overrides: str) -> None:
        config = embodied_sft(path, "cluster=serial", *overrides)
        self._backend = make_backend(config)
        try:
            _, self.rollout, self.actor = connect(config, self._backend)
            loaded = self.rollout.call(ImitationWorker.load_weights, 0)
            self.actor.call(ActorWorker.publish_weights, 0).wait()
            loaded.wait()
        except BaseException:
            self._backend.shutdown()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.shutdown()

    def worker(self, group: Any, kind: type) -> Any:
        assert isinstance(group, SerialGroup)
        assert isinstance(group.workers[0], kind)
        return group.workers[0]

    def step(self, step: int) -> Trajectory:
        """A training step's samples, in the order of their places."""
        received = self.actor.call(ActorWorker.receive, step=step)
        self.rollout.call(ImitationWorker.demonstrate, step=step).wait()
        received.wait()
        [trajectory] = self.worker(self.actor, ActorWorker)._received
        return trajectory


def test_the_actor_gets_the_frames_of_the_step_with_what_was_done_next(demonstrations: Path) -> None:
    data = Demonstrations(demonstrations, chunk=CHUNK)
    steps = -(-data.num_frames // 16)
    ends = 0
    with Job(demonstrations, "data.batch_size=16", "data.seed=5") as job:
        seen: list[float] = []
        for step in range(steps):
            t = job.step(step)
            frames = frames_of_step(data.num_frames, seed=5, step=step, batch_size=16)
            obs, actions, valid = data.sample(frames)
            assert t.env_ids.tolist() == list(range(16))
            assert torch.equal(t.replay_inputs["state"][0], obs.state)
            assert torch.equal(t.replay_inputs["samples"][0], actions)
            assert torch.equal(t.valid[0], valid)
            ends += int((~valid).any(1).sum())
            seen += obs.state[:, 0].tolist()
        whole, _, _ = data.sample(range(data.num_frames))
        assert set(seen) == set(whole.state[:, 0].tolist()), "a pass shows every frame"
        assert ends >= data.num_episodes * (CHUNK - 1), "chunks are cut at every episode's end"


def test_steps_beyond_an_episodes_end_teach_nothing(demonstrations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands there, the weights after an update are the same."""

    def trained() -> dict[str, torch.Tensor]:
        with Job(demonstrations, "data.batch_size=64") as job:
            job.step(0)
            [report] = job.actor.call(ActorWorker.update, step=0).wait()
            assert report.metrics["samples"] == 64
            return {name: t.clone() for name, t in job.worker(job.actor, ActorWorker)._policy.state_dict().items()}

    before = trained()
    original = Demonstrations.sample

    def spoiled(self: Demonstrations, frames: Sequence[int]) -> Any:
        obs, actions, valid = original(self, frames)
        actions = actions.clone()
        actions[~valid] = 0.123
        return obs, actions, valid

    monkeypatch.setattr(Demonstrations, "sample", spoiled)
    after = trained()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_reading_ahead_fills_the_channel_and_waits_for_nobody(demonstrations: Path) -> None:
    with Job(demonstrations, "data.batch_size=8", "data.prefetch=2") as job:
        for step in range(3):
            job.rollout.call(ImitationWorker.demonstrate, step=step).wait()
        channel = job.worker(job.rollout, ImitationWorker)._trajectories
        assert channel.depth() == {0: 3}
        data = Demonstrations(demonstrations, chunk=CHUNK)
        for step in range(3):
            job.actor.call(ActorWorker.receive, step=step).wait()
            [t] = job.worker(job.actor, ActorWorker)._received
            frames = frames_of_step(data.num_frames, seed=0, step=step, batch_size=8)
            assert torch.equal(t.replay_inputs["state"][0], data.sample(frames)[0].state), "in the order of the steps"


def test_each_folder_has_its_share_and_what_is_added_has_one(demonstrations: Path, tmp_path: Path) -> None:
    """Three folders and a weight for what DAgger adds, which has none as long as there is nothing."""
    folders = [
        demonstrations,
        *(record(tmp_path / name, range(start, 256, 64)) for name, start in (("b", 5), ("c", 9))),
    ]
    more = [record(tmp_path / name, [start]) for name, start in (("d", 11), ("e", 12))]
    known = [Demonstrations(folder, chunk=CHUNK) for folder in (*folders, *more)]

    def shares(trajectory: Trajectory) -> list[int]:
        rows = trajectory.replay_inputs["state"][0]
        states = [part.sample(range(part.num_frames))[0].state for part in known]
        return [int((rows[:, None] == state[None]).all(-1).any(-1).sum()) for state in states]

    mixed = (f"data.path=[{','.join(map(str, folders))}]", "data.batch_size=16")
    with Job(demonstrations, *mixed, "data.weights=[4,2,2]") as job:
        worker = job.worker(job.rollout, ImitationWorker)
        assert shares(job.step(0)) == shares(job.step(1)) == [8, 4, 4, 0, 0]
        worker._data = replace(worker._data, weights=[4.0, 2.0, 2.0, 8.0])
        assert shares(job.step(0)) == [8, 4, 4, 0, 0]
        spec = PolicySpec(
            action_dim=2, state_dim=known[0].state_dim, image_shapes={}, num_action_chunks=CHUNK, values_per_chunk=0
        )
        worker.add(spec, more)
        first = job.step(1)
        assert shares(first)[:3] == [4, 2, 2]
        assert sum(shares(first)[3:]) == 8
        assert torch.equal(first.replay_inputs["state"], job.step(1).replay_inputs["state"])


def test_several_workers_share_the_actors_ranks(demonstrations: Path) -> None:
    """Two workers and three ranks: each rank's samples come from one worker, and all of them come."""
    from embodied_rl.channel.in_process import InProcessChannel
    from embodied_rl.workers.trajectory import split_by_rank

    with Job(demonstrations, "data.batch_size=10") as job:
        whole = job.step(3)
        worker = job.worker(job.rollout, ImitationWorker)
        channel = InProcessChannel("trajectories", 4)
        worker._trajectories, worker._actor_ranks = channel, 3
        senders: dict[int, list[Hashable]] = {}
        for rank in range(2):
            worker.context.rank, worker.context.world_size = rank, 2
            job.rollout.call(ImitationWorker.demonstrate, step=3).wait()
            senders[rank] = [receiver for receiver, waiting in sorted(channel.depth().items()) if waiting]
        assert senders == {0: [0, 2], 1: [0, 1, 2]}
        from embodied_rl.channel.base import run_blocking

        for rank, part in enumerate(split_by_rank(whole, 3)):
            assert part is not None
            got = run_blocking(channel.get(key=rank)).trajectory
            assert torch.equal(got.env_ids, part.env_ids)
            assert torch.equal(got.replay_inputs["state"], part.replay_inputs["state"])


def test_images_are_changed_as_asked_and_statistics_reach_the_policies(pictures: Path) -> None:
    model = ("model=tiny_vla", "++model.params.hidden_size=32", "env.init_params.image_size=32")
    model += ("env.init_params.step_size=2.0",)
    off = "data.augmentation={random_shift: 0, brightness: 0.0, contrast: 0.0, saturation: 0.0, words: 0.0}"
    data = Demonstrations(pictures, chunk=8)
    with Job(pictures, *model, off, "data.batch_size=8", "model.num_action_chunks=8") as job:
        plain = job.step(2).replay_inputs["images/agentview"][0]
        frames = frames_of_step(data.num_frames, seed=0, step=2, batch_size=8)
        assert torch.equal(plain, data.sample(frames)[0].images["agentview"])
        actor, rollout = (
            job.worker(job.actor, ActorWorker)._policy,
            job.worker(job.rollout, ImitationWorker).policy,
        )
        assert isinstance(rollout, TinyVlaPolicy)
        assert (actor.action_low > -1.0).any()
        assert torch.equal(actor.action_low, rollout.action_low)
        assert torch.equal(actor.action_high, rollout.action_high)
        words = job.step(2).replay_inputs["words"][0]
    with Job(pictures, *model, "data.batch_size=8", "model.num_action_chunks=8", "data.augmentation.words=0.5") as job:
        changed, again = (job.step(2).replay_inputs for _ in range(2))
    assert not torch.equal(plain, changed["images/agentview"][0])
    assert not torch.equal(words, changed["words"][0])
    for key in ("images/agentview", "words"):
        assert torch.equal(changed[key], again[key])


def test_pictures_of_another_size_are_stretched_as_asked(pictures: Path) -> None:
    size = ("env.init_params.image_size=48", "data.resize=true", "env.init_params.step_size=2.0")
    with Job(pictures, "model=tiny_vla", "++model.params.hidden_size=32", *size, "data.batch_size=8") as job:
        assert job.step(0).replay_inputs["images/agentview"].shape[2:] == (48, 48, 3)


def test_a_data_set_of_another_env_is_one_message(demonstrations: Path, pictures: Path) -> None:
    with pytest.raises(UserError, match=r"was recorded without images, and the env has the cameras agentview"):
        Job(demonstrations, "model=tiny_vla", "env.init_params.image_size=32")
    with pytest.raises(UserError, match=r"agentview 32 x 32, the env's 48 x 48; stretch them with data.resize=true"):
        Job(pictures, "model=tiny_vla", "env.init_params.image_size=48")
    with pytest.raises(UserError, match=r"data.cameras: the env has no camera 'front'"):
        Job(pictures, "data.cameras={front: observation.images.agentview}")
