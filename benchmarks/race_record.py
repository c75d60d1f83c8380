"""Evaluations of a run against its wall and CPU seconds: what every side of :mod:`benchmarks.sb3_race` writes.

It imports none of the project, since other packages' processes use it, too.
"""

from __future__ import annotations

import importlib
import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray

if TYPE_CHECKING:
    from embodied_rl.monitoring.backend import RunInfo

RECORD_FILE: Final = "race.jsonl"


class Record:
    """A JSON line an evaluation: ``env_steps``, ``return``, and ``wall`` and ``cpu``, the seconds of this process and
    its children from its start until the evaluation began, without earlier evaluations. ``start_wall`` and
    ``start_cpu`` are those until the first env step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = self._since = spent()
        self._evaluating = (0.0, 0.0)
        self._line: dict[str, float] = {}

    def started(self, *, wall_ago: float = 0.0, cpu_ago: float = 0.0) -> None:
        """The first env step is now, or was that many seconds ago."""
        wall, cpu = spent()
        self._start = (wall - wall_ago, cpu - cpu_ago)

    def trained(self, env_steps: int) -> None:
        """An evaluation may begin."""
        self._since = spent()
        wall, cpu = (now - before for now, before in zip(self._since, self._evaluating, strict=True))
        self._line = {"env_steps": env_steps, "wall": wall, "cpu": cpu}

    def evaluated(self, mean_return: float | None) -> None:
        """An evaluation is over, or a part of it (None)."""
        if mean_return is not None:
            line = self._line | {"return": mean_return, "start_wall": self._start[0], "start_cpu": self._start[1]}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        now, before = spent(), self._since
        self._evaluating = (self._evaluating[0] + now[0] - before[0], self._evaluating[1] + now[1] - before[1])
        self._since = now


class RaceLogger:
    """The record of our side, as a backend of ``runner.logger.logger_backends``."""

    def __init__(self, run: RunInfo) -> None:
        self._record, self._first = Record(run.run_dir / RECORD_FILE), True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/step" not in metrics:  # of an evaluation
            self._record.evaluated(metrics.get("eval/return"))
            return
        if self._first:
            self._record.started(wall_ago=metrics["time/step"], cpu_ago=metrics["busy/cores"])
            self._first = False
        self._record.trained(int(metrics["env/steps_total"]))

    def close(self) -> None:
        pass


def spent() -> tuple[float, float]:
    """(wall, CPU) seconds since this process started, CPU seconds with those of its children."""
    me = psutil.Process()
    finished = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() + finished.ru_utime + finished.ru_stime
    for child in _children(me.pid):
        try:
            cpu += sum(psutil.Process(child).cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return time.time() - me.create_time(), cpu


def _children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):  # psutil would look at every process of the machine
        try:
            found = [int(child) for child in path.read_text().split()]
        except OSError:
            continue
        for child in found:
            yield child
            yield from _children(child)


def made(given: Mapping[str, Any], wrappers: Sequence[Any]) -> Any:
    """The env of ``sb3_race.sb3_input``, in these wrappers. Not by our adapter, whose imports would count as theirs."""
    import gymnasium

    env = gymnasium.make(given["id"], **given["kwargs"])
    for entry in wrappers:
        [(name, arguments)] = entry.items() if isinstance(entry, dict) else [(entry, {})]
        module, _, wrapper = name.partition(":")
        env = getattr(importlib.import_module(module), wrapper)(env, **arguments)
    return env


def play(envs: Sequence[Any], seeds: Sequence[int], act: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.float64]:
    """The returns of an episode from each seed.

    Args:
        envs: Gymnasium's, one a seed.
        act: the greedy actions [n,*A] for states [n,S].
    """
    seen = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    returns, running = np.zeros(len(seen)), list(range(len(seen)))
    while running:
        for i, action in zip(list(running), act(np.stack([seen[i] for i in running])), strict=True):
            seen[i], reward, terminated, truncated, _ = envs[i].step(action)
            returns[i] += float(reward)
            if terminated or truncated:
                running.remove(i)
    return returns
