"""The race with TRL: what is read from both sides, how it is compared, and, where TRL is, a short race."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import trl_race
from benchmarks.peers import environment
from benchmarks.trl_race import CACHE, trl_input
from benchmarks.trl_race_report import (
    LINE,
    OURS,
    PHASES,
    TRL,
    Measured,
    Peer,
    breakdown,
    fastest,
    ours_measured,
    ratios,
    summary,
    trl_measured,
    verdict,
)
from embodied_rl.models.weights.shipped import SHIPPED

ROOT = Path(__file__).resolve().parents[2]


def line(step_s: float, update_s: float, accuracy: float) -> dict[str, float]:
    return {
        "time/step": step_s,
        "time/generate": 0.5,
        "time/update": update_s,
        "rollout/accuracy": accuracy,
        "rollout/length": 20.0,
        "actor/groups_equal": 0.25,
        "actor/samples_skipped": 0.25,
    }


def test_ours_leaves_out_the_first_two_steps() -> None:
    metrics = [line(100.0, 90.0, 0.0), line(100.0, 90.0, 0.0), line(2.0, 1.0, 0.4), line(4.0, 3.0, 0.6)]
    marks = [
        (0.0, {"driver": 1.0}),
        (100.0, {"driver": 1.0, "ActorGroup": 10.0}),
        (103.0, {"driver": 1.5, "ActorGroup": 12.0}),
        (107.0, {"driver": 1.5, "ActorGroup": 16.0}),
    ]
    found = ours_measured(metrics, marks)
    assert found.seconds == [2.0, 4.0]
    assert found.loop == pytest.approx(3.5)  # (107 - 100) / 2
    assert found.cpu == pytest.approx({"driver": 0.25, "ActorGroup": 3.0})
    assert found.cpu_total == pytest.approx(3.25)
    assert found.phases["update"] == pytest.approx(2.0)
    assert found.phases["generation"] == pytest.approx(0.5)
    assert found.phases["old logprobs"] == 0.0  # recorded while generating
    assert (found.accuracy, found.skipped) == pytest.approx((0.5, 0.25))


def trl_step(wall: float, phase: float) -> dict[str, Any]:
    names = ("generation", "reward", "log-probabilities", "advantages", "forward", "backward", "optimizer")
    return {
        "wall": wall,
        "cpu": 2 * wall,
        "phases": {name: {"wall": phase, "cpu": 2 * phase} for name in names},
        "accuracy": 0.5,
        "length": 21.0,
        "groups_equal": 0.0,
    }


def test_trl_update_is_forward_backward_and_optimizer() -> None:
    found = trl_measured([trl_step(50.0, 5.0), trl_step(50.0, 5.0), trl_step(8.0, 1.0), trl_step(10.0, 1.0)])
    assert found.seconds == [8.0, 10.0]
    assert found.loop == pytest.approx(9.0)
    assert found.phases["update"] == pytest.approx(3.0)
    assert found.cpu["update"] == pytest.approx(6.0)
    assert found.cpu["rest"] == pytest.approx(4.0)  # 2 * 9 - 7 phases of 2
    assert found.cpu_total == pytest.approx(18.0)


def measured(*seconds: float) -> Measured:
    return Measured(
        seconds=list(seconds),
        loop=sum(seconds) / len(seconds),
        cpu={"rest": 1.0},
        phases=dict.fromkeys(PHASES, 0.1),
        accuracy=0.4,
        length=20.0,
        groups_equal=0.1,
        skipped=0.1,
    )


def variants() -> dict[str, list[Measured]]:
    """Two rounds, the second on a machine half as fast."""
    ours = {name: [measured(2.0, 2.0, 9.0), measured(4.0)] for name in OURS}
    slow, fast, other = TRL
    return {
        **ours,
        slow: [measured(5.0), measured(9.0)],
        fast: [measured(4.0), measured(8.0)],
        other: [measured(4.5), measured(8.5)],
    }


def test_ours_is_compared_with_the_fastest_of_the_same_round() -> None:
    found = variants()
    assert fastest(found) == list(TRL)[1]
    assert ratios(found, next(iter(OURS))) == [0.5, 0.5]
    assert ratios(found, next(iter(TRL))) == [1.25, 1.125]


@pytest.mark.parametrize(
    ("ratio", "says"), [(0.5, "goal (0.5)"), (0.51, "line (0.7)"), (LINE, "line (0.7)"), (0.71, "missed")]
)
def test_verdict(ratio: float, says: str) -> None:
    assert verdict(ratio) == says


def test_tables_name_every_variant() -> None:
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(summary(variants()))
    console.print(breakdown(variants()))
    text = console.export_text()
    assert all(text.count(name) >= 2 for name in (*OURS, *TRL))
    assert "0.50–0.50" in text and "goal (0.5)" in text


def test_trl_gets_our_prompts_in_our_order_and_our_numbers() -> None:
    found = trl_input(Peer(threads=2), steps=2)
    assert found["model"] == str(SHIPPED / "arithmetic_lm")
    assert len(found["problems"]) == 2 * found["prompts_per_step"] == 128
    prompt, answer = found["problems"][64]
    left, right = prompt.rstrip("=").split("+")
    assert int(left) + int(right) == int(answer)
    numbers = ("group_size", "optimizer_steps", "max_new_tokens", "clip_ratio_low", "clip_ratio_high", "lr", "threads")
    assert [found[name] for name in numbers] == [8, 4, 24, 0.2, 0.28, 1e-4, 2]
    assert not found["torch_compile"]
    assert trl_input(Peer(threads=2, torch_compile=True), steps=2)["torch_compile"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not environment.exists(), reason="no .venv-peers; make bench makes it")
def test_both_sides_run_and_answer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    ours = trl_race.run_ours((), steps=3)
    trl, versions = trl_race.run_trl(Peer(threads=1), steps=3)
    assert versions["trl"]
    # The same weights on the same prompts: 512 completions differ by chance alone.
    assert ours.accuracy == pytest.approx(trl.accuracy, abs=0.12)
    assert ours.length == pytest.approx(trl.length, abs=1.0)
    assert sum(ours.phases.values()) == pytest.approx(ours.seconds[0], rel=0.15)
    assert sum(trl.phases.values()) == pytest.approx(trl.seconds[0], rel=0.15)


def test_without_the_peers_one_line_says_so(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from benchmarks.peers import environment; "
        "environment.PYTHON = Path('/nonexistent'); import sys; sys.argv[1:] = []; "
        "from benchmarks.trl_race import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "setup.sh" in run.stdout and "TRL is not measured" in run.stdout


def test_numbers_are_json() -> None:
    from dataclasses import asdict

    json.dumps([asdict(run) for run in variants()["TRL 1"]])
