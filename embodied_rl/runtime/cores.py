"""CPU cores of workers, as ``cluster.cpu_affinity`` gives them. Without torch: they are set before it is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from embodied_rl.errors import UserError
from embodied_rl.runtime.placement import Placement, PlacementError, parse_ranks
from embodied_rl.schema import ClusterConfig

NUMA: Final = "numa"
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """What decides on the cores of one worker."""

    component: str
    cores: str
    """``0-3,6``, to be dealt out evenly over the component's workers of a node, or ``numa``: a NUMA node for each."""
    index: int
    """Which of these workers it is."""
    count: int
    """How many these are."""
    device: str
    """The worker's; with ``numa`` an accelerator's NUMA node is taken."""
    num_threads: int

    @property
    def key(self) -> str:
        return f"cluster.cpu_affinity.{self.component}"


def pinnings(cluster: ClusterConfig, placement: Placement, component: str) -> list[Pinning]:
    """What decides on the cores of a component's workers; empty: nothing does."""
    cores = cluster.cpu_affinity.get(component)
    if cores is None:
        return []
    slots = placement.slots[component]
    node_of = placement.node_of() or [0] * (max(slots) + 1)
    nodes = [node_of[slot] for slot in slots]
    return [
        Pinning(
            component=component,
            cores=str(cores).strip(),
            index=nodes[:rank].count(node),
            count=nodes.count(node),
            device=placement.device(component, rank),
            num_threads=int(cluster.num_threads[component]),  # auto does not come with cores of its own
        )
        for rank, node in enumerate(nodes)
    ]


def pin(pinning: Pinning) -> None:
    """Keep this process, which must not have threads yet, and its children to their cores.

    Raises:
        UserError: as :func:`cores_of`.
    """
    os.sched_setaffinity(0, cores_of(pinning, os.sched_getaffinity(0)))


def cores_of(pinning: Pinning, allowed: set[int] | None, system: Path = Path("/")) -> Sequence[int]:
    """The cores of a worker. Of fewer cores than workers each gets one, which they share.

    Args:
        allowed: cores that the process may use; None: not known here, nor is any NUMA node.
        system: root of the files that describe the machine.

    Raises:
        UserError: unreadable, cores that there are not, or fewer than the worker's threads.
    """
    if pinning.cores == NUMA:
        if allowed is None:
            return ()
        own = _of_numa_node(pinning, allowed, system)
    else:
        try:
            cores = parse_ranks("" if pinning.cores == "all" else pinning.cores, 0)
        except PlacementError as error:
            raise UserError(f"{pinning.key}: got {pinning.cores!r}, expected cores, as 0-3,6, or {NUMA}") from error
        if allowed is not None and (missing := sorted({*cores} - allowed)):
            raise UserError(
                f"{pinning.key}: got {pinning.cores}, but core {', '.join(map(str, missing))} is none of those that "
                f"the run may use here: {_ranges(sorted(allowed))}"
            )
        first, end = (len(cores) * step // pinning.count for step in (pinning.index, pinning.index + 1))
        own = cores[first:end] if len(cores) >= pinning.count else (cores[pinning.index % len(cores)],)
    if pinning.num_threads > len(own):
        raise UserError(
            f"{pinning.key}: got {pinning.cores}, which is {len(own)} core(s) for worker {pinning.index} of "
            f"{pinning.count}, but cluster.num_threads.{pinning.component}={pinning.num_threads}; give more cores, or "
            "fewer threads"
        )
    return own


def _of_numa_node(pinning: Pinning, allowed: set[int], system: Path) -> Sequence[int]:
    """All cores of the NUMA node that the worker's accelerator is at; where there is none, or nothing says so, workers
    are dealt out over the nodes, neighbours to one."""
    nodes: dict[int, list[int]] = {}
    for folder in (system / "sys/devices/system/node").glob("node[0-9]*"):
        cores = (folder / "cpulist").read_text().strip()
        own = sorted({*parse_ranks(cores, 0)} & allowed) if cores else []  # a node may have memory alone
        if own:
            nodes[int(folder.name.removeprefix("node"))] = own
    if not nodes:  # a kernel without NUMA
        return sorted(allowed)
    near = _numa_node_of(pinning.device, system)
    return nodes[near] if near in nodes else nodes[sorted(nodes)[pinning.index * len(nodes) // pinning.count]]


def _numa_node_of(device: str, system: Path) -> int | None:
    """The NUMA node of ``cuda:<index>``, in the order of the PCI bus that equal GPUs are counted in."""
    gpus = sorted((system / "proc/driver/nvidia/gpus").glob("*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus))))).split(",")
    number = int(device.partition(":")[2] or -1)
    if not 0 <= number < len(visible) or not visible[number].strip().isdigit() or int(visible[number]) >= len(gpus):
        return None
    file = system / "sys/bus/pci/devices" / gpus[int(visible[number])].name.lower() / "numa_node"
    return int(file.read_text()) if file.is_file() else None


def _ranges(cores: Sequence[int]) -> str:
    """``0-3,6``."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
