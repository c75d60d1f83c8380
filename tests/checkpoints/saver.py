"""``python -m tests.checkpoints.saver <run directory>``: saves checkpoints until it is killed.

Reads a line before each round and then forks: the child saves steps 1, 2, ... in a loop, for the parent test to kill
(its pid is printed). torch is imported once for all rounds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from embodied_rl.checkpoints.shards import save_actor
from embodied_rl.checkpoints.store import (
    RunState,
    begin,
    checkpoint_dir,
    complete_checkpoints,
    publish,
    read_state,
    seal,
)
from embodied_rl.training.sharding import init_process_group
from tests.training.learner import Learner, training_config


def main(run: Path) -> None:
    config = training_config("grpo")
    for _ in sys.stdin:
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            os.waitpid(pid, 0)
            print("killed", flush=True)
        else:
            save_for_ever(run, config)


def save_for_ever(run: Path, config: object) -> None:
    learner = Learner(init_process_group(device="cpu", rank=0, world_size=1, rendezvous=""), config)  # type: ignore[arg-type]
    done = complete_checkpoints(run / "checkpoints")
    step = read_state(done[-1]).step if done else 0
    while True:
        step += 1
        directory = checkpoint_dir(run, step)
        scratch = begin(directory)
        save_actor(learner.policy, learner.optimizer, scratch)
        seal(scratch, RunState(step=step, policy_version=step))
        publish(scratch, directory, max_keep=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
