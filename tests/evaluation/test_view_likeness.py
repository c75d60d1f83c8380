"""The command behind the likenesses of docs/evaluation.md."""

from __future__ import annotations

import sys

import pytest

from scripts import view_likeness

pytest.importorskip("metaworld", reason="the metaworld extra is not installed")


def test_cameras_are_recognised(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(view_likeness, "TASKS", 2)
    monkeypatch.setattr(sys, "argv", ["view_likeness.py", "metaworld_mt10"])
    view_likeness.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "metaworld_mt10" in line]
    assert [row.split("│")[3].strip() for row in rows] == ["as it is", "turned", "upside down"]
    taken = [row.split("│")[5].strip() for row in rows]
    assert taken == ["the same", "turned by 180 degrees", "upside down"]
    assert rows[0].count("0.9") + rows[0].count("1.0") == 4, "cameras"
