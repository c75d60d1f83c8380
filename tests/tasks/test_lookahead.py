"""Which rollouts are under way, and how old what they give may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.tasks.loop import Lookahead


def lookahead(max_staleness: int, end: int, first: int = 0) -> tuple[Lookahead[int], list[int]]:
    started: list[int] = []

    def start(step: int) -> int:
        started.append(step)
        return step

    return Lookahead(max_staleness=max_staleness, first=first, end=end, start=start), started


def test_by_hand() -> None:
    ahead, started = lookahead(2, end=5)
    ahead.begin(0)
    assert started == [0, 1, 2]
    assert ahead.take() == 0
    ahead.begin(0)
    assert started == [0, 1, 2], "the fourth would be 3 updates behind"
    ahead.begin(1)
    assert started == [0, 1, 2, 3]
    assert [ahead.take(), ahead.take()] == [1, 2]
    ahead.begin(4)
    assert started == [0, 1, 2, 3, 4], "there is no sixth step"
    assert ahead.next == 5


def test_without_staleness_each_waits_for_its_weights() -> None:
    ahead, started = lookahead(0, end=3, first=1)
    ahead.begin(1)
    ahead.begin(1)
    assert started == [1]
    assert ahead.take() == 1
    ahead.begin(1)
    assert started == [1]
    assert ahead.take() == 2, "the step's own starts at the latest when it is wanted"


@given(st.integers(0, 4), st.integers(0, 3), st.integers(1, 12), st.data())
def test_the_bound_holds_whenever_weights_come(bound: int, first: int, steps: int, data: st.DataObject) -> None:
    """As in a training loop, where weights may come late, but no later than the bound needs them."""
    started: dict[int, int] = {}
    version = first
    ahead: Lookahead[int] = Lookahead(
        max_staleness=bound, first=first, end=first + steps, start=lambda step: started.setdefault(step, version)
    )
    for step in range(first, first + steps):
        late = data.draw(st.integers(0, min(bound, step - version)))
        version = step - late
        ahead.begin(version)
        # accepted + running < (staleness + version + 1) of whole batches, counted from the run's first
        assert ahead.next <= version + bound + 1
        ahead.take()
        assert 0 <= step - started[step] <= bound
    assert list(started) == list(range(first, first + steps))
