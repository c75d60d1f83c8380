"""``python train.py doctor cluster.address=...``: what each node of a Ray cluster is, and whether a run can use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from embodied_rl.commands.terminal import Finding, ok, problem
from embodied_rl.errors import UserError, listed
from embodied_rl.runtime.cluster import ClusterHost, differences
from embodied_rl.runtime.memory import GIB
from embodied_rl.runtime.node import NodeFacts

_WAIT_S: Final = 60.0
"""Time for the cluster to give a core of each node."""
_TRIPS: Final = 20


def cluster_findings(address: str, folder: str | None) -> Iterator[Finding]:
    """Start an agent on each node and ask it; the cluster is left as it was.

    Args:
        address: that of ``cluster.address``.
        folder: one that all nodes are to share; None: none is tried.

    Raises:
        UserError: there is no such cluster, or it has no core to give.
        WorkerError: an agent does not start, or does not answer.
    """
    from embodied_rl.runtime.ray_nodes import RayNodes  # which needs Ray

    with contextlib.ExitStack() as stack:
        nodes = RayNodes(address, None, _WAIT_S)
        ending = stack.enter_context(contextlib.ExitStack())
        ending.callback(nodes.close, range(len(nodes.facts)))  # they know nothing of a driver
        unlike = [differences(facts) for facts in nodes.facts]
        for number, (facts, found) in enumerate(zip(nodes.facts, unlike, strict=True)):
            if found:
                advice = "have the same checkout, packages and working directory on all nodes"
                yield problem(_name(number, facts), listed(found), advice)
            else:
                yield ok(_name(number, facts), _words(facts))
        if any(unlike):
            return
        ending.pop_all()
        host = ClusterHost(nodes, range(len(nodes.facts)))
        stack.callback(host.close)
        trips = [f"{node.trip(_TRIPS) * 1e3:.1f} ms" for node in host.nodes]
        yield ok("agents", f"answer after {listed(trips)}")
        if folder is None:
            return
        try:
            host.check_shared(folder, "runner.output_dir")
        except UserError as error:
            yield problem("shared folder", *str(error).split("; ", 1))
        else:
            yield ok("shared folder", f"{folder} is the same on all nodes")


def _name(number: int, facts: NodeFacts) -> str:
    return f"node {number} ({facts.host})"


def _words(facts: NodeFacts) -> str:
    accelerators = f"{facts.accelerators} accelerator(s)" if facts.accelerators else "no accelerator"
    return f"{facts.cores} core(s), {facts.memory / GIB:.1f} GiB, {accelerators}; code and packages are those here"
