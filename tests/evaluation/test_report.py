from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from embodied_rl.contracts import EvaluatedEpisode
from embodied_rl.evaluation.report import eval_report
from embodied_rl.evaluation.success import SuccessReport, SuccessTable, success_table
from embodied_rl.files import write_json

INSTRUCTIONS = (
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "pick up the black bowl next to the [ramekin] and place it on the plate",
)


def episodes(episode_return: float = 0.5) -> list[EvaluatedEpisode]:
    return [
        EvaluatedEpisode(
            env_id=i,
            task_id=i % 2,
            instruction=INSTRUCTIONS[i % 2],
            reset_state_id=i,
            success=i % 2 == 0 or i < 4,
            episode_return=episode_return,
            episode_length=100 + i,
            max_reward=0.25,
            init_state=i // 2,
            policy_version=4,
            video=Path("videos/a.mp4") if i < 2 else None,
            tile=i if i < 2 else None,
        )
        for i in range(20)
    ]


def write_eval_json(path: Path, *results: Any, **about: Any) -> None:
    write_json(path, eval_report(*results, **about))


def table(episode_return: float = 0.5) -> SuccessTable:
    return success_table(episodes(episode_return))


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


@pytest.mark.parametrize("width", [80, 120])
def test_suites_have_a_table_of_their_own(width: int) -> None:
    names = ("libero_10_lan", "libero_10_swap")
    several = success_table([replace(episode, suite=names[episode.task_id]) for episode in episodes()])
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(SuccessReport(several, title="libero_pro"))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    [row] = [line for line in lines if "libero_10_swap" in line]
    assert row.split()[:5] == ["libero_10_swap", "1", "20.0%", "2/10", "20.0%"]
    assert "by suite" not in "\n".join(render(width))
    content = eval_report(several, [], meta={})
    assert [(row["suite"], row["pc_success"], row["n_tasks"]) for row in content["per_suite"]] == [
        ("libero_10_lan", 100.0, 1),
        ("libero_10_swap", 20.0, 1),
    ]


def test_interval_chart_places_the_rate() -> None:
    row = next(line for line in render(160) if "2/10" in line)
    chart = row[render(160)[2].index("0 %") :]
    # 21 cells from 0 to 100 %: the interval 5.7 - 51.0 is cells 1 to 10, the rate 20 % is cell 4
    assert chart.rstrip() == " ───●──────"


def test_eval_json_content(tmp_path: Path) -> None:
    path = tmp_path / "new" / "eval.json"
    write_eval_json(
        path,
        table(),
        episodes()[::-1],
        meta={"suite": "spatial", "seed": 3},
        seed=7,
        eval_s=10.0,
        video_paths=[Path("videos/a.mp4")],
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
    assert (report["schema_version"], report["kind"]) == (2, "episodes")
    assert [(e["task_id"], e["init_state"]) for e in report["episodes"]] == [(t, i) for t in (0, 1) for i in range(10)]
    assert report["episodes"][10] == {
        "task_id": 1,
        "instruction": INSTRUCTIONS[1],
        "init_state": 0,
        "reset_state_id": 1,
        "seed": 7,
        "success": True,
        "failed": False,
        "return": 0.5,
        "max_reward": 0.25,
        "length": 101,
        "policy_version": 4,
        "video": {"file": "videos/a.mp4", "tile": 1},
    }
    assert report["episodes"][11]["video"] is None
    assert list(path.parent.iterdir()) == [path], "no partial file is left"


def test_eval_json_is_the_same_but_for_timing(tmp_path: Path) -> None:
    for name, seconds in (("a", 1.0), ("b", 2.0), ("c", None), ("d", None)):
        write_eval_json(tmp_path / name, table(), episodes(), meta={"seed": 3}, eval_s=seconds)
    a, b, c, d = ((tmp_path / name).read_bytes() for name in "abcd")
    assert c == d
    assert a != b
    without = [{k: v for k, v in json.loads(text).items() if k != "timing"} for text in (a, b, c)]
    assert without[0] == without[1] == without[2]


def test_eval_json_nan_return_is_null(tmp_path: Path) -> None:
    write_eval_json(tmp_path / "eval.json", table(math.nan), episodes(math.nan), meta={})
    report = json.loads((tmp_path / "eval.json").read_text())
    assert report["overall"]["avg_sum_reward"] is None
    assert report["episodes"][0]["return"] is None


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    write_eval_json(path, table(), episodes(), meta={})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_eval_json(path, table(), episodes(), meta={"policy": object()})
    assert path.read_bytes() == before
