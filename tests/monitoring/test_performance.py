"""A step's time against its ideal, by hand."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from embodied_rl.monitoring.performance import Part, StepWatch, performance, spread
from embodied_rl.runtime import load
from embodied_rl.runtime.load import Load
from embodied_rl.tasks.wiring import component_of

WAITS = {
    "requests": 5.0,
    "answers": 0.5,
    "weights": 0.0,
    "stragglers": 0.25,
    "resets": 2.0,
    "reset_spread": 0.125,
}


def parts(rollout: Mapping[str, float], update: Mapping[str, float], usable: float = 2.0) -> list[Part]:
    """6 seconds of rollout, 3 of update and 1 of the rest, on one node."""
    seconds = {"rollout": (6.0, rollout), "update": (3.0, update), "rest": (1.0, {})}
    return [
        Part(name=name, seconds=wall, cores=[sum(workers.values()) / usable], workers=workers)
        for name, (wall, workers) in seconds.items()
    ]


def found(
    measured: Sequence[Part],
    *,
    threads: Mapping[str, int] | None = None,
    devices: Sequence[Mapping[str, float]] = (),
    waits: Mapping[str, float] = WAITS,
) -> dict[str, float]:
    metrics = performance(measured, component=component_of, threads=threads or {}, devices=devices, waits=waits)
    gaps = sum(value for name, value in metrics.items() if name.startswith("gap/"))
    assert gaps == pytest.approx(10.0 - metrics["perf/ideal_s"]), "they sum up to what is not reached"
    assert metrics["perf/reached"] == metrics["perf/ideal_s"] / 10.0
    return metrics


def test_cores_are_the_busiest() -> None:
    metrics = found(
        parts(
            {"EnvGroup[0]": 5.0, "EnvGroup[1]": 4.0, "RolloutGroup[0]": 1.0, "driver": 0.0},
            {"ActorGroup[0]": 4.0, "driver": 0.5},
        ),
        threads={"actor": 2},
    )
    assert metrics["busy/cores"] == metrics["perf/ideal_s"] == (10.0 + 4.5) / 2
    assert metrics["busy/env"] == 5.0 and metrics["cpu/env"] == 9.0
    assert metrics["busy/actor"] == 2.0 and metrics["cpu/actor"] == 4.0, "two threads share its work"
    assert (metrics["busy/rollout"], metrics["busy/driver"]) == (1.0, 0.5)
    # One second of both cores in the rollout: unequal resets and ends first, then envs that wait for actions.
    assert metrics["gap/resets"] == 0.125 and metrics["gap/stragglers"] == 0.25 and metrics["gap/answers"] == 0.5
    assert metrics["gap/requests"] == 0.125, "cores that no env needs"
    assert metrics["gap/update"] == 0.75 and metrics["gap/rest"] == 1.0
    assert metrics["gap/rollout"] == metrics["gap/sync"] == 0.0


def test_one_env_worker_among_many_cores_is_the_busiest() -> None:
    metrics = found(parts({"EnvGroup[0]": 4.0, "EnvGroup[1]": 1.0, "RolloutGroup[0]": 1.0}, {}, usable=64.0))
    assert metrics["perf/ideal_s"] == metrics["busy/env"] == 4.0
    assert metrics["gap/requests"] == 0.0, "that others wait for it is no pause of its own"
    assert metrics["gap/rollout"] == 2.0 - 0.125 - 0.25 - 0.5
    assert metrics["gap/update"] == 3.0


def test_the_actor_is_the_busiest() -> None:
    metrics = found(parts({"EnvGroup[0]": 1.0}, {"ActorGroup[0]": 3.0}, usable=64.0))
    assert metrics["perf/ideal_s"] == 3.0
    assert (metrics["gap/rollout"], metrics["gap/update"], metrics["gap/rest"]) == (6.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("devices", "ideal", "pause"),
    [
        ([{"rollout": 3.5, "update": 2.0}], 5.5, 2.5),  # policy and actor share it
        ([{"rollout": 4.0}, {"update": 2.0}], 4.0, 2.0),
    ],
)
def test_an_accelerator_is_the_busiest(devices: list[dict[str, float]], ideal: float, pause: float) -> None:
    metrics = found(parts({"EnvGroup[0]": 1.0}, {"ActorGroup[0]": 1.0}, usable=64.0), devices=devices)
    assert metrics["perf/ideal_s"] == metrics["busy/device"] == ideal
    assert metrics["gap/resets"] == min(pause, 2.0), "nobody acts before the envs are reset"
    assert metrics["gap/stragglers"] + metrics["gap/requests"] == pause - min(pause, 2.0)
    assert metrics["gap/update"] == 3.0 - devices[0].get("update", 0.0)


def test_what_ran_ahead_fills_no_part_twice() -> None:
    """Envs worked in the update, too; coarse or late clocks may say more than there is."""
    metrics = found(parts({"EnvGroup[0]": 6.5}, {"EnvGroup[0]": 3.5, "ActorGroup[0]": 3.0}, usable=1.0))
    assert metrics["busy/env"] == 9.0 and metrics["perf/reached"] == 0.9


def test_the_fullest_node_decides() -> None:
    step = [Part(name="rollout", seconds=10.0, cores=[0.2, 0.7, 0.1], workers={})]
    assert found(step)["busy/cores"] == 0.7


def test_what_other_programs_take_is_no_fault_of_the_run() -> None:
    step = [
        Part(name="rollout", seconds=6.0, cores=[4.0], workers={"EnvGroup[0]": 4.0}, others=1.75),
        Part(name="update", seconds=4.0, cores=[3.0], workers={"ActorGroup[0]": 3.0}, others=2.0),
    ]
    metrics = found(step)
    assert metrics["gap/others"] == 1.75 + 1.0
    assert metrics["gap/resets"] + metrics["gap/stragglers"] == 0.25 and metrics["gap/update"] == 0.0


@pytest.mark.parametrize(("idle", "taken"), [(0.0, 3.0), (2.0, 1.0), (4.0, 0.0)])
def test_others_take_only_what_somebody_wanted(idle: float, taken: float) -> None:
    """Two seconds of four cores, of which the run may use two; it worked for two."""
    looks = iter(
        [
            [Load(10.0, 0.0, 4, 0, 100.0, 2.0, {"EnvGroup[0]": 1.0}, allowed=4)],
            [Load(12.0, 0.0, 4, 0, 100.0 + idle, 2.0, {"EnvGroup[0]": 3.0}, allowed=4)],
        ]
    )
    watch = StepWatch(lambda: next(looks), iter([0.0, 2.0]).__next__)
    watch.begin()
    watch.end("rollout")
    assert watch.parts[0].others == taken


def test_others_on_cores_that_the_run_may_not_use_take_nothing() -> None:
    """Of 64 cores 8 are the run's, half of them idle for ten seconds; neighbours have all others."""
    looks = iter(
        [
            [Load(0.0, 0.0, 64, 0, 0.0, 8.0, {"EnvGroup[0]": 0.0}, allowed=8)],
            [Load(10.0, 600.0, 64, 0, 40.0, 8.0, {"EnvGroup[0]": 40.0}, allowed=8)],
        ]
    )
    watch = StepWatch(lambda: next(looks), iter([0.0, 10.0]).__next__)
    watch.begin()
    watch.end("rollout")
    assert watch.parts[0].others == 0.0


