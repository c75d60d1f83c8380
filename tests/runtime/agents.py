"""Agents in processes of their own on this machine: nodes without Ray."""

from __future__ import annotations

import multiprocessing as mp
import secrets
from collections.abc import Sequence
from multiprocessing.connection import Connection

from embodied_rl.runtime import signals
from embodied_rl.runtime.node import Agent, NodeFacts
from tests import warm_start


def serve(pipe: Connection, token: bytes) -> None:
    signals.show_as("Agent")
    warm_start.serve_children()
    agent = Agent("127.0.0.1", token)
    pipe.send((agent.address, NodeFacts.here()))
    agent.serve()
    signals.leave()  # the interpreter's own end takes a second where torch is loaded


class LocalNodes:
    """See :class:`~embodied_rl.runtime.cluster.Nodes`."""

    def __init__(self, count: int) -> None:
        spawn = mp.get_context("spawn")
        self.token = secrets.token_bytes(32)
        self.processes = []
        pipes = []
        try:
            for _ in range(count):
                ours, theirs = spawn.Pipe()
                with signals.deferred():
                    process = spawn.Process(target=serve, args=(theirs, self.token))
                    process.start()
                    self.processes.append(process)
                theirs.close()
                pipes.append(ours)
            described = [pipe.recv() for pipe in pipes]
        except BaseException:
            self.close(range(len(self.processes)))
            raise
        self.addresses = [address for address, _ in described]
        self.facts: list[NodeFacts] = [facts for _, facts in described]

    def close(self, lost: Sequence[int] = ()) -> None:
        for number in lost:
            self.processes[number].kill()
        for process in self.processes:
            process.join(30)
            assert process.exitcode is not None, "an agent outlives its driver"
