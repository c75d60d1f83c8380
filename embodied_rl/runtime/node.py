"""A node's agent: starts this node's workers, has its lanes, and ends everything when the driver is gone.

The driver connects to its one port: once to command it, and once for each worker, whose process gets that connection.
Writers of other nodes connect to it to reach the lanes.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing as mp
import os
import socket
import sys
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from embodied_rl.channel import wire
from embodied_rl.channel.network import LANE, Gate, NetworkChannel, Route, serve_lane
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from embodied_rl.runtime.cpu_time import CpuTimes
from embodied_rl.runtime.host import LocalProcess, start_process
from embodied_rl.runtime.load import Load
from embodied_rl.runtime.placement import count_accelerators
from embodied_rl.runtime.worker import WorkerContext

CONTROL: Final = 0
WORKER: Final = 1
"""Kinds of a connection (:class:`~embodied_rl.channel.wire.Hello`); a worker's has its number."""
_DRIVER_S: Final = 60.0
"""Time for the driver to come."""
_ALIVE_S: Final = 1.0
"""Interval between signs of life."""
_GRACE_S: Final = 15.0
"""Time for workers to close when the driver is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node is. Producer: its agent. Consumer: the driver, which refuses nodes that differ from it."""

    host: str
    code: str
    """Hash of this package's source."""
    python: str
    torch: str
    folder: str
    """Where relative paths start."""
    cores: int
    accelerators: int
    memory: int
    """Bytes."""

    @staticmethod
    def here() -> NodeFacts:
        return NodeFacts(
            host=socket.gethostname(),
            code=_hash_of_code(),
            python=".".join(map(str, sys.version_info[:3])),
            torch=torch.__version__,
            folder=os.getcwd(),
            cores=len(os.sched_getaffinity(0)),
            accelerators=count_accelerators(),
            memory=psutil.virtual_memory().total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPart:
    """A channel, as one node sees it."""

    number: int
    name: str
    capacity: int
    keys: Sequence[Hashable]
    """All of them, in the driver's order."""
    elsewhere: Mapping[Hashable, Route]
    """Those whose readers are on other nodes."""


class Agent:
    """See the module.

    Args:
        host: address of the interface to listen on.
        token: the run's.
    """

    def __init__(self, host: str, token: bytes) -> None:
        self._token = token
        self._listener = wire.listen(host)
        self.address: wire.Address = self._listener.getsockname()[:2]
        interface = next((n for n, found in psutil.net_if_addrs().items() if any(a.address == host for a in found)), "")
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ():
            os.environ.setdefault(variable, interface)
        self._control: Connection | None = None
        self._speaks = threading.Lock()
        self._arrived = threading.Condition()
        self._pipes: dict[int, socket.socket] = {}
        self._workers: dict[int, LocalProcess] = {}
        self._cpu = CpuTimes()
        self._channels: dict[int, tuple[ChannelPart, SharedMemoryChannel, NetworkChannel]] = {}
        self._gates: dict[int, list[Gate | None]] = {}
        self._told: set[int] = set()
        """Channels of whose end the driver knows."""

    def serve(self) -> None:
        """Do what the driver says until it is gone; then no worker is left. Belongs to the thread that calls it: when
        that ends, the kernel kills the workers."""
        threading.Thread(target=self._accept, name="gateway", daemon=True).start()
        try:
            with self._arrived:
                if not self._arrived.wait_for(lambda: self._control is not None, _DRIVER_S):
                    return
            threading.Thread(target=self._show_life, name="signs of life", daemon=True).start()
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._once()
        finally:
            self._listener.close()
            self._end()

    def _once(self) -> None:
        assert self._control is not None
        flags = {c[1].closed_fd: number for number, c in self._channels.items() if number not in self._told}
        ready = wait([self._control, *flags, *(p.sentinel for p in self._workers.values())])
        for number, process in list(self._workers.items()):
            if process.exitcode is not None:
                self._say("exited", number, process.exitcode)
                del self._workers[number]
                process.kill()  # what it has left behind
        for number in [flags[item] for item in ready if item in flags]:  # type: ignore[index]
            self._told.add(number)
            self._say("closed", number, self._channels[number][1].closed_error)
        if self._control in ready:
            ticket, method, *arguments = self._control.recv()
            try:
                answer: Any = getattr(self, f"do_{method}")(*arguments)
            except Exception as error:
                answer = error
            if ticket is not None:
                self._say("answer", ticket, answer)

    def _say(self, kind: str, number: int, content: Any) -> None:
        assert self._control is not None
        with self._speaks:
            self._control.send((kind, number, content))

    def _show_life(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._say("alive", 0, None)
                time.sleep(_ALIVE_S)

    def do_channel(self, part: ChannelPart) -> None:
        mine = [key for key in part.keys if key not in part.elsewhere]
        lanes = SharedMemoryChannel(part.name, mine or ["no lane"], part.capacity, mp.get_context("spawn"))
        self._gates[part.number] = [Gate(lanes, key, part.capacity) if key in mine else None for key in part.keys]
        self._channels[part.number] = part, lanes, NetworkChannel(lanes, part.elsewhere, self._token)

    def do_start(self, number: int, context: WorkerContext, worker: bytes) -> int:
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._pipes, wire.HANDSHAKE_S):
                raise TimeoutError(f"{context.name}: the driver's connection did not come")
            pipe = Connection(self._pipes.pop(number).detach())
        try:
            process = start_process(context, worker, pipe, {n: c[2] for n, c in self._channels.items()})
        finally:
            pipe.close()
        self._workers[number] = process
        self._cpu.add(context.name, process.pid)
        return process.pid

    def do_kill(self, number: int) -> None:
        if number in self._workers:
            self._workers[number].kill()

    def do_stack(self, number: int) -> None:
        if number in self._workers:
            self._workers[number].show_stack()

    def do_resident(self, number: int) -> int:
        return self._workers[number].resident() if number in self._workers else 0

    def do_load(self) -> Load:
        return Load.here(self._cpu.read())

    def do_close(self, number: int, error: str | None) -> None:
        self._told.add(number)
        self._channels[number][1].close(error)

    def do_reset(self, number: int, keys: Sequence[Hashable], epoch: int) -> None:
        for key, gate in zip(self._channels[number][0].keys, self._gates[number], strict=True):
            if gate is not None and key in keys:
                gate.reset(epoch)

    def do_depth(self, number: int) -> dict[Hashable, int]:
        part, lanes, _ = self._channels[number]
        return {key: count for key, count in lanes.depth().items() if key in part.keys}

    def do_port(self) -> int:
        """A port that is free now."""
        with wire.listen(self.address[0]) as sock:
            return sock.getsockname()[1]

    def do_see(self, path: str) -> bool:
        """Whether the file exists here."""
        return Path(path).exists()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed at the end
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._welcome, args=(sock,), name="gateway", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            hello = wire.admit(sock, self._token)
        except OSError:  # a stranger, or somebody who went away
            return
        if hello.kind == LANE:
            serve_lane(sock, hello.second, self._gates[hello.first])
            return
        with self._arrived:
            if hello.kind == WORKER:
                self._pipes[hello.first] = sock
            elif self._control is None:
                self._control = Connection(sock.detach())
            self._arrived.notify_all()

    def _end(self) -> None:
        """The driver is gone: let workers that notice it close, then kill what is left."""
        for _, lanes, _ in self._channels.values():
            lanes.close("the run is over")
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(p.exitcode is None for p in self._workers.values()):
            wait([p.sentinel for p in self._workers.values()], 0.2)
        for process in self._workers.values():
            process.kill()
        for process in self._workers.values():
            process.join(_GRACE_S)


def _hash_of_code() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in (root, *sorted(p for p in root.iterdir() if p.is_symlink())):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
