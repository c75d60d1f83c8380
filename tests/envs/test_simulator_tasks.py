"""docs/simulator_tasks.csv has every task that the installed simulators register."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("simulator", ["maniskill", "robosuite"])
def test_the_list_of_tasks_is_current(simulator: str) -> None:
    pytest.importorskip("mani_skill")
    pytest.importorskip("robosuite")
    spec = importlib.util.spec_from_file_location("task_speed", ROOT / "scripts/task_speed.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with script.FILE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["simulator"] == simulator]
    registered = [task for kind, task in script.known_tasks() if kind == simulator]
    assert [row["task"] for row in rows] == registered, "run: python scripts/task_speed.py"
    assert all(row["reason"] or float(row["steps_per_s"]) > 0 for row in rows)
    assert not any(row["reason"].startswith("/") or "/." in row["reason"] for row in rows), "folders of a machine"
