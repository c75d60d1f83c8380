"""Asks the workers of a run, whatever they are, about their processes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pytest
import torch

from embodied_rl.launch import make_backend, wiring_of
from embodied_rl.runtime.numerics import Numerics
from embodied_rl.runtime.worker import GroupSpec, Worker, WorkerContext
from embodied_rl.schema import Config
from embodied_rl.tasks.planning import plan_of
from embodied_rl.tasks.wiring import Wiring


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a worker finds in its process."""

    name: str
    """As the system shows it."""
    numerics: Numerics
    threads: int
    cores: frozenset[int]
    environment: dict[str, str]
    compiler: bool
    """torch's was imported."""


def look() -> Seen:
    return Seen(
        name=psutil.Process().name(),
        numerics=Numerics.current(),
        threads=torch.get_num_threads(),
        cores=frozenset(os.sched_getaffinity(0)),
        environment=dict(os.environ),
        compiler="torch._inductor.config" in sys.modules,
    )


@dataclass(frozen=True)
class Witnessed:
    """A worker's class, with the method :func:`look`."""

    worker: Any

    def __call__(self, context: WorkerContext, **arguments: Any) -> Worker:
        worker = self.worker(context, **arguments)
        worker.look = look
        return worker


def seen_by_workers(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[list[Seen]]:
    """What each worker of a run finds when it is set up, by group."""
    group = Wiring.group

    def witnessed(self: Wiring[Any], component: str, worker: type) -> GroupSpec:
        spec = group(self, component, worker)
        return replace(spec, worker=Witnessed(spec.worker))

    monkeypatch.setattr(Wiring, "group", witnessed)
    backend = make_backend(config)
    try:
        return [group.call(look).wait() for group in wiring_of(plan_of(config), backend).connect()]
    finally:
        backend.shutdown()
