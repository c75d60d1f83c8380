"""``scripts/expert_table.py``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/expert_table.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expert_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["expert_table.py", *arguments])
    script.main()


def test_a_table_goes_on_where_it_stopped(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "results/dummy.jsonl"
    arguments = ("dummy", "--episodes", "2", "--tasks", "0,2", "--steps", "40", "--out", str(out))
    table(script, monkeypatch, *arguments)
    first = capsys.readouterr().out
    assert "4/4" in first and "dummy, scripted expert" in first
    lines = out.read_text().splitlines()
    assert [json.loads(line)["reset_state_id"] for line in lines] == [0, 32, 128, 160]

    table(script, monkeypatch, *arguments, "--markdown")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:]] == ["| 0", "| 2", "| all"]
    assert [row[2:4] for row in rows[2:]] == [["2/2", "34.2 – 100.0 %"]] * 2 + [["4/4", "51.0 – 100.0 %"]]

    # What is in the file is believed, what is missing is played.
    failed = json.loads(lines[0]) | {"success": False}
    out.write_text("\n".join([json.dumps(failed), *lines[1:3]]) + "\n")
    table(script, monkeypatch, *arguments)
    assert "3/4" in capsys.readouterr().out
    assert out.read_text().splitlines() == [json.dumps(failed), *lines[1:]]

    with pytest.raises(SystemExit):
        table(script, monkeypatch, *arguments, "--noise", "1")
    assert "'noise_seed': None}, expected" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dummy"], "--steps: dummy has no published horizon"),
        (["dummy", "--steps", "9", "--episodes", "65"], "got 65, expected 1 to 64"),
        (["maniskill_push_cube"], "no scripted expert plays env_type 'maniskill'"),
        (["libero_spatia"], "libero_spatial"),
    ],
)
def test_what_is_wrong_is_said(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stop:
        table(script, monkeypatch, *arguments)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
