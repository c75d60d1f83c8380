"""``python train.py probe ...``: what reinforcement learning can do from here, before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from embodied_rl.algorithms.catalog import LEARNERS
from embodied_rl.command_line import checked
from embodied_rl.commands.terminal import console
from embodied_rl.composition import with_recipe
from embodied_rl.errors import UserError
from embodied_rl.evaluation.success import percentages
from embodied_rl.files import write_json
from embodied_rl.report.data import read_run
from embodied_rl.report.prospects import Prospects, prospects_of
from embodied_rl.schema import Config, EmbodiedConfig, EnvConfig
from embodied_rl.tasks.hooks import Hooks
from embodied_rl.tasks.planning import plan_of

USAGE: Final = "python train.py probe [group=choice] [key=value] ..."
FILE: Final = "probe.json"
STEPS: Final = 2
STILL: Final = 1e-30
"""A learning rate that moves no weight: far below the last digit of any that is not 0."""
TASKS: Final = ("embodied", "math")
_HELP: Final = f"""
The arguments are those of the run that you are about to start. It evaluates the policy once, then plays {STEPS}
training steps (runner.max_steps=N: N) whose updates move no weight, and says what there is to learn from: success of
drawn and of likeliest actions, groups with a signal, entropy, informative samples a step and an hour, and what to
change. Everything is in {FILE} in the run directory, too. A checkpoint to begin with is runner.init_from=<checkpoint>.
"""
_TITLES: Final = {
    "unlike": "it sees something else than it learned from",
    "never": "it cannot learn: it never succeeds, and nothing it does is better than the rest",
    "dense": "it may learn: it never succeeds, but what it does differs in return",
    "always": "there is little to learn: it nearly always succeeds",
    "alike": "it will hardly learn: the members of a group do the same",
    "rare": "it will learn slowly: few groups have a signal",
    "sometimes": "it can learn",
}


def main(arguments: Sequence[str]) -> None:
    """Play, and print the page.

    Raises:
        UserError: the configuration is wrong, of another kind of task, or resumes a run.
    """
    if set(arguments) & {"-h", "--help"}:
        print(f"usage: {USAGE}\n{_HELP}")
        return
    if any(word.startswith("runner.resume_dir=") for word in arguments):
        raise UserError("probe: got runner.resume_dir, expected runner.init_from=<checkpoint>: no run goes on here")
    asked = checked([f"runner.max_steps={STEPS}", *with_recipe(arguments)])
    if (task := asked.runner.task_type) not in TASKS:
        raise UserError(f"probe: got task={task}, expected one that learns by trying: {', '.join(TASKS)}")
    if LEARNERS[asked.algorithm.learner].replays:
        raise UserError(
            f"probe: got algorithm.learner={asked.algorithm.learner}, which learns from a buffer of all that was "
            "played; expected one that learns from each step's episodes (algorithm=ppo, grpo, ...)"
        )
    plan = plan_of(_still(asked))
    out = console()
    from embodied_rl.launch import carry_out  # imports torch, so only once the configuration is known to be right

    with _watched(out, plan.config.runner.max_steps) as hooks:
        run_dir = carry_out(plan, None, hooks, quiet=True)
    found = prospects_of(read_run(run_dir))
    write_json(run_dir / FILE, found.as_json())
    show(found, out)
    out.print(f"\nall of it: {run_dir / FILE}", markup=False, soft_wrap=True)


def _still(asked: Config) -> Config:
    """The run as a probe: an evaluation, then its steps with weights that stand still. Nothing is saved or filmed."""
    logger = replace(asked.runner.logger, logger_backends=["jsonl"])
    runner = replace(
        asked.runner,
        experiment_name=f"probe_{asked.runner.experiment_name}",
        val_before_train=True,
        val_check_interval=-1,
        eval_at_end=False,
        stop_at=None,
        save_interval=-1,
        save_interval_seconds=None,
        recover="never",
        report=False,
        logger=logger,
    )
    actor = replace(
        asked.actor,
        optim=replace(asked.actor.optim, lr=STILL, value_lr=None),
        skip_zero_advantages=False,  # what it would leave out counts for the entropy
    )
    probed = replace(asked, runner=runner, actor=actor)
    if not isinstance(probed, EmbodiedConfig):
        return probed
    return replace(
        probed, env=_unfilmed(probed.env), eval_env=None if probed.eval_env is None else _unfilmed(probed.eval_env)
    )


def _unfilmed(env: EnvConfig) -> EnvConfig:
    train, evaluated = (
        replace(part, video_cfg=replace(part.video_cfg, save_video=False)) for part in (env.train, env.eval)
    )
    return replace(env, train=train, eval=evaluated)


class _Watch(Hooks):
    """Says on a spinner how far the probe is."""

    def __init__(self, status: Status, steps: int) -> None:
        self._status, self._steps = status, steps

    def started(self, run_dir: Path) -> None:
        self._status.update(f"{run_dir}: starting workers, then an evaluation")

    def evaluated(self, step: int) -> None:
        self._status.update(f"rollout 1 of {self._steps}")

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._status.update(f"rollout {min(step + 1, self._steps)} of {self._steps}")


@contextmanager
def _watched(out: Console, steps: int) -> Iterator[Hooks]:
    with out.status("") as status:
        yield _Watch(status, steps)


def show(found: Prospects, out: Console) -> None:
    """Print a table of success by task, the numbers, and what to change."""
    out.print(_TITLES[found.case], style="bold green" if found.case == "sometimes" else "bold yellow")
    out.print(_success(found))
    for name, text in _facts(found):
        out.print(f"{name:<22} {text}", soft_wrap=True)
    for text in found.advice:
        out.print(f"\n- {text}", soft_wrap=True)


def _success(found: Prospects) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in ("", "drawn", "likeliest"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in sorted({**found.sampled_tasks, **found.greedy_tasks}) if found.sampled_tasks else ():
        rates = (found.sampled_tasks.get(name), found.greedy_tasks.get(name))
        table.add_row(name, *("–" if rate is None else f"{rate:.1%}" for rate in rates))
    all_rates = (found.sampled, found.greedy)
    cells = (f"{one.rate:.1%} ({percentages(one.interval)}) of {one.count}" for one in all_rates)
    table.add_row("all, 95 % interval", *cells, style="bold")
    return table


def _facts(found: Prospects) -> Iterator[tuple[str, str]]:
    if found.informative is not None:
        yield "groups with a signal", f"{found.informative:.0%} of {found.groups:g} groups of {found.group_size}"
        if found.case not in ("never", "dense"):
            sizes = ", ".join(f"{share:.0%} of {size}" for size, share in found.by_group_size().items())
            yield "by success alone", f"up to {found.expected:.0%}; in groups of other sizes {sizes}"
    yield "spread of returns", f"{found.spread:.3g}"
    yield (
        "entropy",
        "–: nothing to learn, so no update" if found.entropy is None else f"{found.entropy:.3g} nats a unit",
    )
    yield "length", f"{found.length:.0f}"
    yield (
        "informative samples",
        f"{found.informative_samples:.0f} of {found.samples:.0f} a step of {found.step_s:.3g} s: "
        f"{found.informative_samples * 3600 / found.step_s:,.0f} an hour",
    )
