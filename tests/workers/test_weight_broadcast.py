from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.channel.base import run_blocking
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from embodied_rl.cli import config_of
from embodied_rl.contracts import TensorLayout
from embodied_rl.errors import ConfigError, WeightSyncError
from embodied_rl.runtime import signals
from embodied_rl.workers.weight_broadcast import Announcement, BroadcastReceiver, BroadcastSender, host_of
from embodied_rl.workers.weight_sync import WeightReceiver, WeightSender
from tests.gathered import full_state_dict
from tests.training.rollouts import small_policy
from tests.workers.test_weight_sync import BUCKET, fill, sharded

SPAWN = mp.get_context("spawn")
KEYS = (0, 1)


def serve(channel: SharedMemoryChannel, key: int, dtype: torch.dtype, pipe: Connection) -> None:
    """A rollout worker's process: gives what it holds after every version."""
    torch.set_num_threads(1)
    policy = small_policy(1, seed=1).to(dtype)
    receiver = WeightReceiver(policy.state_dict(), BroadcastReceiver(channel, device="cpu", rank=key), key)
    while pipe.recv():
        try:
            version = run_blocking(receiver.receive())
        except WeightSyncError as error:
            pipe.send(str(error))
        else:
            pipe.send((version, {name: tensor.clone().numpy() for name, tensor in policy.float().state_dict().items()}))
    signals.leave()


class Workers:
    """Two rollout workers in processes of their own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.channel = SharedMemoryChannel("weights", KEYS, 2, SPAWN)
        self.pipes, self.processes = [], []
        for key in KEYS:
            ours, theirs = SPAWN.Pipe()
            self.processes.append(SPAWN.Process(target=serve, args=(self.channel, key, dtype, theirs), daemon=True))
            self.processes[-1].start()
            self.pipes.append(ours)

    def sender(self, policy: Any, **options: Any) -> WeightSender:
        way = BroadcastSender(self.channel, device="cpu", host="127.0.0.1", receivers=len(KEYS))
        return WeightSender(policy, way, KEYS, bucket_bytes=BUCKET, **options)

    def expect(self) -> None:
        for pipe in self.pipes:
            pipe.send(True)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def test_versions_are_broadcast_bit_for_bit(mesh: DeviceMesh) -> None:
    """Every tensor of the first version, then only what is trained; both receivers verify the checksums of all."""
    workers, policy = Workers(), sharded(mesh)
    frozen = next(iter(policy.parameters()))
    frozen.requires_grad_(False)
    sender = workers.sender(policy, verify=True)
    try:
        sizes = []
        for version in range(3):
            workers.expect()
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.normal_()
            sizes.append(run_blocking(sender.send(version)))
            whole = full_state_dict(policy)
            for pipe in workers.pipes:
                held, state = pipe.recv()
                assert held == version
                assert state.keys() == whole.keys()
                assert all(torch.equal(torch.from_numpy(state[name]), whole[name]) for name in whole)
        assert sizes[1] == sizes[2] == sizes[0] - frozen.nbytes
    finally:
        workers.end()


def test_a_broadcast_may_round(mesh: DeviceMesh) -> None:
    workers, policy = Workers(torch.bfloat16), sharded(mesh)
    try:
        workers.expect()
        fill(policy, 1.0 / 3.0)
        run_blocking(workers.sender(policy, dtype=torch.bfloat16).send(0))
        rounded = torch.tensor(1.0 / 3.0).bfloat16().float().item()
        for pipe in workers.pipes:
            _, state = pipe.recv()
            assert {value for array in state.values() for value in array.ravel().tolist()} == {rounded}
    finally:
        workers.end()


def test_a_worker_that_is_gone_ends_the_broadcast(mesh: DeviceMesh) -> None:
    workers, policy = Workers(), sharded(mesh)
    sender = workers.sender(policy)
    try:
        workers.expect()
        run_blocking(sender.send(0))
        for pipe in workers.pipes:
            pipe.recv()
        workers.processes[1].kill()
        workers.processes[1].join()
        workers.pipes[0].send(True)
        with pytest.raises(WeightSyncError, match="a worker is gone"):
            run_blocking(sender.send(1))
    finally:
        workers.end()


def test_places_of_pieces_are_aligned() -> None:
    """1, 16 and 20 bytes: they begin at 0, 16 and 32, and end at 64."""
    layouts = ((1, torch.uint8), (4, torch.float32), (10, torch.bfloat16))
    pieces = tuple((str(n), 0, TensorLayout(shape=(n,), dtype=dtype)) for n, dtype in layouts)
    assert Announcement(version=0, number=0, pieces=pieces).places() == ([0, 16, 32], 64)


def test_where_they_meet() -> None:
    assert host_of("/a/file") == "127.0.0.1"
    assert host_of("tcp://10.0.0.7:1234") == "10.0.0.7"


def test_what_no_collective_joins_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = "actor.sync_backend=collective"
    with pytest.raises(ConfigError, match=r"actor\.sync_backend: got collective, but with cluster=serial there is one"):
        config_of("env=dummy", "cluster=serial", collective)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="NCCL joins no two workers of one accelerator"):
        config_of("env=dummy", "cluster=process", collective)
    config_of("env=dummy", "cluster=process", collective, "cluster.component_placement.rollout=1")
