"""A run's ``run.json`` and its page: noted at the start, drawn at the end however that comes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from embodied_rl.report.facts import note_end, note_start
from embodied_rl.runtime.signals import Terminated
from embodied_rl.runtime.worker import StallError


@contextlib.contextmanager
def recorded(run_dir: Path, command: Sequence[str] | None, console: Console, *, page: bool) -> Iterator[None]:
    """Note start and end of a run, and with ``page`` draw its page at the end. A page that cannot be drawn fails no
    run.

    Args:
        command: the arguments of the command line; None: the run was not started by it.
    """
    note_start(run_dir, command)
    ending = "finished"
    try:
        yield
    except BaseException as error:
        ending = _in_words(error)
        raise
    finally:
        try:
            note_end(run_dir, ending)
            if page:
                _draw(run_dir, console)
        except Exception as error:
            text = f"no report: {str(error).strip() or type(error).__name__}; python train.py report {run_dir}"
            with contextlib.suppress(OSError):  # a full disk, which the run's own error speaks of
                console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _in_words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, StallError):
        return "stalled"
    if isinstance(error, Terminated):
        return error.word
    return "terminated" if isinstance(error, SystemExit) else "failed"


def _draw(run_dir: Path, console: Console) -> None:
    """Draw the page where there is anything to show."""
    from embodied_rl.report.data import read_run
    from embodied_rl.report.page import PAGE, PICTURE, write_page

    run = read_run(run_dir)
    if run.rows or run.evaluations:
        write_page([run], run_dir / PAGE)
        for label, file in (("report: ", PAGE), ("curve:  ", PICTURE)):
            if (run_dir / file).is_file():
                console.print(f"{label}    {run_dir / file}", markup=False, highlight=False, soft_wrap=True)
