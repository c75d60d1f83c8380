from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from embodied_rl.monitoring.progress import Progress, format_duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Clock, total: int, initial: int = 0) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=False)
    return Progress(total, initial, console=console, line_interval=30, clock=clock), out


def test_lines_without_a_terminal() -> None:
    clock = Clock()
    progress, out = plain(clock, total=6, initial=2)
    with progress:
        for chunk in range(1, 5):
            clock.now += 10
            progress.report("rollout", chunk, 4)
        progress.describe("update")
        clock.now += 20
        progress.advance()
        clock.now += 60
        progress.advance()
    assert out.getvalue().splitlines() == [
        "step 2/6 (33%), rollout 3/4, elapsed 0:00:30, left -:--:--",
        "step 3/6 (50%), update, elapsed 0:01:00, left 0:03:00",
        "step 4/6 (67%), update, elapsed 0:02:00, left 0:02:00",
    ]
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_a_short_run_prints_its_end_once() -> None:
    clock = Clock()
    progress, out = plain(clock, total=1)
    with progress:
        clock.now += 5
        progress.advance()
    assert out.getvalue() == "step 1/1 (100%), elapsed 0:00:05, left 0:00:00\n"


def test_eta_ignores_the_steps_of_an_earlier_process_and_counts_down() -> None:
    clock = Clock()
    progress, _ = plain(clock, total=100, initial=90)
    with progress:
        assert progress.eta is None
        clock.now += 8
        progress.advance(2)
        assert progress.eta == 32
        clock.now += 3
        assert progress.eta == 29
        clock.now += 1000
        assert progress.eta == 0


def test_eta_follows_the_recent_pace() -> None:
    clock = Clock()
    progress, _ = plain(clock, total=1000)
    with progress:
        for seconds in [100] * 5 + [1] * 20:
            clock.now += seconds
            progress.advance()
        assert progress.eta == 975


def test_bar_on_a_terminal_shares_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, force_interactive=True)
    clock = Clock()
    with Progress(4, 1, unit="episode", console=console, clock=clock) as progress:
        clock.now += 65
        progress.report("rollout", 2, 3)
        progress.advance()
        console.print("a table")
        progress.describe("[update]")
    text = out.getvalue()
    assert "\x1b" in text
    assert "a table" in text
    assert "episode [update]" in text, "text in brackets is no markup"
    assert "2/4" in text
    assert "0:02:10 left" in text


def test_an_interrupted_start_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    started = RichProgress.start

    def interrupted(bar: RichProgress) -> None:
        started(bar)
        raise KeyboardInterrupt

    monkeypatch.setattr(RichProgress, "start", interrupted)
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with pytest.raises(KeyboardInterrupt), Progress(total_steps=3, console=console):
        pass
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1  # the cursor is back
    console.print("interrupted")
    assert out.getvalue().endswith("interrupted\n")  # under the bar, not above it


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-:--:--"), (0, "0:00:00"), (59.7, "0:01:00"), (90061, "25:01:01")]
)
def test_format_duration(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_an_evaluation_counts_itself_after_the_last_step() -> None:
    clock = Clock()
    progress, out = plain(clock, total=2)
    with progress:
        for _ in range(2):
            clock.now += 100
            progress.report("update", 1, 1)
            progress.advance()
        out.truncate(out.seek(0))
        with progress.phase("evaluation"):
            clock.now += 40
            progress.report("evaluation chunk", 1, 10)
            assert progress.eta == 360
            clock.now += 40
            progress.report("evaluation chunk", 2, 10)
            clock.now += 120
            progress.report("evaluation chunk", 5, 10)
        clock.now += 1
    assert out.getvalue().splitlines() == [
        "step 2/2 (100%), evaluation chunk 1/10, elapsed 0:04:00, left 0:06:00",
        "step 2/2 (100%), evaluation chunk 2/10, elapsed 0:04:40, left 0:05:20",
        "step 2/2 (100%), evaluation chunk 5/10, elapsed 0:06:40, left 0:03:20",
        "step 2/2 (100%), evaluation chunk 10/10, elapsed 0:06:41, left 0:00:00",
    ]


def test_an_evaluation_in_the_middle_leaves_the_steps_to_come() -> None:
    clock = Clock()
    progress, _ = plain(clock, total=5)
    with progress:
        for _ in range(2):
            clock.now += 100
            progress.advance()
        with progress.phase("evaluation"):
            assert progress.eta is None, "nobody knows how long it takes"
            clock.now += 10
            progress.report("generation", 1, 4)
            assert progress.eta == 30 + 300
            clock.now += 30
            progress.report("generation", 4, 4)
            clock.now += 5
            progress.report("scoring", 1, 3)
            clock.now += 5
            progress.report("scoring", 2, 3)
            assert progress.eta == pytest.approx(2.5 + 300)
        assert progress.eta == 300, "the evaluation was no part of a step"


def test_an_evaluation_alone() -> None:
    clock = Clock()
    progress, out = plain(clock, total=0)
    with progress:
        progress.describe("starting workers")
        clock.now += 31
        progress.describe("starting workers")
        with progress.phase("evaluation"):
            clock.now += 60
            progress.report("evaluation chunk", 3, 6)
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting workers, elapsed 0:00:31, left -:--:--"
    assert "evaluation chunk 3/6, elapsed 0:01:31, left 0:01:00" in lines
    assert lines[-1] == "evaluation chunk 6/6, elapsed 0:01:31, left 0:00:00"


def test_the_bar_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, force_interactive=True)
    clock = Clock()
    with Progress(1, console=console, clock=clock) as progress:
        clock.now += 5
        progress.advance()
        with progress.phase("evaluation"):
            clock.now += 20
            progress.report("evaluation chunk", 2, 8)
            assert progress._bar is not None
            progress._bar.refresh()
            text = out.getvalue()
    assert "step 1/1, evaluation chunk" in text
    assert "2/8" in text
    assert "0:01:00 left" in text


def test_a_phase_is_described() -> None:
    clock = Clock()
    progress, out = plain(clock, total=1)
    with progress, progress.phase("demonstrations"):
        progress.report("demonstrations", 3, 8)
        clock.now += 31
        progress.describe("2 failed")
    assert out.getvalue().splitlines() == [
        "step 0/1 (0%), demonstrations 3/8, 2 failed, elapsed 0:00:31, left -:--:--",
        "step 0/1 (0%), demonstrations 8/8, 2 failed, elapsed 0:00:31, left -:--:--",
    ]


def test_the_start_of_workers_is_no_step() -> None:
    clock = Clock()
    progress, _ = plain(clock, total=5)
    with progress:
        clock.now += 60
        progress.begin_steps()
        clock.now += 10
        progress.advance()
        assert progress.eta == 40


def test_evaluations_to_come_count() -> None:
    clock = Clock()
    progress, _ = plain(clock, total=4)
    with progress:
        progress.begin_steps(evaluations_after=lambda step: {0: 2, 1: 2, 2: 1, 3: 1}.get(step, 0))
        clock.now += 10
        progress.expect_evaluation(25)
        progress.advance()
        assert progress.eta == 30 + 2 * 25, "by the estimate"
        clock.now += 10
        progress.advance()
        with progress.phase("evaluation"):
            clock.now += 20
            progress.report("evaluation chunk", 1, 2)
            assert progress.eta == 20 + 20 + 25
            clock.now += 20
        assert progress.eta == 20 + 40, "as long as the first one; and it is no part of a step's time"
        progress.expect_evaluation(1)
        clock.now += 10
        progress.advance()
        assert progress.eta == 10 + 40
        clock.now += 10
        progress.advance()
        assert progress.eta == 0
