"""Runs that lose env workers go on, and come to what they would have come to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.envs.base import SimStep
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.launch import run
from embodied_rl.runtime.worker import WorkerError
from tests.configs import tiny_run
from tests.test_end_to_end import metrics_of, only_run

pytestmark = pytest.mark.timeout(300)
TOGETHER = ("runner.max_steps=3", "runner.save_interval=-1", "runner.logger.logger_backends=[console,jsonl]")


class Accident(DummyEnv):
    """Has an accident in one step of the run: what, and at which step of a worker, says an environment variable."""

    _taken = 0

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        cls = type(self)
        cls._taken += 1
        kind, at, marker = os.environ["ACCIDENT"].split(",")
        if cls._taken == int(at):
            try:
                Path(marker).touch(exist_ok=kind == "again")
            except FileExistsError:  # the other worker had it, or the one before
                return super().step(slots, actions)
            accidents: dict[str, Callable[[], object]] = {
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "exit": lambda: os._exit(3),
                "hang": lambda: time.sleep(1000),
                "raise": lambda: 1 / 0,
                "again": lambda: 1 / 0,
            }
            accidents[kind]()
        return super().step(slots, actions)


def outcome(tmp_path: Path, name: str, *options: str) -> list[dict[str, float]]:
    config = tiny_run(
        tmp_path, f"env.env_type={__name__}:Accident", f"runner.experiment_name={name}", *TOGETHER, *options
    )
    run(config)
    metrics = metrics_of(only_run(config))
    restarts = [step.pop("env/restarts", 0.0) for step in metrics]
    assert max(restarts) <= (name == "disturbed")
    return metrics


@pytest.mark.parametrize(
    ("kind", "at", "options"),
    [
        ("kill", 50, ()),
        ("kill", 100, ()),
        ("raise", 10, ("rollout.pipeline_stage_num=1",)),
        ("hang", 40, ("env.worker_timeout=15",)),
        ("exit", 24, ("algorithm=ppo", "env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=8")),
        ("kill", 52, ("algorithm.rollout_epoch=2",)),
    ],
    ids=str,
)
def test_a_lost_worker_is_replaced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    at: int,
    options: tuple[str, ...],
) -> None:
    monkeypatch.setenv("ACCIDENT", f"{kind},{at},{tmp_path / 'happened'}")
    disturbed = outcome(tmp_path, "disturbed", *options)
    assert (tmp_path / "happened").exists()
    said = " ".join(capsys.readouterr().out.split())
    assert "replaced; its rollout is made again" in said
    words = {"kill": "SIGKILL", "exit": "exit status 3", "hang": "hung: no sign of life", "raise": "ZeroDivisionError"}
    assert words[kind] in said
    assert disturbed == outcome(tmp_path, "undisturbed", *options), "as if nothing had happened"


def test_the_same_failure_again_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCIDENT", f"again,20,{tmp_path / 'happened'}")
    with pytest.raises(WorkerError, match=r"ZeroDivisionError[\s\S]*\(again, in the same rollout\)"):
        outcome(tmp_path, "again")
