"""All benchmarks, one after the other: ``python -m benchmarks [--quick] [--json-dir DIR] [--record]`` (``make bench``).

In the end their ratios stand beside those of the last release; it fails where one was lost (:mod:`benchmarks.guard`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.guard import RECORD, measured, read, show, worse, write

BENCHMARKS = (
    "channels", "weight_sync", "advantages", "env_worker", "libero", "lerobot_race", "state_race", "trl_race",
)  # fmt: skip


def run(names: Sequence[str], folder: Path, *, quick: bool) -> list[str]:
    """Run them; those that failed. Each writes its numbers to ``folder``."""
    failed = []
    for name in names:
        file = folder / f"{name}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else []), "--json", str(file)]
        print(f"\n$ python {' '.join(command[1:])}", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rougher numbers")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, help="default: all")
    parser.add_argument("--json-dir", type=Path, metavar="DIR", help="also write each benchmark's numbers there")
    parser.add_argument("--record", action="store_true", help=f"write the ratios to {RECORD.name}, as a release's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = options.json_dir or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        failed = run(options.only, folder, quick=options.quick)
        now = measured([folder / f"{name}.json" for name in options.only], quick=options.quick)
    before = read(RECORD)
    Console().print(show(now, before))
    if options.record:
        write(RECORD, {**before, **now})
    elif lost := worse(now, before):
        failed.append(f"worse than at the last release: {'; '.join(lost)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
