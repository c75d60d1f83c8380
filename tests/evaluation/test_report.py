from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.evaluation.report import SuccessReport, write_eval_json
from embodied_rl.evaluation.success import SuccessTable, success_table

INSTRUCTIONS = (
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "pick up the black bowl next to the [ramekin] and place it on the plate",
)


def table(episode_return: float = 0.5) -> SuccessTable:
    return success_table(
        EpisodeRecord(
            env_id=i,
            task_id=i % 2,
            instruction=INSTRUCTIONS[i % 2],
            reset_state_id=i,
            success=i % 2 == 0 or i < 4,
            episode_return=episode_return,
            episode_length=100 + i,
        )
        for i in range(20)
    )


def render(width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(SuccessReport(table(), title="libero_spatial"))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [72, 80, 100, 120, 160])
def test_report_fits_the_console_and_keeps_every_word(width: int) -> None:
    lines = render(width)
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert set(" ".join(INSTRUCTIONS).split()) <= words
    text = "\n".join(lines)
    for cell in ("10/10", "2/10", "12/20", "100.0%", "20.0%", "60.0%", "72.2 - 100.0", "38.7 - 78.1"):
        assert cell in text
    assert ("to success" in text) == (width >= 100)
    assert ("●" in text) == (width >= 120)


def test_interval_chart_places_the_rate() -> None:
    row = next(line for line in render(160) if "2/10" in line)
    chart = row[render(160)[2].index("0 %") :]
    # 21 cells from 0 to 100 %: the interval 5.7 - 51.0 is cells 1 to 10, the rate 20 % is cell 4
    assert chart.rstrip() == " ───●──────"


def test_eval_json_content(tmp_path: Path) -> None:
    path = tmp_path / "new" / "eval.json"
    write_eval_json(
        path, table(), meta={"suite": "spatial", "seed": 3}, eval_s=10.0, video_paths=[Path("videos/a.mp4")]
    )
    report = json.loads(path.read_text())
    assert report["meta"] == {"suite": "spatial", "seed": 3}
    overall = report["overall"]
    assert (overall["pc_success"], overall["n_episodes"], overall["avg_sum_reward"]) == (60.0, 20, 0.5)
    assert overall["video_paths"] == ["videos/a.mp4"]
    assert report["timing"] == {"eval_s": 10.0, "eval_ep_s": 0.5}
    assert [task["pc_success"] for task in report["per_task"]] == [100.0, 20.0]
    assert report["per_task"][1]["pc_success_ci95"] == pytest.approx([5.6682, 50.9838], abs=1e-3)
    assert report["per_task"][1]["n_successes"] == 2
    assert report["per_task"][1]["avg_success_length"] == 102.0
    assert list(path.parent.iterdir()) == [path], "no partial file is left"


def test_eval_json_is_the_same_but_for_timing(tmp_path: Path) -> None:
    for name, seconds in (("a", 1.0), ("b", 2.0), ("c", None), ("d", None)):
        write_eval_json(tmp_path / name, table(), meta={"seed": 3}, eval_s=seconds)
    a, b, c, d = ((tmp_path / name).read_bytes() for name in "abcd")
    assert c == d
    assert a != b
    without = [{k: v for k, v in json.loads(text).items() if k != "timing"} for text in (a, b, c)]
    assert without[0] == without[1] == without[2]


def test_eval_json_nan_return_is_null(tmp_path: Path) -> None:
    write_eval_json(tmp_path / "eval.json", table(math.nan), meta={})
    assert json.loads((tmp_path / "eval.json").read_text())["overall"]["avg_sum_reward"] is None


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    write_eval_json(path, table(), meta={})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_eval_json(path, table(), meta={"policy": object()})
    assert path.read_bytes() == before
