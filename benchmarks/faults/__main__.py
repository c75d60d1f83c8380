"""Faults that happen to runs: ``python -m benchmarks.faults --count N --seed S [--families dummy,math] [--out FILE]``.

Each case is a fault of ``library.py`` at a random moment of a run. It must not hang, the run must name the cause or go
on, and leave no process, no shared memory and no temporary file; its newest checkpoint must be whole. Runs are forked
from this process, which has imported everything ("warm"); workers start as always. ``--table FILE ...``
draws the table of ``docs/faults.md``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults.table import read, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="faults for each family and backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", default="dummy", help="dummy, libero, math")
    parser.add_argument("--backends", default="process,serial", help="process, serial, cluster, ray")
    parser.add_argument("--per-run", type=int, default=12, help="faults that happen to one run of several processes")
    parser.add_argument("--files", action="store_true", help="damaged files instead: --count of them")
    parser.add_argument("--out", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only draw the table of these results")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return 0

    import torch

    import embodied_rl.launch  # noqa: F401  # warm
    from benchmarks.faults.campaign import Campaign, record, unlimited_core
    from benchmarks.faults.driven import adopt_orphans
    from benchmarks.faults.files import damaged_files

    torch.set_num_threads(1)
    adopt_orphans()
    unlimited_core()
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    print(f"runs: {folder}", flush=True)
    wrong = 0
    campaign = Campaign(folder, options.seed, per_run=options.per_run, keep=options.keep)
    with options.out.open("a") as out:
        for family in options.families.split(","):
            for backend in ["files"] if options.files else options.backends.split(","):
                began = time.monotonic()
                cases = (
                    damaged_files(folder, family, options.count, options.seed)
                    if backend == "files"
                    else campaign.cases(family, backend, options.count)
                )
                for verdict in cases:
                    wrong += bool(verdict.wrong)
                    out.write(record(verdict) + "\n")
                    out.flush()
                    mark = "WRONG" if verdict.wrong else "ok"
                    print(
                        f"{mark:5} {family} {backend} {verdict.fault}: {verdict.outcome} {verdict.status} "
                        f"{verdict.named_s or ''} {verdict.next_step_s} {verdict.wrong or ''}",
                        flush=True,
                    )
                print(f"{family} {backend}: {time.monotonic() - began:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
