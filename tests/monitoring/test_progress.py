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
        with progress.inner("rollout", total=4) as advance:
            for _ in range(4):
                clock.now += 10
                advance()
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
        with progress.inner("rollout", total=3) as advance:
            clock.now += 65
            advance(2)
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
