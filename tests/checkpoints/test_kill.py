"""A run that is killed at any moment leaves checkpoints that load."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.checkpoints.shards import load_actor
from embodied_rl.checkpoints.store import complete_checkpoints, read_state, resolve
from tests.training.learner import Learner, same, training_config


def kill_while_saving(mesh: DeviceMesh, experiment: Path, rounds: int) -> list[int]:
    """Steps of the newest checkpoint after each kill."""
    run = experiment / "run"
    config = training_config("grpo")
    expected = Learner(mesh, config).weights()
    newest: list[int] = []
    before: list[Path] = []
    command = [sys.executable, "-m", "tests.checkpoints.saver", str(run)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process,
        ExitStack() as failed,
    ):
        # Else leaving this block would wait for ever for a process that saves for ever.
        failed.callback(os.killpg, process.pid, signal.SIGKILL)
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(rounds):
            print("go", file=process.stdin, flush=True)
            pid = int(process.stdout.readline())
            while complete_checkpoints(run / "checkpoints")[-1:] in ([], before):
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
            before = [found]
        failed.pop_all()
        process.stdin.close()
    return newest


def test_the_newest_checkpoint_loads_after_a_kill(mesh: DeviceMesh, tmp_path: Path) -> None:
    newest = kill_while_saving(mesh, tmp_path, 3)
    assert newest == sorted(newest)


@pytest.mark.slow
def test_many_kills(mesh: DeviceMesh, tmp_path: Path) -> None:
    kill_while_saving(mesh, tmp_path, 60)
