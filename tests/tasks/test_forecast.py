"""The forecast of a step against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embodied_rl.tasks.embodied.forecast import FREE, Cost, Layout, StepShape, UnitCosts, forecast

SHAPE = StepShape(
    envs=8,
    chunks=10,
    rollouts=1,
    samples=80,
    actor_ranks=1,
    rollout_workers=1,
    values=False,
    resets="first",
    resets_per_env=1.0,
    runs_ahead=0.0,
    sync_interval=1,
    cores=2.0,
)
COSTS = UnitCosts(
    chunk=FREE,
    chunk_env=Cost(1.0, 0.0),  # a simulator that sleeps
    crowd=1,
    alone=1.0,
    reset=Cost(0.5, 0.0),
    decisions=[(2, Cost(2.0, 0.0)), (4, Cost(3.0, 0.0)), (8, Cost(5.0, 0.0))],
    turn=FREE,
    turn_lane=FREE,
    latency=0.25,
    calls=0.0,
    updates={(1, 32): Cost(0.5, 0.5), (2, 32): Cost(0.25, 0.5)},
    sync=1.0,
)


def layout(workers: int = 1, stages: int = 1, threads: int = 1, *, serial: bool = False) -> Layout:
    return Layout(serial=serial, env_workers=workers, stages=stages, actor_threads=threads, micro_batch=32)


def test_envs_and_policy_take_turns() -> None:
    """10 x (8 + 5 + 0.25), 4 of resets, an update of 40."""
    found = forecast(SHAPE, COSTS, layout())
    assert (found.rollout, found.update, found.step, found.limit) == (136.5, 40.0, 177.5, "turns")


def test_more_workers_share_the_envs() -> None:
    """Two of 4 envs: 10 x (4 + 5 + 0.25), and resets of 2."""
    assert forecast(SHAPE, COSTS, layout(workers=2)).rollout == 94.5


def test_the_slower_of_two_stages_hides_the_other() -> None:
    """One worker: 10 x 2 x 4 of the envs while the policy takes 3, which only the first turn waits for; two workers,
    of 2 envs each: 10 x 2 x 3 of the policy, and the last 2 of the envs."""
    one, two = (forecast(SHAPE, COSTS, layout(workers=workers, stages=2)) for workers in (1, 2))
    assert (one.rollout, one.limit) == (83.0 + 4.0, "env workers")
    assert (two.rollout, two.limit) == (62.0 + 2.0, "the policy")


def test_cores_are_a_capacity() -> None:
    """Workers that calculate: 10 x (2 stages x 2 workers x 2 s + 2 x 3 s), on two cores, on one and on four."""
    costs = replace(COSTS, chunk_env=Cost(1.0, 1.0), reset=FREE, decisions=[(4, Cost(3.0, 3.0))])
    found = forecast(SHAPE, costs, layout(workers=2, stages=2))
    assert (found.rollout, found.limit, found.cpu) == (70.0, "cores", 140.0 + 40.0)
    assert forecast(replace(SHAPE, cores=1.0), costs, layout(workers=2, stages=2)).rollout == 140.0
    assert forecast(replace(SHAPE, cores=4.0), costs, layout(workers=2, stages=2)).limit == "the policy"


def test_workers_that_crowd_a_machine_are_slower() -> None:
    """Measured with three at once; one alone needs 0.6 of that, two 0.8."""
    costs = replace(COSTS, crowd=3, alone=0.6, reset=FREE, latency=0.0, decisions=[(1, FREE), (8, FREE)])
    shape = replace(SHAPE, envs=24, cores=8.0)
    for workers, expected in ((1, 24 * 0.6), (2, 12 * 0.8), (3, 8.0)):
        assert forecast(shape, costs, layout(workers=workers)).rollout == pytest.approx(10 * expected)


def test_one_process_does_it_all_in_turns() -> None:
    assert forecast(SHAPE, COSTS, layout(serial=True)).step == 10 * (8 + 5) + 4 + 40 + 1


def test_resets_go_beside_the_update_or_the_chunks() -> None:
    """Ahead: 4 s of resets within an update of 20, or 60 s that outlast it; with auto-reset 2 a chunk, 20 in all."""
    ahead = replace(SHAPE, resets="ahead")
    assert forecast(ahead, COSTS, layout(threads=2)).step == 132.5 + 20 + 1
    assert forecast(ahead, replace(COSTS, reset=Cost(7.5, 0.0)), layout(threads=2)).update == 60.0
    assert forecast(ahead, replace(COSTS, reset=Cost(7.5, 7.5)), layout(threads=2)).update == 60.0
    both_on_one = replace(ahead, cores=1.0)
    assert forecast(both_on_one, replace(COSTS, reset=Cost(7.5, 7.5)), layout(threads=2)).update == 100.0
    between = replace(SHAPE, resets="between", resets_per_env=5.0)
    assert forecast(between, COSTS, layout()).rollout == 132.5 + 20


def test_each_further_rollout_has_its_resets() -> None:
    assert forecast(replace(SHAPE, rollouts=2, resets="ahead"), COSTS, layout()).rollout == 2 * 132.5 + 4


def test_each_rollout_is_called() -> None:
    costs = replace(COSTS, calls=0.25)
    assert forecast(replace(SHAPE, rollouts=2), costs, layout()).rollout == 2 * (136.5 + 0.25)
    assert forecast(SHAPE, costs, layout(serial=True)).rollout == 134.25


def test_rollouts_that_run_ahead_hide_the_update() -> None:
    found = forecast(replace(SHAPE, runs_ahead=1.0, resets="first"), COSTS, layout())
    assert found.step == 136.5 + 1
    busy = replace(COSTS, chunk_env=Cost(1.0, 1.0), decisions=[(8, Cost(5.0, 5.0))], reset=FREE)
    assert forecast(replace(SHAPE, runs_ahead=1.0, cores=1.0), busy, layout()).step == 130 + 40 + 1


def test_a_part_of_the_rollouts_hides_a_part_of_the_update() -> None:
    """Half of a rollout of 136.5 hides an update of 40, a fifth 27.3 of it; of a fifth and the update on one core
    nothing is hidden."""
    assert forecast(replace(SHAPE, runs_ahead=0.5), COSTS, layout()).step == 136.5 + 1
    assert forecast(replace(SHAPE, runs_ahead=0.2), COSTS, layout()).step == pytest.approx(136.5 - 27.3 + 40 + 1)
    busy = replace(COSTS, chunk_env=Cost(1.0, 1.0), decisions=[(8, Cost(5.0, 5.0))], reset=FREE, latency=0.0)
    assert forecast(replace(SHAPE, runs_ahead=0.2, cores=1.0), busy, layout()).step == pytest.approx(130 + 40 + 1)


def test_values_cost_a_pass_more_and_weights_may_travel_less_often() -> None:
    found = forecast(replace(SHAPE, values=True, sync_interval=4), COSTS, layout())
    assert (found.rollout, found.sync) == (141.5, 0.25)


def test_decisions_between_measured_sizes_and_beyond() -> None:
    assert COSTS.decision(6).wall == 4.0
    assert COSTS.decision(16).wall == 10.0
    assert COSTS.decision(1).wall == 2.0
