"""Agents on the nodes of a Ray cluster. Ray does membership, placement and start; the run's messages go past it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from embodied_rl.channel import wire
from embodied_rl.errors import UserError
from embodied_rl.extras import imported
from embodied_rl.files import Scratch
from embodied_rl.runtime.node import Agent, NodeFacts
from embodied_rl.runtime.worker import WorkerError
from embodied_rl.schema.runner import NodeGroupConfig

_STARTED_S: Final = 300.0
"""Time for agents to start: they import torch, perhaps from a slow file system."""
_AUTHENTICATION: Final = (
    ". A Ray that was started where there was a token (~/.ray/auth_token) needs it on all machines; one that was "
    "started without needs RAY_AUTH_MODE=disabled"
)
_REACHED_S: Final = 10.0
"""Time for the cluster's head to accept a connection."""
_ENDED_S: Final = 20.0
"""Time for agents to end."""
_OBJECT_STORE: Final = 80 * 2**20
"""Bytes, about the least that Ray takes, whose default is 30 % of the memory: nothing is put there."""


class RayAgent:
    """A Ray actor: this node's agent."""

    def __init__(self, token: bytes, interface: str | None, folder: str) -> None:
        with contextlib.suppress(OSError):  # the driver compares
            os.chdir(folder)
        self._agent = Agent(_address_of(interface), token)

    def describe(self) -> tuple[wire.Address, NodeFacts]:
        """Where the agent listens, and what its node is."""
        return self._agent.address, NodeFacts.here()

    def serve(self) -> None:
        """Until the driver is gone."""
        self._agent.serve()


class RayNodes:
    """One agent on each node of a cluster; see :class:`~embodied_rl.runtime.cluster.Nodes`.

    Args:
        address: ``local``: a Ray of this run's own on this machine, with its own folder for temporary files, which ends
            with the run; ``auto`` or ``host:port``: the cluster that is there, which is left as it was.
        groups: the nodes that are needed, in the order in which ranks count through them; None: all that are there.
        wait: seconds for Ray to find them.

    Raises:
        UserError: Ray is not installed, there is no such cluster, or it does not have these nodes.
        WorkerError: an agent did not start on its node.
    """

    def __init__(self, address: str, groups: Mapping[str, NodeGroupConfig] | None, wait: float) -> None:
        _settle_environment()
        self._ray: Any = imported("ray", "cluster=ray", "ray")
        if self._ray.is_initialized():
            raise UserError("cluster=ray: this process has joined a Ray cluster already; call ray.shutdown() before")
        self.token = secrets.token_bytes(32)
        self._folder = Scratch("er-", "/tmp") if address == "local" else None  # a short path
        self._serving: list[Any] = []
        self._agents: list[Any] = []
        self._group: Any = None
        try:
            with _own_signals():
                self._join(address)
            asked = groups.values() if groups is not None else [self._whole()]
            self._start([group for group in asked for _ in range(group.nodes)], wait)
        except BaseException:
            self.close()
            raise

    def close(self, lost: Sequence[int] = ()) -> None:
        ray = self._ray
        with contextlib.suppress(Exception):
            ending = [ref for number, ref in enumerate(self._serving) if number not in lost]
            if ending:
                ray.wait(ending, num_returns=len(ending), timeout=_ENDED_S)
            for agent in self._agents:
                ray.kill(agent)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._serving, self._agents, self._group = [], [], None
        ray.shutdown()
        if self._folder is not None:
            self._folder.close()

    def _join(self, address: str) -> None:
        own: dict[str, Any] = {}
        if self._folder is not None:
            own = {
                "_temp_dir": str(self._folder.path),
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE,
            }
        try:
            host, colon, port = address.rpartition(":")
            if colon:  # Ray would try for many minutes
                socket.create_connection((host, int(port)), _REACHED_S).close()
            self._ray.init(
                address=address, namespace=f"embodied_rl-{self.token.hex()[:8]}", logging_level="warning", **own
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cluster.address={address}: {error}; give host:port of a Ray that runs (`ray start --head` on one "
                f"machine, `ray start --address=...` on the others), or local for one on this machine{_AUTHENTICATION}"
            ) from error

    def _whole(self) -> NodeGroupConfig:
        """All nodes that have a core; agents that take no GPU see those that there are."""
        alive = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        return NodeGroupConfig(nodes=len(alive), env={"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})

    def _start(self, wanted: Sequence[NodeGroupConfig], wait: float) -> None:
        ray = self._ray
        bundles = [
            {"CPU": 1.0, **({"GPU": float(group.accelerators)} if group.accelerators else {}), **group.resources}
            for group in wanted
        ]
        self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(wait):
            raise UserError(_table(bundles, ray.nodes(), wait))
        remote = ray.remote(RayAgent)
        for index, group in enumerate(wanted):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            self._agents.append(
                remote.options(
                    num_cpus=1,
                    num_gpus=group.accelerators,
                    resources=group.resources,
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **group.env}},
                ).remote(self.token, group.interface, os.getcwd())
            )
        try:
            described = ray.get([agent.describe.remote() for agent in self._agents], timeout=_STARTED_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise WorkerError(f"cluster=ray: an agent did not start on its node{_AUTHENTICATION}:\n{error}") from error
        self.addresses: list[wire.Address] = [address for address, _ in described]
        self.facts: list[NodeFacts] = [facts for _, facts in described]
        self._serving = [agent.serve.remote() for agent in self._agents]


def _settle_environment() -> None:
    """What Ray reads when it is imported, where the user has not said otherwise."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a Ray of our own: its default, 15, is for batch work
    tokens = (os.environ.get("RAY_AUTH_TOKEN_PATH"), Path.home() / ".ray/auth_token")
    # As `ray start` does: it has a cluster ask for the token that is there.
    if os.environ.get("RAY_AUTH_TOKEN") or any(path and Path(path).is_file() for path in tokens):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _address_of(interface: str | None) -> str:
    if interface is None:
        import ray.util

        return ray.util.get_node_ip_address()
    found = psutil.net_if_addrs()
    for entry in found.get(interface, ()):
        if entry.family == socket.AF_INET:
            return entry.address
    raise UserError(
        f"interface {interface!r} has no IPv4 address on {socket.gethostname()}, which has {', '.join(found)}"
    )


def _table(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, Any]], wait: float) -> str:
    asked = "\n".join(f"  node {i}: {_resources(bundle)}" for i, bundle in enumerate(bundles))
    alive = [node for node in nodes if node["Alive"]]
    there = "\n".join(f"  {node['NodeManagerHostname']}: {_resources(node['Resources'])}" for node in alive)
    return (
        f"cluster.node_groups: the Ray cluster did not give {len(bundles)} node(s) within {wait:g} s "
        f"(cluster.wait_for_nodes). "
        f"Asked:\n{asked}\nThe cluster has {len(alive)} node(s), parts of which others may use:\n{there}"
    )


def _resources(resources: Mapping[str, float]) -> str:
    shown = {name: value for name, value in resources.items() if not name.startswith(("node:", "object_store"))}
    return ", ".join(
        f"{name} {value / 2**30:.0f} GiB" if name == "memory" else f"{name} {value:g}" for name, value in shown.items()
    )


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts its own handlers in the place of the run's."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
