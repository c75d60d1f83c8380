"""The time left that a run shows after its third step, against the truth: ``python -m benchmarks.eta``.

Each run is one of :data:`RUNS`, or that of the given overrides. Passes if each is within 30 %.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from unittest import mock

import embodied_rl as er
from embodied_rl.monitoring.progress import Progress

AFTER = 3
"""Steps."""
ALLOWED = 0.3
RUNS = (
    "experiment=dummy_grpo",
    "task=math runner.max_steps=16",
    "experiment=libero_spatial_ppo env.train.total_num_envs=12 runner.max_steps=6 env.eval.episodes_per_task=8 "
    "env.eval.total_num_envs=24 env.eval.video_cfg.save_video=false",
)


def measure(overrides: Sequence[str]) -> tuple[float, float]:
    """(seconds left, as shown after the third step; as they were)."""
    shown: list[tuple[float, float]] = []
    advance = Progress.advance

    def note(self: Progress, count: int = 1) -> None:
        advance(self, count)
        if self.step == AFTER and (left := self.eta) is not None:
            shown.append((time.monotonic(), left))

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Progress, "advance", note):
        er.train(*overrides, f"runner.output_dir={folder}", quiet=True)
        end = time.monotonic()
    (at, left), *_ = shown
    return left, end - at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="of train.py, instead of the three runs")
    given = parser.parse_intermixed_args().overrides
    worst = 0.0
    print(f"| run | left after step {AFTER}, said (s) | true (s) | error |\n|---|---|---|---|")
    for overrides in [given] if given else map(shlex.split, RUNS):
        said, true = measure(overrides)
        worst = max(worst, abs(said / true - 1))
        print(f"| `{shlex.join(overrides)}` | {said:.1f} | {true:.1f} | {said / true - 1:+.0%} |", flush=True)
    print("passes" if worst <= ALLOWED else "fails")
    sys.exit(worst > ALLOWED)


if __name__ == "__main__":
    main()
