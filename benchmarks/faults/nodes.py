"""Nodes on this machine: agents without Ray, or the raylets of a Ray cluster, and what happens to them."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Final, Protocol

import psutil

_SPREAD: Final = (
    "cluster=ray",
    "cluster.component_placement.env=sim:0-1",
    "cluster.component_placement.actor=learn:0",
    "cluster.component_placement.rollout=learn:1",
)


class Nodes(Protocol):
    """Three of them, one of which has the actor and the rollout worker, the others the env workers."""

    agent: str
    """How the names of agents begin."""

    def arguments(self, folder: str) -> Sequence[str]:
        """The configuration of a run there; ``folder``: see ``victims.py``."""
        ...

    def prepare(self) -> None:
        """In the run's process, before it begins."""
        ...

    def has(self, process: psutil.Process) -> bool:
        """Whether the process is the cluster's own, no run's."""
        ...

    def kill_machine(self, choose: random.Random) -> None:
        """End one of a simulator's nodes; there is another soon."""
        ...

    def close(self) -> None: ...


def _groups(folder: str, sim: str = "", learn: str = "") -> str:
    variable = f"env: {{EMBODIED_RL_FAULTS: {folder}}}"
    return (
        f"+cluster.node_groups={{sim: {{nodes: 2, slots: 1, {sim} {variable}}}, "
        f"learn: {{slots: 2, {learn} {variable}}}}}"
    )


class AgentNodes:
    """Agents that each run starts itself."""

    agent = "Agent"

    def arguments(self, folder: str) -> Sequence[str]:
        return (*_SPREAD, _groups(folder))

    def prepare(self) -> None:
        from embodied_rl import launch
        from embodied_rl.runtime.cluster import ClusterHost
        from tests.runtime.agents import LocalNodes

        launch._cluster = lambda config: ClusterHost(LocalNodes(3), launch.placement_of(config).node_of())

    def has(self, process: psutil.Process) -> bool:
        return False

    def kill_machine(self, choose: random.Random) -> None:
        raise NotImplementedError("an agent without Ray is all there is of its node")

    def close(self) -> None:
        pass


class RayletNodes:
    """A Ray cluster for all runs, in a process of its own, so that none of them is forked from Ray's threads."""

    agent = "ray::RayAgent"

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="er-", dir="/tmp")  # the paths of sockets have 107 characters at most
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.raylets", self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._address = self._answer()

    def arguments(self, folder: str) -> Sequence[str]:
        groups = _groups(folder, "resources: {sim: 1},", "resources: {learn: 1},")
        return (*_SPREAD, groups, f'cluster.address="{self._address}"')

    def prepare(self) -> None:
        pass

    def has(self, process: psutil.Process) -> bool:
        if process.pid == self._helper.pid:
            return True
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(("EnvGroup", "RolloutGroup", "ActorGroup", self.agent)):
                return False
            if any(parent.name().startswith(self.agent) for parent in process.parents()):
                return False
            return self._helper.pid in [p.pid for p in process.parents()] or "/ray/" in " ".join(process.cmdline())
        return True  # it has just ended

    def kill_machine(self, choose: random.Random) -> None:
        self._ask(f"kill {choose.randrange(2)}")

    def close(self) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, what: str) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.write(what + "\n")
        self._helper.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._helper.stdout is not None
        while not (line := self._helper.stdout.readline()).startswith("raylets: "):
            if not line:
                raise RuntimeError("the Ray cluster did not start")
        return line.removeprefix("raylets: ").strip()


def nodes_of(backend: str) -> Nodes | None:
    """Those of a backend's runs; None: they have this machine."""
    made: dict[str, Any] = {"cluster": AgentNodes, "ray": RayletNodes}
    return made[backend]() if backend in made else None
