"""``arithmetic``: sums of two numbers, worked out digit by digit. Made on the fly."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import numpy as np
from pydantic import Field

from embodied_rl.errors import UserError
from embodied_rl.language.datasets.registry import Problem, PromptDataset
from embodied_rl.seeding import generator

_HELD_OUT_SHARE = 10
"""One pair of so many is held out."""
_ENUMERATED_DIGITS = 3
"""Up to here, held-out pairs are all there are in a fixed order; beyond, a fixed random sequence of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticParams:
    """``data.params`` of ``arithmetic``."""

    digits: Annotated[int, Field(ge=1, le=9)] = 2
    """Digits of each number, leading zeros included."""


class Arithmetic(PromptDataset):
    """``57+68=`` with the answer ``125`` and the demonstration ``7+8+0=15;5+6+1=12;125``: digits from the right, each
    with the carry, then the sum.

    Which pairs are held out is decided by a hash of the pair: a rule of arithmetic would hold out a kind of sums.
    """

    Params = ArithmeticParams

    def __init__(self, params: ArithmeticParams) -> None:
        self._digits = params.digits

    def draw(self, *, seed: int, step: int, count: int, number: int = 0) -> Sequence[Problem]:
        rng = generator(seed, step)
        drawn = self._pairs(rng, held_out=False)
        pairs = list(islice(drawn, count))
        if number:
            pairs = list(islice(self._others(pairs, drawn), (number - 1) * count, number * count))
        return [self._problem(x, y) for x, y in pairs]

    def _others(self, had: Sequence[tuple[int, int]], drawn: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The pairs drawn next that a step has not had; when it has had all, they count anew."""
        seen = set(had)
        for pair in drawn:
            if len(seen) == self._training_pairs():
                seen.clear()
            if pair not in seen:
                seen.add(pair)
                yield pair

    def _training_pairs(self) -> float:
        """Number of pairs; infinite where there are too many to count out, for they suffice for any step."""
        if self._digits > _ENUMERATED_DIGITS:
            return math.inf
        return 10 ** (2 * self._digits) - len(_all_held_out(self._digits))

    def held_out(self, count: int | None) -> Sequence[Problem]:
        if self._digits > _ENUMERATED_DIGITS:
            if count is None:
                raise UserError(
                    f"data.eval_size=null: too many sums of {self._digits} digits are held out; set a number"
                )
            found = list(islice(self._pairs(np.random.default_rng(0), held_out=True), count))
        else:
            found = list(_all_held_out(self._digits))
            np.random.default_rng(0).shuffle(found)
            if count is not None and count > len(found):
                raise UserError(
                    f"data.eval_size={count}: {len(found)} sums of {self._digits} digits are held out; use a smaller "
                    "number, null for all, or more data.params.digits"
                )
        return [self._problem(int(x), int(y)) for x, y in found[:count]]

    def _pairs(self, rng: np.random.Generator, *, held_out: bool) -> Iterator[tuple[int, int]]:
        while True:
            for x, y in rng.integers(10**self._digits, size=(64, 2)).tolist():
                if is_held_out(x, y) == held_out:
                    yield x, y

    def _problem(self, x: int, y: int) -> Problem:
        left, right = f"{x:0{self._digits}d}", f"{y:0{self._digits}d}"
        return Problem(
            prompt=f"{left}+{right}=", answer=str(x + y), demonstration=scratchpad(left, right), source="arithmetic"
        )


@functools.cache
def _all_held_out(digits: int) -> tuple[tuple[int, int], ...]:
    numbers = range(10**digits)
    return tuple((x, y) for x in numbers for y in numbers if is_held_out(x, y))


def is_held_out(x: int, y: int) -> bool:
    """True if the pair is for evaluation only."""
    return hashlib.md5(f"{x}+{y}".encode(), usedforsecurity=False).digest()[0] % _HELD_OUT_SHARE == 0


def scratchpad(left: str, right: str) -> str:
    """The sum of two numbers of equal length, worked out: ``scratchpad("57", "68")`` is ``7+8+0=15;5+6+1=12;125``."""
    carry, steps = 0, []
    for p, q in zip(reversed(left), reversed(right), strict=True):
        total = int(p) + int(q) + carry
        steps.append(f"{p}+{q}+{carry}={total:02d}")
        carry = total // 10
    return ";".join([*steps, str(int(left) + int(right))])
