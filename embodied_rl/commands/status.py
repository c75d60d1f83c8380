"""``python train.py status RUN``: where a run stands, from another shell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from embodied_rl.commands.terminal import CommandParser, console
from embodied_rl.errors import UserError
from embodied_rl.files import parse_json
from embodied_rl.monitoring.console import LOG_FILE
from embodied_rl.monitoring.live import format_duration
from embodied_rl.monitoring.status import STATUS_FILE
from embodied_rl.report.facts import is_alive, read_starts

USAGE: Final = "python train.py status RUN [--follow] [--lines N]"
HELP: Final = """
Says where a run stands: step, pace, time left with the evaluations to come, what each worker does and how much memory
it has, and the last lines of run.log. RUN is a run directory, or an experiment's: its newest run.

  --follow   show it again every two seconds until the run ends or Ctrl-C
  --lines N  of run.log; default: 5

The exit status is the run's: 0 it goes on or has finished, 1 it failed or was killed, 3 it stalled, 129, 130 and 143 a
signal ended it (its terminal was closed, Ctrl-C, SIGTERM).

  python train.py status results/dummy_grpo --follow
"""
EXIT_STATUS: Final = {"finished": 0, "stalled": 3, "terminal closed": 129, "interrupted": 130, "terminated": 143}
"""How a run ended -> its exit status; anything else is 1."""
_SILENT_S: Final = 10.0
_EVERY_S: Final = 2.0


def main(arguments: Sequence[str]) -> int:
    """Show the status; returns the exit status of the run.

    Raises:
        UserError: there is no such run.
    """
    parser = CommandParser(USAGE, HELP)
    parser.add_argument("run", type=Path)
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--lines", type=int, default=5)
    options = parser.parse(arguments or ["--help"])
    if options.lines < 0:
        raise UserError(f"--lines {options.lines}: expected 0 or more")
    from embodied_rl.report.data import find_run

    run, out = find_run(options.run), console()
    start = _last_start(run)
    if not options.follow:
        out.print(page(run, start, options.lines))
        return exit_status(start)
    with Live(page(run, start, options.lines), console=out, auto_refresh=False) as live:
        while is_alive(start):
            time.sleep(_EVERY_S)
            start = _last_start(run)
            live.update(page(run, start, options.lines), refresh=True)
    return exit_status(start)


def exit_status(start: dict[str, Any]) -> int:
    """Of the run with this last start, or 0 while it goes on."""
    return 0 if is_alive(start) else EXIT_STATUS.get(str(start.get("ending")), 1)


def page(run: Path, start: dict[str, Any], lines: int) -> Group:
    """The status as text."""
    status = _read(run / STATUS_FILE)
    parts: list[Any] = [Text(f"{run}: {_state(start, status)}")]
    if status is not None:
        parts += [Text(_pace(status)), _workers(status)]
    log = run / LOG_FILE
    if lines and log.is_file():
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        parts.append(Text("\n".join(line.rstrip() for line in last), style="dim"))
    return Group(*parts)


def _state(start: dict[str, Any], status: dict[str, Any] | None) -> str:
    if is_alive(start):
        silent = time.time() - status["time"] if status else 0.0
        word = f"; nothing heard of it for {format_duration(silent)}" if silent > _SILENT_S else ""
        return f"under way (process {start['pid']} on {start['host']}){word}"
    if ending := start.get("ending"):
        return f"{ending} (exit status {exit_status(start)})"
    return (
        f"not running on this machine, and it did not say how it ended (process {start.get('pid')} on {start['host']})"
    )


def _pace(status: dict[str, Any]) -> str:
    parts = [f"step {status['step']}/{status['total_steps']}"] if status["total_steps"] else []
    parts += [status["doing"]] if status["doing"] else []
    if status["step_seconds"]:
        parts.append(f"{status['step_seconds']:.1f} s a step")
    if status.get("restarts"):
        parts.append(f"env workers replaced: {status['restarts']}")
    if status.get("recoveries"):
        parts.append(f"recovered from a checkpoint: {status['recoveries']}")
    parts += [f"elapsed {format_duration(status['elapsed'])}", f"left {format_duration(status['left'])}"]
    return ", ".join(parts)


def _workers(status: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("worker", "process", "memory", "does"):
        table.add_column(name, justify="right" if name in ("process", "memory") else "left")
    table.add_row("driver", "", f"{status['driver_memory']:.2f} GiB", "")
    for name, worker in sorted(status["workers"].items()):
        doing = worker["doing"] or "waits for a call"
        of = f" {worker['done']}/{worker['total']}" if worker["doing"] and worker["total"] else ""
        memory = "" if worker["memory"] is None else f"{worker['memory']:.2f} GiB"
        table.add_row(name, str(worker["pid"] or ""), memory, doing + of)
    return table


def _last_start(run: Path) -> dict[str, Any]:
    starts = read_starts(run)
    if not starts:
        raise UserError(f"{run}: has no run.json, so nothing is known of how it goes; it is of an earlier version")
    return starts[-1]


def _read(path: Path) -> dict[str, Any] | None:
    """The file; None where there is none yet, or none that can be read."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "step" in content else None
