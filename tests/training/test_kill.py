"""A run that is killed at any moment leaves checkpoints that load."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.training.checkpoint import load_actor
from embodied_rl.training.checkpoint_store import complete_checkpoints, read_state, resolve
from tests.training.learner import Learner, same, training_config


def kill_while_saving(mesh: DeviceMesh, experiment: Path, rounds: int) -> list[int]:
    """Steps of the newest checkpoint after each kill."""
    run = experiment / "run"
    config = training_config("grpo")
    expected = Learner(mesh, config).weights()
    newest: list[int] = []
    command = [sys.executable, "-m", "tests.training.saver", str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(rounds):
            print("go", file=process.stdin, flush=True)
            pid = int(process.stdout.readline())
            before = newest[-1] if newest else 0
            while not any(read_state(p).step > before for p in complete_checkpoints(run / "checkpoints")):
                time.sleep(0.01)
            time.sleep(random.Random(number).uniform(0, 0.15))
            os.kill(pid, signal.SIGKILL)
            assert process.stdout.readline() == "killed\n"
            found = resolve("auto", experiment)
            assert found is not None
            for checkpoint in complete_checkpoints(run / "checkpoints"):
                learner = Learner(mesh, config)
                load_actor(learner.policy, learner.optimizer, checkpoint)
                assert same(learner.weights(), expected)
            newest.append(read_state(found).step)
        process.stdin.close()
    return newest


def test_the_newest_checkpoint_loads_after_a_kill(mesh: DeviceMesh, tmp_path: Path) -> None:
    newest = kill_while_saving(mesh, tmp_path, 3)
    assert newest == sorted(newest)


@pytest.mark.slow
def test_many_kills(mesh: DeviceMesh, tmp_path: Path) -> None:
    kill_while_saving(mesh, tmp_path, 60)
