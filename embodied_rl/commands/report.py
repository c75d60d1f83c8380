"""``python train.py report RUN [RUN ...]``: the page of a run, or of several side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from embodied_rl.commands.terminal import CommandParser, console
from embodied_rl.errors import UserError

USAGE: Final = "python train.py report RUN [RUN ...] [--output FILE] [--follow] [--every SECONDS]"
HELP: Final = """
Writes the page of a run: what it reached against where it started, curves, success by task, evaluations with paired
differences, videos, where the time went, settings that are not the defaults, and the machine. One HTML file that needs
no network, with curve.png beside it. Each run ends with one (runner.report=true).

RUN is a run directory, or an experiment's: its newest run. Several that differ in seeds alone are one curve, the mean
with its 95 % interval; others are curves of their own, and their last evaluations are compared with those of the first.

  --output FILE    default: RUN/report.html; of several runs ./report.html
  --follow         write it again as the runs go on, until they end or Ctrl-C; the open page loads itself again
  --every SECONDS  how often; default: 5

  python train.py report results/dummy_grpo/<run>
  python train.py report results/dummy_grpo/<run> results/dummy_grpo/<other seed> --output seeds.html
"""


def main(arguments: Sequence[str]) -> None:
    """Write the page as the arguments say.

    Raises:
        UserError: one of the folders is no run directory, or one is named twice.
    """
    parser = CommandParser(USAGE, HELP)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--every", type=float, default=5.0)
    options = parser.parse(arguments or ["--help"])
    if not options.every > 0:
        raise UserError(f"--every {options.every:g}: expected a positive number of seconds")

    from embodied_rl.report.data import find_run, read_run
    from embodied_rl.report.page import PAGE, write_page

    folders = list(map(find_run, options.runs))
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a run is named twice; name each once")
    output = options.output or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    out = console()
    runs = [read_run(folder) for folder in folders]
    write_page(runs, output, refresh=options.follow)
    out.print(f"report: {output}", soft_wrap=True, markup=False)
    try:
        while options.follow and any(run.under_way for run in runs):
            time.sleep(options.every)
            runs = [read_run(folder) for folder in folders]
            write_page(runs, output, refresh=True)
    except KeyboardInterrupt:
        write_page(runs, output)
