"""The benchmark of pipelined stages: each worker's own pace, and a short run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pipelining import CASES, CHUNK, CHUNKS, Case, SleepingEnv, SleepingParams, rollouts


def pace_of(counter: Path) -> str:
    """What two stages of a new process have."""
    script = (
        "from benchmarks.pipelining import SleepingEnv as Env, SleepingParams as Params;"
        f"params = Params(step_s=1.0, parts=(1.0, 0.25), counter={str(counter)!r});"
        "print([Env(1, params, 0)._step_s for _ in range(2)])"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_each_worker_has_a_pace_of_its_own_for_all_its_stages(tmp_path: Path) -> None:
    counter = tmp_path / "workers"
    assert [pace_of(counter) for _ in range(3)] == ["[1.0, 1.0]", "[0.25, 0.25]", "[1.0, 1.0]"]


def test_the_ideal_is_the_slowest_workers_chunks_and_the_first_turn() -> None:
    case = CASES["two stages"]
    assert case.ideal_s == pytest.approx(2 * CHUNKS * 0.1 + 0.1)


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    case = Case(workers=1, parts=(1.0,), chunk_s=CHUNK * 0.001, act_s=0.001, line=0.0)
    (seconds,) = rollouts(case, 1, tmp_path / "run")
    assert case.ideal_s < seconds < 60
    assert SleepingEnv.part is None, "it slept in a process of its own"
    assert SleepingParams().parts == (1.0,)
