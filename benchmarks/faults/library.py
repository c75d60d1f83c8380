"""The faults, where they happen, and the words by which a run must name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Family = Literal["dummy", "libero", "math"]
NODES: Final = ("cluster", "ray")
"""Backends whose workers are on several nodes."""
_ANY: Final = {
    "raise": "a fault of the campaign",
    "kill": "SIGKILL",
    "segfault": "SIGSEGV",
    "exit": "exit status 3",
    "hang": r"no sign of life for \d+ s",
    "memory": "MemoryError",
    "descriptors": "Too many open files",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a run."""

    place: str
    """``step``, ``reset``, ``observe`` of a simulator; ``act``, ``update`` of the policy; ``reward``; or the
    name of a group of workers, or ``driver``: a signal from outside."""
    kind: str
    words: str
    """Matches what the run prints; empty: it needs no word, as nothing ends."""
    weight: float = 1.0
    """How often, beside others."""
    serial: bool = True
    """It can happen to a run in one process."""
    process: bool = True
    nodes: tuple[str, ...] = ()
    """Backends over nodes in which it can happen."""
    families: tuple[Family, ...] = ("dummy", "libero", "math")

    @property
    def name(self) -> str:
        return f"{self.place} {self.kind}"


_SIM: Final = ("dummy", "libero")


def _faults() -> list[Fault]:
    found = []
    for place in ("step", "reset"):
        found += [
            Fault(
                place=place,
                kind=kind,
                words=words,
                weight=0.4 if kind == "hang" else 2.0,
                serial=kind not in ("hang", "segfault", "kill", "exit"),
                families=_SIM,
            )
            for kind, words in _ANY.items()
        ]
    for place, wanted in (("step", "SimStep"), ("observe", "SimObs")):
        found += [
            Fault(place=place, kind="nan", words=r"NaN or infinite in env \d+, step \d+", weight=2.0, families=_SIM),
            Fault(place=place, kind="none", words=f"expected a {wanted}", weight=2.0, families=_SIM),
            Fault(place=place, kind="shape", words="expected", weight=2.0, families=_SIM),
        ]
    found.append(Fault(place="step", kind="slow", words="", weight=1.0, families=_SIM))
    mlp = ("dummy",)
    for kind, words in _ANY.items():
        stalls = kind == "hang"
        weight, serial = 0.1 if stalls else 0.5, kind not in ("hang", "segfault", "kill", "exit")
        found.append(Fault(place="update", kind=kind, words=words, weight=weight, serial=serial, families=mlp))
        found.append(Fault(place="act", kind=kind, words=words, weight=weight, serial=serial, families=mlp))
        if not stalls:
            found.append(Fault(place="reward", kind=kind, words=words, serial=serial, families=("math",)))
    found.append(Fault(place="update", kind="nan", words="the gradient's norm is nan", families=mlp))
    found.append(Fault(place="reward", kind="nan", words="returned nan, expected a finite number", families=("math",)))
    found.append(Fault(place="reward", kind="shape", words="expected a finite number", families=("math",)))
    for group in ("EnvGroup", "RolloutGroup", "ActorGroup"):
        env = group == "EnvGroup"
        families: tuple[Family, ...] = _SIM if env else ("dummy", "libero", "math")
        found += [
            Fault(place=group, kind="SIGKILL", words="SIGKILL", weight=3.0 if env else 1.0, serial=False,
                  families=families, nodes=NODES),
            Fault(place=group, kind="SIGSTOP", words=r"no sign of life for \d+ s", weight=0.4 if env else 0.1,
                  serial=False, families=families),
        ]  # fmt: skip
    for kind, words in (("SIGTERM", "terminated"), ("SIGINT", "interrupted"), ("SIGHUP", "terminal closed")):
        found.append(Fault(place="driver", kind=kind, words=words, weight=0.7, nodes=NODES))
    found.append(Fault(place="driver", kind="SIGKILL", words="", weight=0.7, nodes=NODES))
    for place, kind, words, nodes in (
        ("agent", "SIGKILL", "node [012] .* is gone", NODES),
        ("agent", "SIGSTOP", "node [012] .* no sign of life for 8 s", NODES),
        ("raylet", "SIGKILL", r"node [01] .* (is gone|stands still)", ("ray",)),
    ):
        found.append(Fault(place=place, kind=kind, words=words, weight=2.0, nodes=nodes, serial=False, process=False))
    found.append(Fault(place="disk", kind="full", words="No space left on device", weight=2.0, process=False))
    return found


FAULTS: Final = tuple(_faults())


def faults(family: Family, backend: str) -> list[Fault]:
    """Those that can happen to such a run."""
    fit = [fault for fault in FAULTS if family in fault.families]
    if backend in NODES:
        return [fault for fault in fit if backend in fault.nodes]
    return [fault for fault in fit if (fault.serial if backend == "serial" else fault.process)]
