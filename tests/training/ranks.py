"""Actor ranks as processes: started once, then given functions to run together."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.runtime import signals
from embodied_rl.training.sharding import init_process_group


class Ranks:
    """``world_size`` processes that form a gloo group.

    Args:
        directory: where they meet.
    """

    def __init__(self, world_size: int, directory: Path) -> None:
        context = mp.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, str(directory / "rendezvous")), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(mesh, *args)`` in every rank; their results. The function is one that can be imported."""
        for connection in self._connections:
            connection.send((function, args))
        answers = [connection.recv() for connection in self._connections]
        for failed, answer in answers:
            if failed:
                raise RuntimeError(f"a rank failed:\n{answer}")
        return [answer for _, answer in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(connection: Connection, rank: int, world_size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    mesh: DeviceMesh = init_process_group(device="cpu", rank=rank, world_size=world_size, rendezvous=rendezvous)
    try:
        while True:
            function, args = connection.recv()
            try:
                connection.send((False, function(mesh, *args)))
            except BaseException:
                connection.send((True, traceback.format_exc()))
    except EOFError:
        dist.destroy_process_group()
    signals.leave()
