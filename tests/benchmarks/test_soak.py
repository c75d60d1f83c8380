from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.soak import Sample, changes, passed


def samples(
    gib: Callable[[float], float] = lambda _: 1.0,
    descriptors: Callable[[float], int] = lambda _: 20,
    threads: Callable[[float], int] = lambda _: 4,
) -> list[Sample]:
    """Two processes every ten seconds for 400; the functions say what the second has."""
    found = []
    for seconds in map(float, range(0, 401, 10)):
        found.append(Sample(seconds=seconds, name="driver", gib=1.0, descriptors=30, threads=3))
        found.append(
            Sample(
                seconds=seconds,
                name="EnvGroup[0]",
                gib=gib(seconds),
                descriptors=descriptors(seconds),
                threads=threads(seconds),
            )
        )
    return found


def test_quarters_by_hand() -> None:
    """From 1 GiB, one more over 400 s: medians at 150 s and 350 s."""
    together, driver, env = changes(samples(gib=lambda seconds: 1 + seconds / 400))
    assert env.gib == pytest.approx((1.375, 1.875))
    assert together.gib == pytest.approx((2.375, 2.875))
    assert together.growth == pytest.approx(0.5 / 2.375)
    assert (driver.growth, driver.gained) == (0.0, False)
    assert together.descriptors == (50, 50)


def test_what_leaks_fails() -> None:
    assert passed(changes(samples()))
    assert passed(changes(samples(gib=lambda seconds: 0.5 if seconds < 90 else 1.0))), "the first quarter is warm-up"
    assert passed(changes(samples(gib=lambda seconds: 1.2 - seconds / 4000))), "less is no leak"
    assert not passed(changes(samples(gib=lambda seconds: 1 + seconds / 2500)))
    assert not passed(changes(samples(descriptors=lambda seconds: 20 + (seconds > 390))))
    assert not passed(changes(samples(threads=lambda seconds: 4 + (seconds > 300))))


def test_too_short_a_soak_says_nothing() -> None:
    with pytest.raises(ValueError, match="fewer than three samples"):
        changes(samples()[:8])


@pytest.mark.slow
def test_a_short_soak_of_the_toy_env(tmp_path: Path) -> None:
    options = ["--minutes", "0.4", "--every", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.soak", *options, "env=dummy", "model=mlp", "cluster=process"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert "second quarter" in done.stdout, done.stderr
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    seen = [Sample(**json.loads(line)) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    names = {sample.name for sample in seen}
    assert {"driver", "EnvGroup[0]", "RolloutGroup[0]", "ActorGroup[0]"} <= names, names
    assert all(sample.gib > 0 and sample.descriptors > 0 and sample.threads > 0 for sample in seen)
    assert "interrupted" in (tmp_path / "run.txt").read_text()
