"""Several nodes as the host of a run's workers: the driver's side of the nodes' agents (``node.py``).

How agents come to their nodes is somebody else's: ``ray_nodes.py`` has Ray start them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Protocol

from embodied_rl.channel import base, network, wire
from embodied_rl.channel.base import Channel, ChannelClosed, T
from embodied_rl.channel.network import LANE, RemoteLane, put_all_remote
from embodied_rl.errors import UserError
from embodied_rl.runtime.host import WorkerProcess
from embodied_rl.runtime.load import Load
from embodied_rl.runtime.node import CONTROL, WORKER, ChannelPart, NodeFacts
from embodied_rl.runtime.worker import GroupSpec, WorkerContext, WorkerError

_ANSWER_S: Final = 60.0
"""Time for an agent to answer: it starts a process at most."""
_SILENT_S: Final = 8.0
"""Time without a sign of life after which an agent counts as lost."""
_LOOK_S: Final = 2.0
"""What counts at most of the time between two looks: agents may have stood still with this process."""


class Nodes(Protocol):
    """Agents that somebody has started, one a node."""

    addresses: list[wire.Address]
    facts: list[NodeFacts]
    token: bytes

    def close(self, lost: Sequence[int] = ()) -> None:
        """End them; those with these numbers do not do so themselves."""
        ...


class Node:
    """The driver's end of one agent."""

    def __init__(self, number: int, address: wire.Address, facts: NodeFacts, token: bytes) -> None:
        self.number, self.address, self._token = number, address, token
        self.name = f"node {number} ({facts.host}, {address[0]})"
        self.lost: str | None = None
        self.exits: dict[int, int] = {}
        """Worker's number -> exit status."""
        self.closed: dict[int, str | None] = {}
        """Channels that somebody on the node closed, and why."""
        self._answers: dict[int, Any] = {}
        self._ticket = 0
        self._silent, self._looked = 0.0, time.monotonic()
        self.control = self.connect(wire.Hello(CONTROL))

    def connect(self, hello: wire.Hello) -> Connection:
        try:
            return Connection(wire.connect(self.address, self._token, hello).detach())
        except OSError as error:
            raise WorkerError(f"{self.name} cannot be reached: {error}") from error

    def tell(self, method: str, *arguments: Any) -> None:
        """Ask for something, without an answer; nothing where the node is gone."""
        self._send(None, method, arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Raises WorkerError where the node is gone, and what the agent raised."""
        self._ticket += 1
        ticket, deadline = self._ticket, time.monotonic() + _ANSWER_S
        self._send(ticket, method, arguments)
        while ticket not in self._answers and self.lost is None:
            self.hear(deadline - time.monotonic())
            if ticket not in self._answers and self.lost is None and time.monotonic() > deadline:
                self.lost = f"the agent of {self.name} has not answered for {_ANSWER_S:g} s"
        if ticket not in self._answers:
            raise WorkerError(str(self.lost))
        answer = self._answers.pop(ticket)
        if isinstance(answer, Exception):
            raise WorkerError(f"{self.name}: {type(answer).__name__}: {answer}") from answer
        return answer

    def trip(self, count: int) -> float:
        """Seconds until the agent answers, the mean of so many questions."""
        start = time.perf_counter()
        for _ in range(count):
            self.ask("load")
        return (time.perf_counter() - start) / count

    def hear(self, seconds: float = 0.0) -> None:
        """Take in what the agent has said, if need be after waiting so long, or a little less, for it to speak."""
        heard, kinds = False, {"exited": self.exits, "closed": self.closed, "answer": self._answers, "alive": {}}
        try:
            while self.lost is None and self.control.poll(0 if heard else min(max(0.0, seconds), _LOOK_S / 2)):
                kind, number, content = self.control.recv()
                kinds[kind][number] = content
                heard = True
        except (EOFError, OSError):
            self._gone()
        now = time.monotonic()
        self._silent = 0.0 if heard else self._silent + min(now - self._looked, _LOOK_S)
        self._looked = now
        if self.lost is None and self._silent > _SILENT_S:
            self.lost = (
                f"{self.name} has given no sign of life for {_SILENT_S:g} s: its agent, or the machine, stands still"
            )

    def _send(self, ticket: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            if self.lost is None:
                self.control.send((ticket, method, *arguments))
        except OSError:
            self._gone()

    def _gone(self) -> None:
        self.lost = f"the connection to {self.name} broke: its agent, or the machine, is gone"


class RemoteProcess:
    """A worker's process on another node; see :class:`~embodied_rl.runtime.host.WorkerProcess`."""

    here = False

    def __init__(self, node: Node, number: int, pid: int) -> None:
        self._node, self._number, self.pid = node, number, pid

    @property
    def exitcode(self) -> int | None:
        self._node.hear()
        code = self._node.exits.get(self._number)
        return -9 if code is None and self._node.lost else code

    @property
    def lost(self) -> str | None:
        return self._node.lost if self._number not in self._node.exits else None

    @property
    def sentinel(self) -> Connection:
        return self._node.control

    def join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.exitcode is None and (left := deadline - time.monotonic()) > 0:
            self._node.hear(left)

    def kill(self) -> None:
        self._node.tell("kill", self._number)

    def show_stack(self) -> None:
        self._node.tell("stack", self._number)

    def resident(self) -> int:
        return self._node.ask("resident", self._number)

    def close(self) -> None:
        pass


class ClusterChannel:
    """The driver's end of a channel; a worker gets its node's :class:`~embodied_rl.channel.network.NetworkChannel`."""

    def __init__(self, number: int, name: str, homes: Mapping[Hashable, Node], nodes: Sequence[Node], token: bytes):
        self.name, self._number, self._homes, self._nodes = name, number, homes, nodes
        self._closed: tuple[str | None] | None = None
        self._routes = {
            key: (node.address, wire.Hello(LANE, number, index)) for index, (key, node) in enumerate(homes.items())
        }
        self._lanes = {key: RemoteLane(name, key, at, token, hello) for key, (at, hello) in self._routes.items()}

    async def put(self, item: Any, *, key: Hashable = 0, timeout: float | None = None) -> None:
        await self.put_all(item, keys=[key], timeout=timeout)

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None:
        if self._closed is not None:
            raise ChannelClosed(self.name, self._closed[0])
        put_all_remote(item, {key: self._routes[key] for key in keys}, self._lanes, timeout)

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any:
        raise self._unread(key)

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T:
        raise self._unread(key)

    async def get_batch(self, n: int, *, key: Hashable = 0, timeout: float | None = None) -> list[Any]:
        raise self._unread(key)

    def _unread(self, key: Hashable) -> KeyError:
        return KeyError(f"channel {self.name!r}: messages with key {key!r} are read on {self._homes[key].name}")

    def close(self, error: str | None = None) -> None:
        self._closed = self._closed or (error,)
        for node in self._nodes:
            node.tell("close", self._number, error)
        for lane in self._lanes.values():
            lane.close()

    def reset(self, keys: Sequence[Hashable]) -> None:
        base.epoch += 1
        for node in dict.fromkeys(self._homes[key] for key in keys):
            node.ask("reset", self._number, [key for key in keys if self._homes[key] is node], base.epoch)

    def depth(self) -> dict[Hashable, int]:
        found: dict[Hashable, int] = {}
        for node in dict.fromkeys(self._homes.values()):
            with contextlib.suppress(WorkerError):
                found |= node.ask("depth", self._number)
        return {key: found[key] for key in self._homes if key in found}

    def __reduce__(self) -> tuple[Any, ...]:
        return network.end_of, (self._number,)


class ClusterHost:
    """Several nodes; see :class:`~embodied_rl.runtime.host.Host`.

    Args:
        nodes: their agents, which are ended by :meth:`close`.
        node_of: slot -> number of its node.

    Raises:
        UserError: a node has other code or versions than this process.
        WorkerError: a node cannot be reached.
    """

    def __init__(self, nodes: Nodes, node_of: Sequence[int]) -> None:
        self._started, self._node_of = nodes, node_of
        self._channels: list[ClusterChannel] = []
        self._workers = 0
        try:
            _check_alike(nodes.facts)
            self.nodes = [
                Node(number, address, facts, nodes.token)
                for number, (address, facts) in enumerate(zip(nodes.addresses, nodes.facts, strict=True))
            ]
        except BaseException:
            nodes.close(range(len(nodes.addresses)))  # some know nothing of a driver yet
            raise

    def channel(self, name: str, keys: Sequence[Hashable], capacity: int, readers: Sequence[int]) -> Channel:
        number = len(self._channels)
        slots = readers or [0] * len(keys)
        homes = {key: self.nodes[self._node_of[slot]] for key, slot in zip(keys, slots, strict=True)}
        for node in self.nodes:
            elsewhere = {
                key: (home.address, wire.Hello(LANE, number, index))
                for index, (key, home) in enumerate(homes.items())
                if home is not node
            }
            node.ask(
                "channel",
                ChannelPart(number=number, name=name, capacity=capacity, keys=list(keys), elsewhere=elsewhere),
            )
        self._channels.append(ClusterChannel(number, name, homes, self.nodes, self._started.token))
        return self._channels[-1]

    def rendezvous(self, spec: GroupSpec) -> str:
        first = self.nodes[self._node_of[spec.slots[0]]]
        return f"tcp://{first.address[0]}:{first.ask('port')}"

    def start(self, context: WorkerContext, spec: GroupSpec) -> tuple[WorkerProcess, Connection]:
        node, number = self.nodes[self._node_of[spec.slots[context.rank]]], self._workers
        self._workers += 1
        pipe = node.connect(wire.Hello(WORKER, number))
        worker = bytes(ForkingPickler.dumps((spec.worker, dict(spec.arguments))))
        return RemoteProcess(node, number, node.ask("start", number, context, worker)), pipe

    def look(self) -> str | None:
        """What has become of a node that is lost; closes channels everywhere that are closed somewhere."""
        for node in self.nodes:
            node.hear()
            while node.closed:
                number, error = node.closed.popitem()
                self._channels[number].close(error)
        return next((node.lost for node in self.nodes if node.lost), None)

    def loads(self) -> list[Load]:
        return [node.ask("load") for node in self.nodes]

    def check_shared(self, folder: str, key: str) -> None:
        """Refuse a folder that is not the same on all nodes.

        Raises:
            UserError: a node does not see what this process writes there.
        """
        folder = os.path.abspath(folder)
        os.makedirs(folder, exist_ok=True)
        token = os.path.join(folder, f".shared-{secrets.token_hex(8)}")
        with open(token, "x", encoding="ascii"):
            pass
        try:
            blind = [node.name for node in self.nodes if not node.ask("see", token)]
        finally:
            os.remove(token)
        if blind:
            raise UserError(
                f"{key}: {folder} is not the same folder on {', '.join(blind)}, but all nodes write there: give a "
                "folder of a file system that all nodes share"
            )

    def close(self) -> None:
        for node in self.nodes:
            node.control.close()  # the agent ends what is left, then itself
        self._started.close([node.number for node in self.nodes if node.lost])


def differences(facts: NodeFacts) -> list[str]:
    """What a node has otherwise than this process."""
    here = NodeFacts.here()
    return [
        f"{name} {getattr(facts, name)}, here {getattr(here, name)}"
        for name in ("code", "python", "torch", "folder")
        if getattr(facts, name) != getattr(here, name)
    ]


def _check_alike(nodes: Sequence[NodeFacts]) -> None:
    found = [
        f"  node {number} ({facts.host}): {text}" for number, facts in enumerate(nodes) for text in differences(facts)
    ]
    if found:
        raise UserError(
            "the nodes differ from the driver; have the same checkout, packages and working directory on all:\n"
            + "\n".join(found)
        )
