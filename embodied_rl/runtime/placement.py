"""The placement of workers: its syntax, shared by every task.

``{"actor,rollout": "0-3", "env": "4-7"}`` gives the actor and the rollout group ranks 0..3 on accelerators 0..3, and
the envs four workers on the next four. A rank is an accelerator, or a process slot on a machine without one. Components
that share a rank are collocated, those that do not are disaggregated; nothing else says so.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from embodied_rl.errors import suggestion

_LAST_RANK: Final = 4095
"""More than any machine has; a slip must not be counted to."""


class PlacementError(ValueError):
    """A placement that cannot be read."""


def count_accelerators() -> int:
    """CUDA devices of this machine that the process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def parse_ranks(text: str | int, num_slots: int) -> tuple[int, ...]:
    """``all``, ``3``, ``0,2,3``, ``0-3`` or ``0-3,5`` as sorted rank numbers; ``all`` means ``range(num_slots)``.

    Raises:
        PlacementError: anything else, an empty or descending range, or a rank named twice.
    """
    text = str(text).strip()
    if text == "all":
        return tuple(range(num_slots))
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise PlacementError(f"got {text!r}, expected all, 3, 0,2,3, 0-3 or 0-3,5")
        if last > _LAST_RANK:
            raise PlacementError(f"got {text!r}, expected ranks up to {_LAST_RANK}")
        ranks.extend(range(first, last + 1))
    if len(set(ranks)) != len(ranks):
        raise PlacementError(f"got {text!r}, which names a rank twice")
    return tuple(sorted(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlots:
    """The slots of one node of several: ``first`` to ``first + count - 1``."""

    group: str
    first: int
    count: int
    accelerators: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which slots each component's workers sit on. Worker rank i of a component is on ``slots[component][i]``."""

    slots: Mapping[str, tuple[int, ...]]
    num_accelerators: int
    nodes: tuple[NodeSlots, ...] = ()
    """Empty: this machine alone."""

    def world_size(self, component: str) -> int:
        return len(self.slots[component])

    def device(self, component: str, rank: int) -> str:
        """torch device of one worker: ``cuda:<slot>``, or ``cpu`` on a machine without accelerators.

        Where a component's workers outnumber the accelerators, slots start again from accelerator 0.
        """
        slot, count = self.slots[component][rank], self.num_accelerators
        if self.nodes:
            node = self.nodes[self.node_of()[slot]]
            slot, count = slot - node.first, node.accelerators
        return f"cuda:{slot % count}" if count else "cpu"

    def accelerator(self, component: str, rank: int) -> tuple[int, str] | None:
        """One worker's node and device; None: it has no accelerator."""
        device = self.device(component, rank)
        node = self.node_of()[self.slots[component][rank]] if self.nodes else 0
        return None if device == "cpu" else (node, device)

    def beside(self, component: str, rank: int, other: str) -> tuple[int, ...]:
        """Ranks of another component's workers that share one worker's accelerator."""
        here = self.accelerator(component, rank)
        return tuple(it for it in range(self.world_size(other)) if here and here == self.accelerator(other, it))

    def node_of(self) -> list[int]:
        """The node of each slot."""
        return [index for index, node in enumerate(self.nodes) for _ in range(node.count)]

    def drawn(self) -> str:
        """The nodes, a line each, with who is on their slots."""
        return draw(self.nodes, self.slots)


def draw(nodes: Sequence[NodeSlots], slots: Mapping[str, Sequence[int]]) -> str:
    """The nodes, a line each, with who is on their slots."""
    lines = []
    for index, node in enumerate(nodes):
        own = range(node.first, node.first + node.count)
        here = [
            f"{name} {', '.join(map(str, ranks))}"
            for name, all_ranks in slots.items()
            if (ranks := sorted({*all_ranks} & {*own}))
        ]
        kind = f"{node.accelerators} accelerator(s)" if node.accelerators else "no accelerator"
        lines.append(f"  node {index} ({node.group}, {kind}), ranks {own[0]}-{own[-1]}: {'; '.join(here) or 'nobody'}")
    return "\n".join(lines)


def parse_placement(
    component_placement: Mapping[str, str | int],
    components: Sequence[str],
    *,
    sharing: Sequence[str] = (),
    num_accelerators: int | None = None,
    nodes: Sequence[NodeSlots] = (),
) -> Placement:
    """Read ``cluster.component_placement``; every one of ``components`` must be placed exactly once.

    Args:
        sharing: components whose workers need no accelerator to themselves (simulators on the CPU): several may be on
            one, so the machine's accelerators do not limit their ranks.
        num_accelerators: None counts this machine's.
        nodes: of a cluster, through which ranks count; ``sim:0-3`` are the first four of the group ``sim``. Empty: this
            machine.

    Raises:
        PlacementError: bad syntax, a component that is missing, unknown or placed twice, or a rank without accelerator.
    """
    accelerators = count_accelerators() if num_accelerators is None else num_accelerators
    num_slots = accelerators or len(os.sched_getaffinity(0))
    if nodes:
        accelerators, num_slots = 0, sum(node.count for node in nodes)
    slots: dict[str, tuple[int, ...]] = {}
    for names, text in component_placement.items():
        for name in (part.strip() for part in str(names).split(",")):
            if name not in components:
                raise PlacementError(
                    f"got component {name!r}, expected {', '.join(components)}.{suggestion(name, components)}"
                )
            if name in slots:
                raise PlacementError(f"component {name!r} is placed twice")
            try:
                slots[name] = _ranks_on(nodes, str(text), num_slots) if nodes else parse_ranks(text, num_slots)
            except PlacementError as error:
                raise PlacementError(f"{name}: {error}") from None
            if accelerators and max(slots[name]) >= accelerators and name not in sharing:
                raise PlacementError(
                    f"{name}: got rank {max(slots[name])}, but this machine has {accelerators} accelerator(s), "
                    "numbered from 0"
                )
    missing = [name for name in components if name not in slots]
    if missing:
        raise PlacementError(f"no ranks for {', '.join(missing)}; every component needs some, e.g. {missing[0]}: 0")
    placement = Placement(slots=slots, num_accelerators=accelerators, nodes=tuple(nodes))
    if nodes:
        _check_nodes(placement, num_slots, sharing)
    return placement


def _ranks_on(nodes: Sequence[NodeSlots], text: str, num_slots: int) -> tuple[int, ...]:
    group, _, ranks = text.strip().rpartition(":")
    if not group:
        return parse_ranks(ranks, num_slots)
    own = [node for node in nodes if node.group == group.strip()]
    if not own:
        raise PlacementError(f"got group {group!r}, expected {', '.join(dict.fromkeys(n.group for n in nodes))}")
    count = sum(node.count for node in own)
    found = parse_ranks(ranks, count)
    if found[-1] >= count:
        raise PlacementError(f"got {group}:{found[-1]}, but that group has ranks 0-{count - 1}")
    return tuple(own[0].first + rank for rank in found)


def _check_nodes(placement: Placement, num_slots: int, sharing: Sequence[str]) -> None:
    for name, ranks in placement.slots.items():
        problem = f"but the nodes have ranks 0-{num_slots - 1}" if ranks[-1] >= num_slots else None
        for rank in ranks if problem is None and name not in sharing else ():
            node = placement.nodes[placement.node_of()[rank]]
            if node.accelerators and rank - node.first >= node.accelerators:
                problem = f"but of ranks {node.first}-{node.first + node.count - 1} only {node.accelerators} have one"
        if problem:
            raise PlacementError(f"{name}: got ranks {list(ranks)}, {problem}:\n{placement.drawn()}")


_WRITTEN: Final = re.compile(r"\+{0,2}cluster\.component_placement(?:\.([\w, ]+))?=(.*)", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z_]\w*")


def separate_overrides(argument: str) -> list[str]:
    """Command-line overrides of single components, for one of ``component_placement`` with joined names.

    Hydra's grammar has no commas in names: ``{actor,rollout: 0-3, env: 4,5}`` becomes three overrides. Any other
    argument is returned as it is.
    """
    match = _WRITTEN.fullmatch(argument)
    if not match or (match[1] is not None and "," not in match[1]):
        return [argument]
    lines = {match[1]: match[2]} if match[1] is not None else _lines(match[2])
    return [
        f'cluster.component_placement.{name.strip()}="{text}"'
        if "," in text
        else f"cluster.component_placement.{name.strip()}={text}"
        for names, text in lines.items()
        for name in names.split(",")
    ] or [argument]


def _lines(text: str) -> dict[str, str]:
    """The lines of ``{actor,rollout: 0,1, env: 2}``; none where it is written otherwise, which Hydra tells better."""
    text = text.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return {}
    lines: dict[str, str] = {}
    names: list[str] = []
    last = ""
    for part in (part.strip(" \"'") for part in text[1:-1].split(",")):
        name, colon, ranks = part.partition(":")
        if colon:
            last = ",".join([*names, name.strip(" \"'")])
            lines[last], names = ranks.strip(" \"'"), []
        elif _NAME.fullmatch(part):
            names.append(part)
        elif last and not names:
            lines[last] += f",{part}"
        else:
            return {}
    return {} if names else lines


def later_lines_win(lines: Mapping[str, str | int], chosen: Collection[str] = ()) -> dict[str, str | int]:
    """Merged lines of several files without those that a joined line of a later file replaces.

    Merging keeps ``actor: 0`` of the defaults beside ``actor,rollout: 0-3`` of a user's file, since the names differ. A
    joined line wins over those of its components, other than the ``chosen`` ones of the command line, which come last.
    """
    joined = {name.strip() for names in lines if "," in names for name in names.split(",")}
    kept: dict[str, str | int] = {}
    for names, ranks in lines.items():
        if "," in names:
            left = [name.strip() for name in names.split(",") if name.strip() not in chosen]
            if left:
                kept[",".join(left)] = ranks
        elif names in chosen or names not in joined:
            kept[names] = ranks
    return kept
