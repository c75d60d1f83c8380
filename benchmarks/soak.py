"""A long run watched for leaks: ``python -m benchmarks.soak --minutes 120 env=libero_10``.

Starts ``train.py`` with the given overrides and no end, and every few seconds notes of each of its processes the memory
that no other shares (USS), open descriptors and threads. After the time it presses Ctrl-C. The first quarter is
warm-up; then the last quarter is compared with the second. It passes if the memory of all processes together has grown
by at most 3 % and no process has more descriptors or threads than before. ``samples.jsonl`` and ``soak.png`` are
written to ``--out``; ``--report`` judges samples that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

ALLOWED_GROWTH = 0.03
_END_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one time."""

    seconds: float
    """Since the start."""
    name: str
    gib: float
    """Memory of its own."""
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From the second quarter of a soak to its last."""

    name: str
    gib: tuple[float, float]
    """Medians."""
    descriptors: tuple[int, int]
    """Largest."""
    threads: tuple[int, int]

    @property
    def growth(self) -> float:
        """Of memory, as a share."""
        return self.gib[1] / self.gib[0] - 1

    @property
    def gained(self) -> bool:
        """More descriptors or threads than before."""
        return self.descriptors[1] > self.descriptors[0] or self.threads[1] > self.threads[0]


def watch(process: subprocess.Popen[bytes], seconds: float, every: float) -> Iterator[list[Sample]]:
    """Samples of all processes of a run, until the time is over or it ends by itself."""
    start = time.monotonic()
    root = psutil.Process(process.pid)
    while process.poll() is None and time.monotonic() - start < seconds:
        yield list(_look(root, time.monotonic() - start))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(every)


def _look(root: psutil.Process, seconds: float) -> Iterator[Sample]:
    counts: dict[str, int] = {}
    with contextlib.suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                name = "driver" if process == root else process.name()
                counts[name] = counts.get(name, 0) + 1
                yield Sample(
                    seconds=round(seconds, 1),
                    name=name if counts[name] == 1 else f"{name} {counts[name]}",
                    gib=process.memory_full_info().uss / 2**30,
                    descriptors=process.num_fds(),
                    threads=process.num_threads(),
                )


def changes(samples: Sequence[Sample]) -> list[Change]:
    """Of all processes together ("all"), and of each that was there in both quarters.

    Raises:
        ValueError: too few samples to compare quarters.
    """
    end = max((sample.seconds for sample in samples), default=0.0)
    quarters = [
        [sample for sample in samples if low * end <= sample.seconds <= high * end]
        for low, high in ((0.25, 0.5), (0.75, 1.0))
    ]
    if min(len({sample.seconds for sample in quarter}) for quarter in quarters) < 3:
        raise ValueError("too short: fewer than three samples in a quarter")
    before, after = quarters
    found = [_change("all", _together(before), _together(after))]
    for name in dict.fromkeys(sample.name for sample in before):
        pair = [[sample for sample in quarter if sample.name == name] for quarter in quarters]
        if pair[1]:
            found.append(_change(name, *pair))
    return found


def _together(samples: Iterable[Sample]) -> list[Sample]:
    times: dict[float, list[Sample]] = {}
    for sample in samples:
        times.setdefault(sample.seconds, []).append(sample)
    return [
        Sample(
            seconds=seconds,
            name="all",
            gib=sum(sample.gib for sample in group),
            descriptors=sum(sample.descriptors for sample in group),
            threads=sum(sample.threads for sample in group),
        )
        for seconds, group in times.items()
    ]


def _change(name: str, before: Sequence[Sample], after: Sequence[Sample]) -> Change:
    return Change(
        name=name,
        gib=(median(sample.gib for sample in before), median(sample.gib for sample in after)),
        descriptors=(max(sample.descriptors for sample in before), max(sample.descriptors for sample in after)),
        threads=(max(sample.threads for sample in before), max(sample.threads for sample in after)),
    )


def passed(found: Sequence[Change]) -> bool:
    """Whether nothing leaks: memory of all together, descriptors and threads of each."""
    together, *each = found
    return together.growth <= ALLOWED_GROWTH and not any(change.gained for change in each)


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Memory, descriptors and threads of each process over time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    for name in dict.fromkeys(sample.name for sample in samples):
        own = [sample for sample in samples if sample.name == name]
        minutes = [sample.seconds / 60 for sample in own]
        for axis, field in zip(axes, ("gib", "descriptors", "threads"), strict=True):
            axis.plot(minutes, [getattr(sample, field) for sample in own], label=name, linewidth=1.2)
    for axis, label in zip(axes, ("memory of its own (GiB)", "open descriptors", "threads"), strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def report(samples: Sequence[Sample], out: Path, console: Console) -> bool:
    """Print the table, draw the picture, say whether it passes."""
    found = changes(samples)
    hours = max(sample.seconds for sample in samples) / 3600
    table = Table(title=f"{hours:.2f} hours: second quarter → last quarter")
    table.add_column("process")
    for column in ("memory (GiB)", "growth", "descriptors", "threads"):
        table.add_column(column, justify="right")
    for change in found:
        table.add_row(
            change.name,
            f"{change.gib[0]:.3f} → {change.gib[1]:.3f}",
            f"{change.growth:+.1%}",
            f"{change.descriptors[0]} → {change.descriptors[1]}",
            f"{change.threads[0]} → {change.threads[1]}",
        )
    console.print(table)
    draw(samples, out / "soak.png")
    console.print("passes" if passed(found) else "fails")
    return passed(found)


def soak(overrides: Sequence[str], out: Path, *, seconds: float, every: float) -> list[Sample]:
    """Run, watch and end it; samples are also written to ``out`` as they come.

    Raises:
        SystemExit: the run ended by itself, or not as Ctrl-C ends a run.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "train.py", *overrides, "runner.max_steps=1000000", f"runner.output_dir={out}/run"]
    samples: list[Sample] = []
    with (out / "run.txt").open("wb") as log, (out / "samples.jsonl").open("w") as file:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            for group in watch(process, seconds, every):
                samples += group
                file.writelines(json.dumps(asdict(sample)) + "\n" for sample in group)
                file.flush()
            if process.poll() is not None:
                sys.exit(f"the run ended by itself with exit status {process.returncode}: see {out}/run.txt")
            process.send_signal(signal.SIGINT)
            if process.wait(_END_PATIENCE_S) != 130:
                sys.exit(f"the run ended with exit status {process.returncode}, not 130: see {out}/run.txt")
        finally:
            process.kill()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="A long run watched for leaks.")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=20.0, metavar="SECONDS", help="between two samples")
    parser.add_argument("--out", type=Path, default=Path(".benchmarks/soak"))
    parser.add_argument("--report", action="store_true", help="judge the samples that are in --out")
    parser.add_argument("overrides", nargs="*", help="of train.py: env=libero_10")
    options = parser.parse_intermixed_args()
    if options.report:
        lines = (options.out / "samples.jsonl").read_text().splitlines()
        samples = [Sample(**json.loads(line)) for line in lines]
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it, and theirs
        samples = soak(options.overrides, options.out, seconds=60 * options.minutes, every=options.every)
    sys.exit(not report(samples, options.out, Console()))


if __name__ == "__main__":
    main()
