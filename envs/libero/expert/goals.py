"""From a task's goal predicates to the order in which to bring them about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embodied_rl.errors import UserError

_ORDER = {"turnon": 0, "turnoff": 0, "in": 1, "on": 1, "close": 2}
"""What is filled is closed afterwards."""
_PLACEMENTS = ("in", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One conjunct of a BDDL goal, such as ``(On akita_black_bowl_1 plate_1)``."""

    predicate: str
    """In lower case, as LIBERO's parser gives it."""
    subject: str
    """The object to move, or the thing to open, close or switch."""
    target: str | None = None
    """Where to; None for predicates of one argument."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return (self.subject,) if self.target is None else (self.subject, self.target)


def parse_goals(goal_state: Iterable[Sequence[str]]) -> tuple[Goal, ...]:
    """LIBERO's ``parsed_problem["goal_state"]``, in the order in which an expert does them.

    Raises:
        UserError: a predicate that experts do not know.
    """
    goals = []
    for predicate, *arguments in goal_state:
        name = predicate.lower()
        if name not in _ORDER or len(arguments) != (2 if name in _PLACEMENTS else 1):
            known = ", ".join(f"{p} ({2 if p in _PLACEMENTS else 1})" for p in _ORDER)
            raise UserError(
                f"the expert cannot play the goal ({' '.join([predicate, *arguments])}): it knows the predicates "
                f"{known}, with so many arguments."
            )
        goals.append(Goal(predicate=name, subject=arguments[0], target=arguments[1] if len(arguments) > 1 else None))
    return tuple(sorted(goals, key=lambda goal: _ORDER[goal.predicate]))


def share_of_target(goals: Sequence[Goal], goal: Goal) -> tuple[int, int]:
    """(which, of how many): the placements that share this one's target need places side by side."""
    rivals = [other for other in goals if other.target == goal.target and other.predicate in _PLACEMENTS]
    return rivals.index(goal), len(rivals)
