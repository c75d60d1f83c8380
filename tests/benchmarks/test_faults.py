"""A short campaign: faults of every sort, each with the verdict that nothing is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.library import FAULTS, faults
from benchmarks.faults.table import table

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)


def campaign(out: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.faults", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_runs(tmp_path: Path) -> None:
    found = campaign(tmp_path / "faults.jsonl", "--count", "4", "--per-run", "4", "--seed", "3")
    assert len(found) >= 8
    assert {verdict["backend"] for verdict in found} == {"process", "serial"}
    assert {verdict["outcome"] for verdict in found} <= {"goes on", "ended", "not met"}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(("backend", "count"), [("cluster", 6), ("ray", 2)])
def test_runs_over_nodes(tmp_path: Path, backend: str, count: int) -> None:
    if backend == "ray":
        pytest.importorskip("ray")
    found = campaign(
        tmp_path / "faults.jsonl", "--count", str(count), "--per-run", "3", "--seed", "1", "--backends", backend
    )
    assert len(found) >= count
    assert {verdict["outcome"] for verdict in found} <= {"goes on", "ended", "not met"}


def test_files(tmp_path: Path) -> None:
    found = campaign(tmp_path / "files.jsonl", "--files", "--count", "5", "--seed", "3")
    assert len(found) == 5 and all(verdict["file"].startswith("run/") for verdict in found)


def test_every_family_has_faults_of_each_sort() -> None:
    assert len(FAULTS) > 50
    for family in ("dummy", "libero", "math"):
        for backend in ("process", "serial"):
            names = {fault.place for fault in faults(family, backend)}
            assert "driver" in names and len(names) >= 2


def test_nodes_are_lost_where_there_are_some() -> None:
    names = {backend: {fault.name for fault in faults("dummy", backend)} for backend in ("process", "cluster", "ray")}
    assert names["ray"] - names["cluster"] == {"raylet SIGKILL"}
    assert {"agent SIGKILL", "agent SIGSTOP", "driver SIGHUP"} <= names["cluster"]
    assert "agent SIGKILL" not in names["process"]


def test_the_table_counts_and_times() -> None:
    verdict = {"family": "dummy", "backend": "process", "fault": "step kill", "outcome": "goes on", "wrong": []}
    timed = [verdict | {"replaced_s": s, "next_step_s": 2 * s} for s in (1.0, 2.0, 4.0)]
    ended = verdict | {"outcome": "ended", "replaced_s": None, "next_step_s": None, "wrong": ["not named"]}
    unmet = verdict | {"outcome": "not met"}
    assert table([*timed, ended, unmet]).splitlines()[-1] == (
        "| dummy, process | step kill | 4 | 3 | 1 | 2.0 (4.0) | 4.0 (8.0) | 1 |"
    )
    named = verdict | {"named_s": 9.0, "ended_s": 10.0, "outcome": "ended"}
    assert (
        table([named]).splitlines()[-1]
        == "| dummy, process | step kill | 1 | 0 | 1 | 9.0 (9.0) | 10.0 (10.0) |  |  | 0 |"
    )
