"""The benchmarks of nodes, in small."""

from __future__ import annotations

import pytest

from benchmarks import network, scaling
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.serial import SerialBackend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_the_channel_between_nodes_is_measured_beside_plain_tcp() -> None:
    assert all(value > 0 for value in network.measure(count=3, trips=20))


@pytest.mark.xdist_group("ray")
def test_and_beside_rays_object_store() -> None:
    pytest.importorskip("ray")
    found = network.by_ray(count=3, trips=5)
    assert list(found) == ["within a raylet", "between two"]
    assert all(rate > 0 and trip > 0 for rate, trip in found.values())


def test_two_nodes_of_sleeping_simulators_make_more_env_steps_than_one_can() -> None:
    most = scaling.ENVS / 2 / scaling.ENV_STEP_S  # of a worker: a stage sleeps at a time
    assert most < scaling.env_steps_per_s(nodes=2, workers=1, steps=3) <= 2 * most


def test_a_driver_of_processes_and_of_workers_in_its_own_is_measured() -> None:
    share, call_ms = scaling.driver(ProcessBackend(60.0), 2, seconds=1.0)
    assert 0 < share < 1
    assert call_ms > 0
    assert scaling.driver(SerialBackend(), 4, seconds=1.0)[1] > 0
