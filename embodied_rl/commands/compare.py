"""``python train.py compare A B [C ...]``: evaluations on the same episodes, paired."""

from __future__ import annotations

import argparse
import re
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from rich.console import Console

from embodied_rl.commands.arguments import wants_help
from embodied_rl.errors import UserError
from embodied_rl.files import write_json

if TYPE_CHECKING:
    from embodied_rl.evaluation.comparison import Recipe

USAGE: Final = (
    "python train.py compare [NAME=]EVAL[,EVAL...] [NAME=]EVAL[,EVAL...] ... [--allow KEY] [--json FILE] [--plot FILE]"
)
HELP: Final = f"""{USAGE}

Holds every evaluation after the first against the first, episode by episode, and says by how much the success rate
differs, with a 95 % interval: bootstrap over each task's episodes. p is McNemar's exact test. Evaluations of language
models are compared prompt by prompt. Refused, with the reason, is what did not ask the same: other episodes, horizon,
temperature, cameras, simulator.

EVAL is an eval.json, a run directory (its newest evaluation), or RUN:STEP. Several, with commas between them, are runs
of one recipe with different seeds: means and interquartile means over runs and tasks.

  --allow KEY   compare although KEY differs, for example max_episode_steps or init_params; episodes: compare those
                that both have. May be repeated.
  --json FILE   all numbers
  --plot FILE   a picture of the tasks' differences (.png, .svg or .pdf); needs matplotlib

  python train.py compare results/libero_10_ppo/<run>:0 results/libero_10_ppo/<run>
  python train.py compare ppo=runs/a,runs/b,runs/c grpo=runs/d,runs/e,runs/f --json difference.json
"""
PIPED_WIDTH: Final = 80
"""Columns where there is no terminal to ask."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\nusage: {USAGE}")


def main(arguments: Sequence[str]) -> None:
    """Compare as the arguments say.

    Raises:
        UserError: there is no such evaluation, or they cannot be compared.
    """
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    if wants_help(arguments):
        return console.print(HELP, markup=False, soft_wrap=True)
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_intermixed_args(arguments)

    from embodied_rl.evaluation.comparability import check_comparable
    from embodied_rl.evaluation.comparison import compare, report
    from embodied_rl.evaluation.comparison_table import tables

    recipes = _recipes(options.recipes)
    notes = check_comparable([named for recipe in recipes for named in recipe.named], options.allow)
    comparisons = [compare(recipes[0], recipe) for recipe in recipes[1:]]
    for part in tables(recipes, comparisons, notes):
        console.print(part)
    if options.json is not None:
        write_json(options.json, report(recipes, comparisons, notes))
        console.print(f"numbers: {options.json}", soft_wrap=True, markup=False)
    if options.plot is not None:
        from embodied_rl.evaluation.forest_plot import draw

        draw(options.plot, comparisons)
        console.print(f"picture: {options.plot}", soft_wrap=True, markup=False)


def _recipes(arguments: Sequence[str]) -> list[Recipe]:
    """The recipes, with the names given or letters in their order.

    Raises:
        UserError: fewer than two, a name or an evaluation twice, or none where one should be.
    """
    from embodied_rl.evaluation.comparison import Recipe
    from embodied_rl.evaluation.eval_file import find_evaluation, read_evaluation

    if len(arguments) < 2:
        raise UserError(f"got {len(arguments)} evaluation, expected two or more to compare\nusage: {USAGE}")
    recipes: list[Recipe] = []
    seen: dict[Path, str] = {}
    for place, argument in enumerate(arguments):
        name, places = _split(argument)
        name = name or (string.ascii_uppercase[place] if place < len(string.ascii_uppercase) else f"R{place}")
        if name in {recipe.name for recipe in recipes}:
            raise UserError(f"{name}: two recipes have this name; give each its own")
        files = [find_evaluation(given) for given in places]
        for file in files:
            where = file.resolve()
            if where in seen:
                raise UserError(
                    f"{file}: is both in {seen[where]} and in {name}, and a file compared with itself says nothing; "
                    "choose another evaluation, for example RUN:STEP"
                )
            seen[where] = name
        recipes.append(Recipe(name=name, runs=tuple(read_evaluation(file) for file in files)))
    return recipes


def _split(argument: str) -> tuple[str, list[str]]:
    """Name, or nothing, and the places of the evaluations."""
    if Path(argument).exists():
        return "", [argument]
    match = re.fullmatch(r"(?:([A-Za-z][\w.+-]*)=)?(.*)", argument, re.DOTALL)
    assert match is not None
    places = match[2].split(",")
    if not all(places):
        raise UserError(f"{argument}: a place between commas, or after the name, is empty\nusage: {USAGE}")
    return match[1] or "", places
