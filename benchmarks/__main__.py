"""All benchmarks, one after the other: ``python -m benchmarks [--quick] [--json-dir DIR]`` (``make bench``)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("channels", "weight_sync", "advantages", "env_worker", "libero", "trl_race")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rougher numbers")
    parser.add_argument("--json-dir", type=Path, metavar="DIR", help="also write each benchmark's numbers there")
    options = parser.parse_args()
    failed = []
    for name in BENCHMARKS:
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if options.quick else [])]
        if options.json_dir:
            options.json_dir.mkdir(parents=True, exist_ok=True)
            command += ["--json", str(options.json_dir / f"{name}.json")]
        print(f"\n$ python {' '.join(command[1:])}", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
