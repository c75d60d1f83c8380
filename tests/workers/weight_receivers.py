"""Rollout workers in processes of their own, which take weights by one of the planes beside the channel."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection
from typing import Any

import torch

from embodied_rl.channel.base import run_blocking
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from embodied_rl.errors import WeightSyncError
from embodied_rl.runtime import signals
from embodied_rl.workers.weight_broadcast import BroadcastReceiver, BroadcastSender
from embodied_rl.workers.weight_lending import LendingReceiver, LendingSender, answers_to
from embodied_rl.workers.weight_sync import WeightReceiver, WeightSender
from tests.training.rollouts import small_policy
from tests.workers.test_weight_sync import BUCKET

SPAWN = mp.get_context("spawn")
KEYS = (0, 1)


def serve(
    plane: str, device: str, channel: SharedMemoryChannel, key: int, dtype: torch.dtype, pipe: Connection
) -> None:
    """A rollout worker's process: gives what it holds after every version."""
    torch.set_num_threads(1)
    policy = small_policy(1, seed=1).to(device, dtype)
    if plane == "collective":
        end: Any = BroadcastReceiver(channel, device=device, rank=key)
    else:
        end = LendingReceiver(channel, device=device, lender=0)
    receiver = WeightReceiver(policy.state_dict(), end, key)
    while pipe.recv():
        try:
            version = run_blocking(receiver.receive())
        except WeightSyncError as error:
            pipe.send(str(error))
        else:
            whole = {name: tensor.float().cpu().numpy() for name, tensor in policy.state_dict().items()}
            pipe.send((version, whole))
    signals.leave()


class Workers:
    """Two rollout workers."""

    def __init__(self, plane: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.plane, self.device = plane, device
        self.channel = SharedMemoryChannel("weights", (*KEYS, answers_to(0)), 2, SPAWN)
        self.pipes, self.processes = [], []
        for key in KEYS:
            ours, theirs = SPAWN.Pipe()
            arguments = (plane, device, self.channel, key, dtype, theirs)
            self.processes.append(SPAWN.Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
            self.pipes.append(ours)

    def sender(self, policy: Any, **options: Any) -> WeightSender:
        """Actor rank 0's."""
        if self.plane == "collective":
            way: Any = BroadcastSender(self.channel, device=self.device, host="127.0.0.1", receivers=len(KEYS))
        else:
            way = LendingSender(self.channel, device=self.device, rank=0, bucket_bytes=BUCKET)
        return WeightSender(policy, way, KEYS, bucket_bytes=BUCKET, device=self.device, **options)

    def expect(self) -> None:
        """Have them receive a version."""
        for pipe in self.pipes:
            pipe.send(True)

    def held(self) -> list[Any]:
        """(version, state) of each, or its error."""
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
