from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.plan import Lanes


def test_order_and_env_ids() -> None:
    lanes = Lanes(env_workers=2, stages=3)
    assert lanes.all() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [lanes.index(lane) for lane in lanes.all()] == [0, 1, 2, 3, 4, 5]
    assert [list(lanes.env_ids(lane, 12)) for lane in lanes.all()] == [[2 * i, 2 * i + 1] for i in range(6)]


def test_who_serves_whom() -> None:
    lanes = Lanes(env_workers=3, stages=2)
    assert lanes.served_by(0, 1) == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]
    assert lanes.served_by(0, 2) == [[(0, 0), (2, 0)], [(0, 1), (2, 1)]]
    assert lanes.served_by(1, 2) == [[(1, 0)], [(1, 1)]]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8))
def test_every_lane_is_served_once_and_every_env_has_one_lane(env_workers: int, stages: int, rollouts: int) -> None:
    lanes = Lanes(env_workers=env_workers, stages=stages)
    served = [lane for rank in range(rollouts) for stage in lanes.served_by(rank, rollouts) for lane in stage]
    assert sorted(served) == lanes.all()
    total = 3 * env_workers * stages
    assert [i for lane in lanes.all() for i in lanes.env_ids(lane, total)] == list(range(total))
