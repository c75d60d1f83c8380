"""``python train.py --help``: on one page what there is, and where the rest is. Neither torch nor a configuration."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from embodied_rl.composition import choices

WIDTH: Final = 96
"""Columns of the lists."""
_HEAD: Final = """\
Reinforcement learning for vision-language-action policies in real simulators, and for language
models.  python train.py [group=choice ...] [key=value ...]

  python train.py env=dummy model=mlp algorithm=ppo      no simulator needed
  python train.py task=collect env=libero_spatial        an expert plays: demonstrations
  python train.py task=sft env=libero_spatial model=tiny_vla data.path=<demonstrations>
  python train.py env=libero_spatial algorithm=grpo runner.init_from=results/sft_libero_spatial
  python train.py env=libero_10 runner.only_eval=true runner.resume_dir=auto
  python train.py task=math                              a language model answers problems

Groups and their choices:
"""
_GROUPS: Final[Mapping[str, str]] = {
    "task": "the training loop and the sizes of a run",
    "env": "the simulator and its tasks; eval_env=... for evaluations in another",
    "data": "prompts and the reward of their answers, or demonstrations (task=math, sft)",
    "model": "the policy",
    "algorithm": "advantage estimator and loss",
    "cluster": "where workers run: in this process, or in processes of their own",
    "logger": "where metrics go",
    "experiment": "a whole recipe: several groups and keys at once",
}
_TAIL: Final = """
Keys: --cfg job prints those of a command line with their values; `explain <key>` says what one is;
docs/configuration.md has them all. -m a=1,2 runs a sweep, --config-dir <folder> adds YAML of your
own, --hydra-help has Hydra's own options, --version the version.

Commands (python train.py <command> --help):
  plan ...                        the run of a command line on one page, without starting it
  probe ...                       what the run could learn from, before it starts
  check-env env=<name>            whether a simulator keeps what training takes for granted
  compare <A> <B> ...             how much evaluations on the same episodes differ, with intervals
  report <run> ...                the page of a run, or of several side by side, as one HTML file
  status <run> [--follow]         where a run stands: pace, time left, workers, last lines
  export <checkpoint> <folder>    a checkpoint's policy as a folder for model.path
  make-tiny model=<name> <folder> a small folder in a model's published layout
  doctor [<folder>]               what a folder, a checkpoint, a run or the installation lacks
  explain <key>                   a key of ours, or of verl, ROLL, AReaL, Cosmos-RL or RLinf
"""


def main(arguments: Sequence[str]) -> None:
    """Print the page; ``arguments`` may name folders of the user's own YAML.

    Raises:
        UserError: the folder of ``--config-dir`` does not exist.
    """
    print(_HEAD + "\n".join(_group_lines(choices(arguments))) + "\n" + _TAIL, end="")


def _group_lines(found: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for group, names in found.items():
        yield f"  {group:<11} {_GROUPS[group]}"
        yield from textwrap.wrap(", ".join(names), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
