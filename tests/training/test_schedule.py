from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from embodied_rl.schema import LRScheduleConfig
from embodied_rl.training.optimizer import learning_rate_factor
from tests.workers.job import Job, easy, small

PLAIN = LRScheduleConfig(
    lr_decay_style="constant",
    lr_warmup_iters=0,
    lr_warmup_fraction=None,
    lr_decay_iters=None,
    min_lr_ratio=0.0,
    wsd_decay_fraction=0.1,
)


def factors(total: int = 10, **fields: Any) -> list[float]:
    return [learning_rate_factor(step, replace(PLAIN, **fields), total_steps=total) for step in range(total)]


def test_constant_is_the_default() -> None:
    assert factors() == [1.0] * 10


def test_warm_up_by_steps_or_by_fraction() -> None:
    assert factors(lr_warmup_iters=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(lr_warmup_fraction=0.4) == factors(lr_warmup_iters=4)


def test_linear_decay_to_the_lowest() -> None:
    assert factors(total=5, lr_decay_style="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert factors(total=5, lr_decay_style="linear", min_lr_ratio=0.5) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert factors(total=5, lr_decay_style="linear", lr_warmup_iters=1) == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25])
    assert factors(total=6, lr_decay_style="linear", lr_decay_iters=4)[3:] == pytest.approx([0.25, 0.0, 0.0])


def test_cosine_decay() -> None:
    got = factors(total=4, lr_decay_style="cosine")
    assert got == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_stable_then_decay() -> None:
    got = factors(lr_decay_style="wsd", wsd_decay_fraction=0.3)
    assert got == pytest.approx([1.0] * 8 + [2 / 3, 1 / 3])


def test_the_actor_follows_it_and_so_does_a_resumed_one() -> None:
    schedule = "actor.lr_sched.lr_warmup_iters=4", "actor.lr_sched.lr_decay_style=linear", "runner.max_steps=6"
    config = easy(small("algorithm=ppo", "actor.optim.lr=0.01", "actor.optim.value_lr=0.1", *schedule), 0.7)
    with Job(config) as job:
        rates = []
        for step in (0, 1, 4, 5):
            job.roll(step)
            rates.append(job.update(step)["learning_rate"])
        groups = {group["lr"] for group in job.actor._optimizer.param_groups}
    assert rates == pytest.approx([0.0025, 0.005, 0.01, 0.005])
    assert sorted(groups) == pytest.approx([0.005, 0.05])
