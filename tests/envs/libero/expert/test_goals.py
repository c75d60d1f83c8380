from __future__ import annotations

import pytest

from embodied_rl.envs.libero.expert.world import Goal, parse_goals, share_of_target
from embodied_rl.errors import UserError


def test_what_is_filled_is_closed_afterwards() -> None:
    goals = parse_goals([["Close", "drawer"], ["In", "bowl", "drawer"], ["Turnon", "stove"]])
    assert [goal.arguments for goal in goals] == [("stove",), ("bowl", "drawer"), ("drawer",)]
    assert goals[1] == Goal(predicate="in", subject="bowl", target="drawer")


def test_what_is_opened_is_filled_afterwards() -> None:
    goals = parse_goals([["In", "bowl", "drawer"], ["Open", "drawer"]])
    assert [goal.predicate for goal in goals] == ["open", "in"]


def test_equal_goals_keep_their_order() -> None:
    goals = parse_goals([["on", "b", "plate"], ["on", "a", "plate"]])
    assert [goal.subject for goal in goals] == ["b", "a"]


@pytest.mark.parametrize("goal", [["stack", "drawer"], ["on", "bowl"], ["close", "drawer", "bowl"]])
def test_unknown_goals_are_named(goal: list[str]) -> None:
    with pytest.raises(UserError, match=rf"cannot play the goal \({' '.join(goal)}\).*knows.*on \(2\)"):
        parse_goals([goal])


def test_placements_with_one_target_share_it() -> None:
    goals = parse_goals([["on", "a", "plate"], ["in", "b", "box"], ["on", "c", "plate"], ["close", "box"]])
    shares = {goal.arguments: share_of_target(goals, goal) for goal in goals if goal.target}
    assert shares == {("a", "plate"): (0, 2), ("c", "plate"): (1, 2), ("b", "box"): (0, 1)}