@pytest.mark.parametrize(
    ("numbers", "allowed", "counted"),
    [
        ([0, 1, 2, 3], {1, 3}, [1, 3]),
        ([0, 2, 4, 6], {2, 6}, [1, 3]),  # the others are switched off
        ([0, 1, 2, 3], {8, 9, 10, 11}, [0, 1, 2, 3]),  # a container's own numbers
    ],
)
def test_idle_cores_are_those_that_the_run_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[int], allowed: set[int], counted: list[int]
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3\n" + "".join(f"cpu{number} 1 2 3\n" for number in numbers))
    each = [psutil.cpu_times()._replace(idle=float(10**row), iowait=0.5) for row in range(4)]
    monkeypatch.setattr(load, "core_numbers", partial(load.core_numbers.__wrapped__, stat))
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: each)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    found = Load.here()
    assert (found.idle, found.allowed) == (sum(10**row + 0.5 for row in counted), len(counted))


def test_a_task_without_simulators_names_its_own_pauses() -> None:
    metrics = found(parts({"RolloutGroup[0]": 9.0, "RolloutGroup[1]": 1.0}, {}), waits={"stragglers": 4.0})
    assert {name for name in metrics if name.startswith("gap/")} == {
        *("gap/stragglers", "gap/rollout", "gap/update", "gap/rest", "gap/others")
    }


def test_the_mean_wait_for_the_slowest() -> None:
    assert spread([3.0, 1.0, 2.0]) == 1.0
    assert spread([5.0]) == spread([]) == 0.0


def test_parts_from_one_look_to_the_next() -> None:
    """Two nodes; a worker is replaced by one with another clock, and one is new."""
    looks = [
        [({"EnvGroup[0]": 10.0, "driver": 1.0}, 2.0), ({"EnvGroup[1]": 20.0}, 4.0)],
        [({"EnvGroup[0]": 12.0, "driver": 1.5}, 2.0), ({"EnvGroup[1]": 24.0}, 4.0)],
        [({"EnvGroup[0]": 11.0, "driver": 1.5}, 2.0), ({"EnvGroup[1]": 24.0, "EnvGroup[2]": 2.0}, 4.0)],
    ]
    loads = iter(
        [[Load(0.0, 0.0, 8, 0, 0.0, usable, workers) for workers, usable in look] for look in looks],
    )
    times = iter([100.0, 103.0, 104.0])
    watch = StepWatch(lambda: next(loads), lambda: next(times))
    assert watch.begin() == 100.0
    watch.end("rollout")
    watch.end("update")
    first, second = watch.parts
    assert (first.name, first.seconds, first.cores) == ("rollout", 3.0, [2.5 / 2, 4.0 / 4])
    assert first.workers == {"EnvGroup[0]": 2.0, "driver": 0.5, "EnvGroup[1]": 4.0}
    assert (second.seconds, second.cores) == (1.0, [0.0, 2.0 / 4])
    assert second.workers["EnvGroup[2]"] == 2.0
