"""Our algorithms against published packages: ``python -m benchmarks.peers [--seed N] [--all]`` (``make bench-peers``).

Exits with 1 if a difference appears that is not in the list of explained ones (``cases.py``), or if one of those has
gone or has another cause.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peers import ours, ours_losses
from benchmarks.peers.cases import CASES
from benchmarks.peers.comparison import TOLERANCE, Result, compare
from benchmarks.peers.environment import PYTHON, require
from benchmarks.peers.inputs import Outputs, draw

COLOURS = {"equal": "green", "explained": "yellow", "peer raises": "yellow"}


def run_ours(inputs: dict[str, torch.Tensor]) -> dict[str, Outputs]:
    computations = {**ours.COMPUTATIONS, **ours_losses.COMPUTATIONS}
    return {name: computation(inputs) for name, computation in computations.items()}


def run_theirs(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What ``theirs.py`` writes: versions, outputs, errors."""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "inputs.pt"), Path(directory, "outputs.pt")
        torch.save(inputs, source)
        command = [PYTHON, "-W", "ignore", "-m", "benchmarks.peers.theirs", source, target]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return torch.load(target, weights_only=True)


def show(results: list[Result], console: Console, everything: bool) -> None:
    table = Table(title="our functions against the peers', largest absolute differences")
    table.add_column("function")
    table.add_column("peer")
    table.add_column("difference", justify="right")
    table.add_column("left over", justify="right")
    table.add_column("verdict")
    for result in results:
        if result.verdict == "equal" and not everything:
            continue
        table.add_row(
            result.case.function,
            result.case.peer,
            "" if result.difference is None else f"{result.difference:.2g}",
            "" if result.unexplained is None else f"{result.unexplained:.1g}",
            result.verdict,
            style=COLOURS.get(result.verdict, "bold red"),
        )
    console.print(table)


def explain(results: list[Result], console: Console) -> None:
    """Print each reason once, with where it applies."""
    why: dict[str, list[str]] = {}
    for result in results:
        if result.case.explained:
            why.setdefault(result.case.explained.why, []).append(f"{result.case.function} ({result.case.peer})")
    for reason, where in why.items():
        console.print(f"\n[bold]{'; '.join(where)}[/bold]\n  {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--all", action="store_true", help="also list what is equal, and why the rest is not")
    options = parser.parse_args()
    require()
    torch.set_num_threads(1)
    inputs = draw(options.seed)
    own, answer = run_ours(inputs), run_theirs(inputs)
    results = [compare(case, own, answer["outputs"], answer["errors"]) for case in CASES]
    console = Console()
    show(results, console, options.all)
    if options.all:
        explain(results, console)
    counts = Counter(result.verdict for result in results)
    versions = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
    console.print(f"\n{versions}; seed {options.seed}; equal means within {TOLERANCE:g} of a tensor's largest element")
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    failed = [result for result in results if result.fails]
    if failed:
        sys.exit("not as listed in benchmarks/peers/cases.py: " + "; ".join(r.case.function for r in failed))


if __name__ == "__main__":
    main()
