from __future__ import annotations

import pytest

from embodied_rl.runners import math_reporting, reporting
from tests.configs import embodied, small_math

RECOMPUTED = "actor.recompute_logprobs=true"
METRICS = {
    "actor/samples": 8.0,
    "actor/groups": 2.0,
    "actor/groups_equal": 0.0,
    "actor/groups_unscored": 0.0,
    "actor/score": 0.5,
    "rollout/rounds": 1.0,
    "rollout/truncated": 0.0,
    "rollout/unverified": 0.0,
}


@pytest.mark.parametrize(
    ("gap", "overrides", "warned"),
    [
        (0.051, (RECOMPUTED,), True),
        (0.05, (RECOMPUTED,), False),
        (0.3, (RECOMPUTED, "actor.logprob_gap_warning=0.5"), False),
        (0.6, (RECOMPUTED, "actor.logprob_gap_warning=0.5"), True),
        (0.6, (RECOMPUTED, "actor.logprob_gap_warning=null"), False),
        # What another part of the algorithm computes may be off for a reason: stale rollouts.
        (0.6, (), False),
        (None, (RECOMPUTED,), False),
    ],
)
def test_a_rollout_that_computes_otherwise_is_pointed_out(
    gap: float | None, overrides: tuple[str, ...], warned: bool
) -> None:
    metrics = METRICS if gap is None else METRICS | {"actor/logprob_gap": gap}
    for text in (
        reporting.warning(metrics, embodied("env=dummy", *overrides)),
        math_reporting.warning(metrics, small_math(*overrides)),
    ):
        assert (text is not None) == warned
        if text is not None:
            assert text.startswith(
                "the rollout's log-probabilities differ from the trainer's by more than actor.logprob"
            )


def test_what_taught_nothing_comes_first() -> None:
    metrics = METRICS | {"actor/logprob_gap": 1.0, "actor/samples": 0.0}
    text = reporting.warning(metrics, embodied("env=dummy", RECOMPUTED))
    assert text is not None
    assert text.startswith("no update:")
