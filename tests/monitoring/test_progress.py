from __future__ import annotations

import io
from contextlib import suppress

import pytest
from rich.console import Console
from rich.live import Live

from embodied_rl.monitoring.live import format_duration
from embodied_rl.monitoring.progress import Progress
from embodied_rl.runtime.worker import WorkerProgress


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
        "finished: step 4/6, elapsed 0:02:00",
    ]
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_a_short_run_prints_its_end_once() -> None:
    clock = Clock()
    progress, out = plain(clock, total=1)
    with progress:
        clock.now += 5
        progress.advance()
    assert out.getvalue() == "finished: step 1/1, elapsed 0:00:05\n"


def test_a_run_that_fails_did_not_finish() -> None:
    clock = Clock()
    progress, out = plain(clock, total=3)
    with suppress(KeyboardInterrupt), progress:
        progress.advance()
        raise KeyboardInterrupt
    assert out.getvalue() == "stopped at step 1/3, elapsed 0:00:00\n"


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


def on_a_terminal(width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=True, force_interactive=True), out


def lines_of(progress: Progress, width: int = 100) -> list[str]:
    """The live lines as they stand."""
    out = io.StringIO()
    assert progress._live is not None
    Console(file=out, width=width, force_terminal=False).print(progress._live.lines())
    return out.getvalue().splitlines()


def test_live_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console, out = on_a_terminal()
    log = io.StringIO()
    clock = Clock()
    progress = Progress(4, 1, console=console, clock=clock, log=Console(file=log, width=100))
    with progress:
        clock.now += 65
        for worker, done in (("EnvGroup[0]", 2), ("EnvGroup[1]", 1)):
            progress.hear(WorkerProgress(worker=worker, what="rollout", done=done, total=3))
        progress.hear(WorkerProgress(worker="ActorGroup[0]", what="receive"))
        progress.show(
            {"env/episodes": 8.0, "env/success_once": 0.125, "env/return": 0.5, "time/step": 4.06, "time/update": 0.9}
        )
        bar, metrics, workers = lines_of(progress)
        assert "step 1/4, rollout 3/6" in bar and bar.endswith("0:01:05, -:--:-- left")
        assert metrics == "  success 12.5% █, 4.1 s a step (update 900 ms), return 0.5, steps -"
        assert workers == "  2 env: rollout 1/3 · actor: receive"
        progress.hear(WorkerProgress(worker="EnvGroup[1]", what=None))
        assert lines_of(progress)[-1] == "  2 env: rollout 2/3 (1 idle) · actor: receive"
        progress.advance()
        console.print("a table")
        progress.describe("[update]")
        assert "step 2/4, [update]" in lines_of(progress)[0], "text in brackets is no markup"
        assert lines_of(progress)[0].endswith("0:02:10 left")
        assert max(map(len, lines_of(progress, 40))) <= 40
    text = out.getvalue()
    assert "\x1b" in text
    assert "a table" in text
    assert text.rstrip().endswith("finished: step 2/4, elapsed 0:01:05"), "the live lines are gone"
    assert log.getvalue() == "step 1/4 (25%), rollout 2/3, elapsed 0:01:05, left -:--:--\n"


def test_an_interrupted_start_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    started = Live.start

    def interrupted(live: Live) -> None:
        started(live)
        raise KeyboardInterrupt

    monkeypatch.setattr(Live, "start", interrupted)
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
            progress.report("chunk", 1, 10)
            assert progress.eta == 360
            clock.now += 40
            progress.report("chunk", 2, 10)
            clock.now += 120
            progress.report("chunk", 5, 10)
        clock.now += 1
    assert out.getvalue().splitlines() == [
        "step 2/2 (100%), evaluation: chunk 1/10, elapsed 0:04:00, left 0:06:00",
        "step 2/2 (100%), evaluation: chunk 2/10, elapsed 0:04:40, left 0:05:20",
        "step 2/2 (100%), evaluation: chunk 5/10, elapsed 0:06:40, left 0:03:20",
        "finished: step 2/2, elapsed 0:06:41",
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
            progress.report("chunk", 3, 6)
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting workers, elapsed 0:00:31, left -:--:--"
    assert "evaluation: chunk 3/6, elapsed 0:01:31, left 0:01:00" in lines
    assert lines[-1] == "finished: chunk 6/6, elapsed 0:01:31"


def test_the_bar_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts the episodes of all workers; the time left is that of the one that is farthest behind."""
    monkeypatch.setenv("TERM", "xterm")
    console, _ = on_a_terminal()
    clock = Clock()
    with Progress(1, console=console, clock=clock) as progress:
        clock.now += 5
        progress.advance()
        with progress.phase("evaluation"):
            clock.now += 20
            progress.hear(WorkerProgress(worker="env[0]", what="episode", done=3, total=16, fraction=0.5))
            progress.hear(WorkerProgress(worker="env[1]", what="episode", done=1, total=16, fraction=0.25))
            assert "step 1/1, evaluation: episode 4/32" in lines_of(progress)[0]
            assert lines_of(progress)[0].endswith("0:01:00 left")
            assert progress.fraction == 0.25


def test_a_phase_is_described() -> None:
    clock = Clock()
    progress, out = plain(clock, total=1)
    with progress, progress.phase("demonstrations"):
        progress.report("demonstrations", 3, 8)
        clock.now += 31
        progress.describe("2 failed")
    assert out.getvalue().splitlines() == [
        "step 0/1 (0%), demonstrations 3/8, 2 failed, elapsed 0:00:31, left -:--:--",
        "finished: step 0/1, elapsed 0:00:31",
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
            progress.report("chunk", 1, 2)
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
