"""What the race with TRL measures of each side, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich.table import Table

LINE, GOAL = 0.7, 0.5
"""Of TRL's time for a step."""
DROPPED = 2
"""First steps of a run: caches, threads and memory are not warm, and what is compiled is being compiled."""

OVERLAPPED = "rollout.max_staleness=1"
REPLICAS = "actor.fsdp_config.sharding_strategy=no_shard"
TWO_OF_EACH = ("cluster.component_placement={actor:0-1,rollout:0-1}", REPLICAS)
TWO_ACTORS = (OVERLAPPED, "cluster.component_placement={actor:0-1,rollout:0}", REPLICAS)
OURS: Mapping[str, tuple[str, ...]] = {
    "ours": (),
    "ours 2+2": TWO_OF_EACH,
    "ours 2+2 compiled": (*TWO_OF_EACH, "actor.torch_compile=true"),
    "ours async": (OVERLAPPED,),
    "ours async 2+1": TWO_ACTORS,
    "ours async 2+1 compiled": (*TWO_ACTORS, "actor.torch_compile=true"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How TRL runs."""

    threads: int
    torch_compile: bool = False


TRL: Mapping[str, Peer] = {
    "TRL 1": Peer(threads=1),
    "TRL 2": Peer(threads=2),
    "TRL 2 compiled": Peer(threads=2, torch_compile=True),
}
LEGEND = """\
ours: on-policy, an actor and a generation worker of one thread each, which take turns. 2+2: two of each.
async: rollout.max_staleness=1, the next step's completions are made during the update. 2+1: with two actor ranks.
TRL 1, TRL 2: threads. compiled: by torch.compile, of ours the actor's blocks. s: median. loop: mean, with all that is
between steps. ÷ TRL: the fastest one's median in the same round; median and range of the rounds. CPU: seconds of all
processes."""
PHASES: Mapping[str, tuple[str, ...]] = {
    "generation": ("time/generate", "generation"),
    "reward": ("time/reward", "reward"),
    "old logprobs": ("time/scoring", "log-probabilities"),
    "advantages": ("time/advantage", "advantages"),
    "update": ("time/update", "forward", "backward", "optimizer"),
    "weight sync": ("time/sync",),
}
"""Row of the table -> what it is called in ours and in TRL's times."""
PROCESSES = {"RolloutGroup": "CPU, generation", "ActorGroup": "CPU, actor", "driver": "CPU, driver"}
"""What ``ps`` calls ours -> row of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steps of one run that count."""

    seconds: list[float]
    """Wall time of each step."""
    loop: float
    """Mean wall seconds from one step's end to the next one's: with all that comes between steps."""
    cpu: dict[str, float]
    """CPU seconds of a step by process (ours) or by phase (TRL's)."""
    phases: dict[str, float]
    """Mean wall seconds of a step by phase, in the table's words."""
    accuracy: float
    length: float
    """Mean tokens of a completion."""
    groups_equal: float
    """Share of groups with equal scores, which teach nothing."""
    skipped: float
    """Share of samples that the update left out."""

    @property
    def cpu_total(self) -> float:
        return sum(self.cpu.values())


def ours_measured(metrics: Sequence[Mapping[str, Any]], marks: Sequence[tuple[float, dict[str, float]]]) -> Measured:
    """From the lines of metrics.jsonl and what was seen when each of them came."""
    counted, (start, before), (end, after) = metrics[DROPPED:], marks[DROPPED - 1], marks[-1]
    count = len(counted)

    def average(name: str) -> float:
        return mean(line.get(name, 0.0) for line in counted)

    return Measured(
        seconds=[line["time/step"] for line in counted],
        loop=(end - start) / count,
        cpu={name: (used - before.get(name, 0.0)) / count for name, used in after.items()},
        phases={phase: average(names[0]) for phase, names in PHASES.items()},
        accuracy=average("rollout/accuracy"),
        length=average("rollout/length"),
        groups_equal=average("actor/groups_equal"),
        skipped=average("actor/samples_skipped"),
    )


def trl_measured(steps: Sequence[Mapping[str, Any]]) -> Measured:
    """From what :mod:`benchmarks.peers.trl_training` wrote."""
    counted = steps[DROPPED:]

    def average(kind: str, names: Sequence[str]) -> float:
        return sum(mean(step["phases"][name][kind] for step in counted) for name in names)

    cpu = {phase: average("cpu", names[1:]) for phase, names in PHASES.items() if names[1:]}
    return Measured(
        seconds=[step["wall"] for step in counted],
        loop=mean(step["wall"] for step in counted),
        cpu=cpu | {"rest": mean(step["cpu"] for step in counted) - sum(cpu.values())},
        phases={phase: average("wall", names[1:]) for phase, names in PHASES.items()},
        accuracy=mean(step["accuracy"] for step in counted),
        length=mean(step["length"] for step in counted),
        groups_equal=mean(step["groups_equal"] for step in counted),
        skipped=0.0,
    )


def fastest(found: Mapping[str, Sequence[Measured]]) -> str:
    """The TRL variant that ours is compared with: the one of the lowest median."""
    return min(TRL, key=lambda name: median(step for measured in found[name] for step in measured.seconds))


def ratios(found: Mapping[str, Sequence[Measured]], name: str) -> list[float]:
    """Each round's median step over that of the fastest TRL variant in the same round."""
    return [
        median(own.seconds) / median(trl.seconds) for own, trl in zip(found[name], found[fastest(found)], strict=True)
    ]


def verdict(ratio: float) -> str:
    return f"goal ({GOAL})" if ratio <= GOAL else f"line ({LINE})" if ratio <= LINE else "missed"


def summary(found: Mapping[str, Sequence[Measured]]) -> Table:
    table = Table(title="64 prompts × 8 completions, up to 24 tokens, 4 optimiser steps: seconds a step")
    for column in ("", "s", "÷ TRL", "range", "loop", "CPU", "cores busy", "reached"):
        table.add_column(column, justify="left" if column in ("", "reached") else "right", no_wrap=True)
    for name, runs in found.items():
        by_round = ratios(found, name)
        ratio = median(by_round)
        loop, cpu = mean(run.loop for run in runs), mean(run.cpu_total for run in runs)
        table.add_row(
            name,
            f"{median(step for run in runs for step in run.seconds):.2f}",
            f"{ratio:.2f}",
            f"{min(by_round):.2f}–{max(by_round):.2f}",
            f"{loop:.2f}",
            f"{cpu:.2f}",
            f"{cpu / loop:.2f}",
            verdict(ratio) if name in OURS else "",
        )
    return table


def breakdown(found: Mapping[str, Sequence[Measured]]) -> Table:
    """Where a step's wall time goes, and whose CPU time it is."""
    table = Table(title="where it goes: mean wall seconds a step (TRL: wall / CPU)")
    table.add_column("", no_wrap=True)
    for name in found:
        table.add_column(name, justify="right")

    def row(title: str, cell: Callable[[str, Sequence[Measured]], str], **style: Any) -> None:
        table.add_row(title, *(cell(name, runs) for name, runs in found.items()), **style)

    for phase in PHASES:

        def of_phase(name: str, runs: Sequence[Measured], phase: str = phase) -> str:
            wall = mean(run.phases[phase] for run in runs)
            cpu = "" if name in OURS or phase not in runs[0].cpu else f" / {mean(run.cpu[phase] for run in runs):.2f}"
            return f"{wall:.2f}{cpu}"

        row(phase, of_phase)

    def rest(name: str, runs: Sequence[Measured]) -> str:
        left = mean(mean(run.seconds) - sum(run.phases.values()) for run in runs)
        if name in OURS:
            return "" if OVERLAPPED in OURS[name] else f"{left:.2f}"  # there phases run at the same time
        return f"{left:.2f} / {mean(run.cpu['rest'] for run in runs):.2f}"

    row("rest", rest, end_section=True)
    for process, title in PROCESSES.items():

        def cpu(name: str, runs: Sequence[Measured], process: str = process) -> str:
            return f"{mean(run.cpu.get(process, 0.0) for run in runs):.2f}" if name in OURS else ""

        row(title, cpu)
    row("right answers", lambda _, runs: f"{mean(run.accuracy for run in runs):.0%}")
    row("tokens", lambda _, runs: f"{mean(run.length for run in runs):.1f}")
    row("equal groups", lambda _, runs: f"{mean(run.groups_equal for run in runs):.0%}")
    row("samples skipped", lambda _, runs: f"{mean(run.skipped for run in runs):.0%}")
    return table
