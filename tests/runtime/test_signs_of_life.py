from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from embodied_rl.runtime.process_worker import DataWatch, bytes_moved, rarely


def test_many_reports_are_few_messages_and_long_silence_is_none() -> None:
    now = 0.0
    sent: list[tuple[float, int]] = []
    report = rarely(lambda what, done, total, fraction=None: sent.append((now, done)), clock=lambda: now)
    for done in range(1, 4097):
        now = done / 1000
        report("micro-batch", done, 4096)
    times = [time for time, _ in sent]
    assert 35 <= len(sent) <= 42
    assert max(later - earlier for earlier, later in pairwise(times)) < 0.102
    assert sent[0][1] == 1
    assert sent[-1] == (4.096, 4096)
    report("next", 1, 9)
    report("next", 2, 9)
    assert sent[-1] == (4.096, 1)
    now = 100.0
    report("next", 3, 9)
    assert sent[-1] == (100.0, 3)


def test_a_call_that_moves_data_gives_signs_and_one_that_waits_does_not() -> None:
    moved, signs = 0, 0

    def sign() -> None:
        nonlocal signs
        signs += 1

    watch = DataWatch(sign, lambda: moved)
    watch.look()
    assert signs == 0
    for expected, step in ((1, 2**20), (1, 2**19), (1, 2**19), (2, 2**30), (2, 0)):
        moved += step
        watch.look()
        assert signs == expected


@pytest.mark.parametrize("what", ["write", "read", "nothing"])
def test_bytes_that_this_process_moves_are_counted(tmp_path: Path, what: str) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(2**20))
    before = bytes_moved()
    if what == "write":
        path.write_bytes(bytes(2**20))
    elif what == "read":
        path.read_bytes()
    assert (bytes_moved() - before >= 2**20) == (what != "nothing")
