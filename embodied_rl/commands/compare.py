"""``python train.py compare A B [C ...]``: evaluations on the same episodes, paired."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from embodied_rl.commands.terminal import CommandParser, console
from embodied_rl.errors import UserError
from embodied_rl.evaluation.comparison import Recipe, check_comparable, compare
from embodied_rl.evaluation.comparison_report import draw, report, tables
from embodied_rl.evaluation.eval_file import find_evaluation, read_evaluation
from embodied_rl.files import write_json

USAGE: Final = (
    "python train.py compare [NAME=]EVAL[,EVAL...] [NAME=]EVAL[,EVAL...] ... [--allow KEY] [--json FILE] [--plot FILE]"
)
HELP: Final = """
Holds every evaluation after the first against the first, episode by episode, and says by how much the success rate
differs, with a 95 % interval: bootstrap over each task's episodes. p is McNemar's exact test. Evaluations of language
models are compared prompt by prompt. Evaluations that did not ask the same (other episodes, horizon, temperature,
cameras, simulator) are refused with the reason.

EVAL is an eval.json, a run directory (its newest evaluation), or RUN:STEP. Several, with commas between them, are runs
of one recipe with different seeds: means and interquartile means over runs and tasks.

  --allow KEY   compare although KEY differs, for example max_episode_steps or init_params; episodes: compare those
                that both have. May be repeated.
  --json FILE   all numbers
  --plot FILE   a picture of the tasks' differences (.png, .svg or .pdf)

  python train.py compare results/libero_10_ppo/<run>:0 results/libero_10_ppo/<run>
  python train.py compare ppo=runs/a,runs/b,runs/c grpo=runs/d,runs/e,runs/f --json difference.json
"""
PIPED_WIDTH: Final = 80
"""Columns where there is no terminal to ask."""


def main(arguments: Sequence[str]) -> None:
    """Compare as the arguments say.

    Raises:
        UserError: there is no such evaluation, or they cannot be compared.
    """
    parser = CommandParser(USAGE, HELP)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse(arguments or ["--help"])

    recipes = _recipes(options.recipes)
    notes = check_comparable([run for recipe in recipes for run in recipe.runs], options.allow)
    comparisons = [compare(recipes[0], recipe) for recipe in recipes[1:]]
    output = console(PIPED_WIDTH)
    for part in tables(recipes, comparisons, notes):
        output.print(part)
    if options.json is not None:
        write_json(options.json, report(recipes, comparisons, notes))
        output.print(f"numbers: {options.json}", soft_wrap=True, markup=False)
    if options.plot is not None:
        draw(options.plot, comparisons)
        output.print(f"picture: {options.plot}", soft_wrap=True, markup=False)


def _recipes(arguments: Sequence[str]) -> list[Recipe]:
    """The recipes, with the names given or letters in their order.

    Raises:
        UserError: fewer than two, a name or an evaluation twice, or none where one should be.
    """

    if len(arguments) < 2:
        raise UserError(f"got {len(arguments)} evaluation, expected two or more to compare\nusage: {USAGE}")
    recipes: list[Recipe] = []
    seen: dict[Path, str] = {}
    for index, argument in enumerate(arguments):
        name, paths = _split(argument)
        name = name or (string.ascii_uppercase[index] if index < len(string.ascii_uppercase) else f"R{index}")
        if name in {recipe.name for recipe in recipes}:
            raise UserError(f"{name}: two recipes have this name; give each its own")
        files = [find_evaluation(given) for given in paths]
        for file in files:
            where = file.resolve()
            if where in seen:
                raise UserError(
                    f"{file}: is both in {seen[where]} and in {name}, and a file compared with itself says nothing; "
                    "choose another evaluation, for example RUN:STEP"
                )
            seen[where] = name
        names = [name] if len(files) == 1 else [f"{name}[{index}]" for index in range(len(files))]
        recipes.append(Recipe(name=name, runs=tuple(map(read_evaluation, files, names))))
    return recipes


def _split(argument: str) -> tuple[str, list[str]]:
    """The name, or nothing, and where the evaluations are."""
    if Path(argument).exists():
        return "", [argument]
    match = re.fullmatch(r"(?:([A-Za-z][\w.+-]*)=)?(.*)", argument, re.DOTALL)
    assert match is not None
    paths = match[2].split(",")
    if not all(paths):
        raise UserError(f"{argument}: an evaluation between commas, or after the name, is empty\nusage: {USAGE}")
    return match[1] or "", paths
