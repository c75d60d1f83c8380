from __future__ import annotations

import time

from benchmarks.eta import measure


def test_what_was_said_is_measured_against_the_clock() -> None:
    began = time.monotonic()
    said, true = measure(
        ["experiment=dummy_grpo", "cluster=serial", "runner.max_steps=6", "env.eval.episodes_per_task=8"]
    )
    assert 0 < true < time.monotonic() - began
    assert said > 0
