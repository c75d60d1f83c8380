"""Are two sides' tensors the same, and if not, is it known why? Pure: no environment, no process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.peers.inputs import Outputs

TOLERANCE = 1e-5
"""Relative, plus absolute; the latter times a tensor's largest element where that is below 1, as in gradients."""

Verdict = Literal["equal", "explained", "peer raises", "DIFFERS", "STALE", "WRONG"]
"""``STALE``: an explained difference is gone. ``WRONG``: an explanation does not account for its difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A difference that is meant to be there."""

    why: str
    ours: str
    """With this computation in place of ours …"""
    theirs: str
    """… and this one in place of theirs the difference must vanish: that proves the explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison; ``ours`` and ``theirs`` name computations."""

    function: str
    peer: str
    ours: str
    theirs: str
    explained: Explanation | None = None
    raises: str | None = None
    """The peer's function fails as published, with a message that begins like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: Case
    difference: float | None
    """Largest absolute difference; infinite where one side is not finite; None where the peer raises."""
    unexplained: float | None
    """What is left of it with the explanation taken into account."""
    verdict: Verdict

    @property
    def fails(self) -> bool:
        return self.verdict not in ("equal", "explained", "peer raises")


def difference(ours: Outputs, theirs: Outputs) -> tuple[float, bool]:
    """Largest absolute difference over all parts, and whether all are equal within the tolerance.

    Raises:
        ValueError: the sides have other parts or shapes, so that nothing can be compared.
    """
    if set(ours) != set(theirs):
        raise ValueError(f"got parts {sorted(theirs)}, expected {sorted(ours)}")
    largest, equal = 0.0, True
    for name, own in ours.items():
        a, b = own.double(), theirs[name].double()
        if a.shape != b.shape:
            raise ValueError(f"{name}: got shape {list(b.shape)}, expected {list(a.shape)}")
        gap = (a - b).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        size = b.abs().nan_to_num(posinf=0.0)
        equal &= bool((gap <= TOLERANCE * (size.max().clamp(max=1.0) + size)).all())
        largest = max(largest, gap.max().item())
    return largest, equal


def compare(
    case: Case, ours: Mapping[str, Outputs], theirs: Mapping[str, Outputs], errors: Mapping[str, str]
) -> Result:
    """Compare one case.

    Args:
        errors: computation -> message of those of the peer that raised; they are not in ``theirs``.
    """
    if case.raises is not None:
        expected = errors.get(case.theirs, "").startswith(case.raises)
        return Result(case=case, difference=None, unexplained=None, verdict="peer raises" if expected else "STALE")
    gap, equal = difference(ours[case.ours], _found(case.theirs, theirs, errors))
    if case.explained is None:
        return Result(case=case, difference=gap, unexplained=None, verdict="equal" if equal else "DIFFERS")
    left, vanishes = difference(ours[case.explained.ours], _found(case.explained.theirs, theirs, errors))
    verdict = "STALE" if equal else "explained" if vanishes else "WRONG"
    return Result(case=case, difference=gap, unexplained=left, verdict=verdict)


def _found(name: str, theirs: Mapping[str, Outputs], errors: Mapping[str, str]) -> Outputs:
    if name in errors:
        raise ValueError(f"{name} raised {errors[name]}")
    return theirs[name]
