"""The lane of trajectories as each task makes it, with every writer on another node than its actor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.channel.network import RemoteLane
from embodied_rl.schema import Config
from embodied_rl.tasks.planning import placement_of
from embodied_rl.tasks.table import TASKS
from tests.channel.test_network import There, soon
from tests.configs import embodied, embodied_sft, small_math

WORKERS = "cluster.component_placement={actor: 0, rollout: 0-3%s}"


def math(ahead: int) -> Config:
    return small_math("cluster=process", WORKERS % "", f"rollout.max_staleness={ahead}")


def acting(ahead: int) -> Config:
    options = "cluster=process", WORKERS % ", env: 0-3", "rollout.pipeline_stage_num=1"
    return embodied("env=dummy", *options, f"rollout.max_staleness={ahead}")


def imitation(ahead: int) -> Config:
    return embodied_sft(Path("unread"), "cluster=process", f"data.prefetch={ahead}")


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("task", [math, acting, imitation])
def test_all_that_is_ahead_has_room_and_so_has_the_mark(task: Callable[[int], Config], ahead: int) -> None:
    """Nobody reads while the actor updates, and gateways keep places for writers that have nothing to send."""
    config = task(ahead)
    arithmetic = TASKS[config.runner.task_type].arithmetic
    assert arithmetic is not None
    numbers = arithmetic(config, placement_of(config))
    there = There(numbers.capacity)
    writers = [there.lane() for _ in range(numbers.senders)]

    def put(writer: RemoteLane, item: object) -> None:
        depth = there.waiting()
        writer.put(item, 3.0)
        assert soon(lambda: there.waiting() == depth + 1)

    try:
        for writer in writers:
            put(writer, "the first step's, which the actor waits for")
            there.get()
        for update in range(5):
            for writer in writers:  # during the first all that may be ahead, then what each step makes room for
                for _ in range(numbers.rollout_epochs * (1 if update else ahead)):
                    put(writer, np.zeros(100_000, np.uint8))
            if update < 4:
                [there.get() for _ in range(numbers.messages)]
        put(there.lane(), "the mark")
    finally:
        there.close()
