"""The guard over the benchmarks' ratios: what each says of its numbers, and what counts as lost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as every
from benchmarks import advantages, channels, env_worker, guard, libero, state_race, trl_race, weight_sync
from benchmarks.guard import ALLOWED, RECORD, Ratio, measured, read, worse, write
from benchmarks.trl_race_report import OURS, TRL, Measured

CHANNELS = {
    name: {"of_copy": [0.3, 0.4, 0.5], "round_trip_seconds": [seconds]}
    for name, seconds in ((channels.PIPE, 3e-4), (channels.IN_PLACE, 2e-4), (channels.OURS, 1e-4))
}


def steps(seconds: float) -> Measured:
    return Measured(
        seconds=[seconds], loop=0, cpu={}, phases={}, accuracy=0, length=0, groups_equal=0, skipped=0
    )  # fmt: skip


def test_each_benchmark_says_how_much_better_ours_is() -> None:
    assert channels.compared(CHANNELS) == {
        "bytes/s by a plain copy's": 0.4,
        "bytes/s by a plain copy's, read in place": 0.4,
        "a pipe's round trip by the channel's": pytest.approx(3),
    }
    beside = {
        name: {"bytes_per_second": [9.0, rate, 1.0], "round_trip_seconds": [seconds]}
        for name, rate, seconds in ((channels.BESIDE, 8.0, 1e-4), (channels.RLINF, 2.0, 2e-2))
    }
    assert channels.compared({**CHANNELS, **beside}) == {
        **channels.compared(CHANNELS),
        "bytes/s by RLinf's channel's": 1,
        "RLinf's channel's round trip by the channel's": pytest.approx(200),
    }
    row = {"function": "gae", "workload": "C=1"}
    timed = [{**row, "ours": [(1, 9), (2, 9)], "rlinf": [(4, 9), (4, 9)]}, {**row, "ours": [(1, 9)], "rlinf": []}]
    assert advantages.compared(timed) == {"gae, C=1: RLinf's CPU time by ours": 3}
    assert env_worker.compared({"ratio_to_bare": {"bare": 1.0, "worker, mlp": 0.97}}) == {
        "worker, mlp, by a bare loop": 0.97
    }
    assert libero.compared({"steps_per_second": {"bare": 4.0, "upstream": 2.0, "chunked": 3.0}}) == {
        "a bare loop by LIBERO's own": 2,
        "env worker's chunks by a bare loop": 0.75,
    }
    assert weight_sync.compared([{"plane": "channel", "of_copy": [0.2, 0.4, 0.3]}]) == {
        "channel, bytes/s by a plain copy's": 0.3
    }
    rates = {"training: embodied_rl, one process": [10.0], "training: embodied_rl, env workers": [30.0]}
    rates |= {"training: Sample Factory": [20.0, 10.0, 12.0]}
    assert state_race.compared(rates) == {"training, by Sample Factory": 2.5}


def test_steps_of_trl_are_compared_with_ours() -> None:
    times = {**dict.fromkeys(OURS, 1.0), **dict.fromkeys(TRL, 3.0), next(iter(TRL)): 2.0}
    answer = {"variants": {name: [asdict(steps(seconds))] for name, seconds in times.items()}}
    assert trl_race.compared(answer) == {f"TRL's step by that of {name}": 2 for name in OURS}


def test_what_is_lower_than_allowed_is_lost(tmp_path: Path) -> None:
    (tmp_path / "channels.json").write_text(json.dumps(CHANNELS))
    now = measured([tmp_path / "channels.json", tmp_path / "never_written.json"], quick=True)
    assert [row.ratio for row in now.values()] == [0.4, 0.4, 3.0]
    write(tmp_path / "ratios.json", now)
    assert read(tmp_path / "ratios.json") == now

    def times(share: float) -> dict[str, Ratio]:
        return {what: Ratio(ratio=share * row.ratio, date="", machine="", quick=False) for what, row in now.items()}

    assert worse(times(1 - ALLOWED + 0.01), now) == []
    assert worse(times(1 - ALLOWED - 0.01), now) == [*now]
    assert worse(times(0.1), {}) == []


def test_a_lost_ratio_ends_the_command_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(names: Any, folder: Path, *, quick: bool) -> list[str]:
        (folder / "channels.json").write_text(json.dumps(CHANNELS))
        return []

    record = tmp_path / "ratios.json"
    record.write_text("{}")
    monkeypatch.setattr(every, "run", run)
    monkeypatch.setattr(every, "RECORD", record)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "channels", "--record"])
    every.main()
    record.write_text(record.read_text().replace("0.4", "0.8"))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "channels"])
    with pytest.raises(SystemExit, match="worse than at the last release: channels: bytes/s by a plain copy's"):
        every.main()
    assert capsys.readouterr().out.count("worse") == 2


def test_the_record_names_only_what_a_benchmark_measures() -> None:
    assert guard.read(RECORD)
    assert {what.partition(":")[0] for what in guard.read(RECORD)} <= {*every.BENCHMARKS}
