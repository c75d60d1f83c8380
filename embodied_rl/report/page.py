"""The page: what is on it, in which order, and writing it."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jinja2
import yaml

from embodied_rl import __version__
from embodied_rl.errors import UserError
from embodied_rl.evaluation.comparison import ASKED, Comparison, Recipe, check_comparable, compare
from embodied_rl.files import atomic, write_text
from embodied_rl.params import at
from embodied_rl.report.before_after import gain
from embodied_rl.report.charts import line_chart, stack_chart, write_picture
from embodied_rl.report.curves import Axis, Group, HeatMap, curve, groups, heat_map, thinned
from embodied_rl.report.data import Run, started
from embodied_rl.report.films import film_rows, relative
from embodied_rl.report.settings import settings
from embodied_rl.report.spent import spent

PAGE: Final = "report.html"
PICTURE: Final = "curve.png"
REFRESH_S: Final = 5
"""Seconds after which a page of a run that goes on loads itself again."""
_AXES: Final[tuple[Axis, ...]] = ("steps", "env steps", "seconds")
_FEW: Final = {1: ", of one run", 2: "; of so few runs the interval is too narrow"}
"""Words on the interval of a change, by the number of runs."""
_SIGNALS: Final[Mapping[str, str]] = {
    "env/return": "return of an episode",
    "env/episode_len": "length of an episode, env steps",
    "rollout/score": "mean score",
    "rollout/length": "length of an answer, tokens",
    "rollout/truncated": "answers cut off, share",
    "actor/policy_loss": "policy loss",
    "actor/value_loss": "value loss",
    "actor/explained_variance": "variance that values explain",
    "actor/entropy": "entropy",
    "actor/approx_kl": "KL from the policy that acted",
    "actor/reference_kl": "KL from the reference",
    "actor/clip_fraction_high": "ratios clipped above, share",
    "actor/clip_fraction_low": "ratios clipped below, share",
    "actor/grad_norm": "gradient norm",
    "actor/groups_equal": "groups that teach nothing, share",
    "actor/logprob_gap": "gap of log-probabilities",
    "actor/learning_rate": "learning rate",
    "rollout/env_steps_per_s": "env steps a second",
    "rollout/tokens_per_s": "tokens a second",
    "perf/rollout_tflops": "TFLOP/s of the rollout",
    "perf/update_tflops": "TFLOP/s of the update",
    "perf/update_mfu": "model FLOP utilisation of the update, share",
}
"""Metric -> its chart's title; the order is that of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """A comparison, and who is held against whom."""

    before: str
    after: str
    asked: str
    """Episodes, or prompts."""
    comparison: Comparison

    @property
    def in_words(self) -> str:
        """The overall change in percentage points with its interval."""
        row = self.comparison.overall
        text = f"{points(row.change.value)} points"
        if row.change.interval is not None:
            low, high = row.change.interval
            text += f" (95 % interval {points(low)} to {points(high)})"
        return text


def write_page(runs: Sequence[Run], path: Path, *, refresh: bool = False) -> None:
    """Write the page of one run, or of several side by side, with ``curve.png`` beside it.

    Args:
        refresh: let the page load itself again now and then, as its run goes on.
    """
    alike = groups(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "points": points, "number": number, "duration": duration}
    text = environment.get_template("template.html.j2").render(
        _context(runs, alike, path), refresh=REFRESH_S if refresh and any(run.under_way for run in runs) else None
    )
    write_text(path, text)
    _write_picture(runs[0], alike, path.with_name(PICTURE))


def _context(runs: Sequence[Run], alike: Sequence[Group], page: Path) -> dict[str, Any]:
    first = runs[0]
    films, films_left_out = film_rows(first, page) if len(runs) == 1 else ([], 0)
    paired = [found for group in alike if (found := _gained(group)) is not None]
    context: dict[str, Any] = {
        "version": __version__,
        "made": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "runs": runs,
        "run": first,
        "groups": alike,
        "title": " and ".join(dict.fromkeys(run.experiment for run in runs)),
        "links": {run.path: relative(run.path / PAGE, page) for run in runs if (run.path / PAGE).is_file()},
        "facts": _facts(first),
        "about": at(first.config, "runner.about"),
        "headline": _headline(alike[0], paired[0] if paired else None) if len(alike) == 1 else None,
        "word": _word(first),
        "goal_charts": _goal_charts(alike),
        "heat_maps": _heat_maps(alike),
        "paired": paired,
        "across": _across(alike),
        "charts": _signal_charts(alike),
        "films": films,
        "films_left_out": films_left_out,
        "spent": spent(first) if len(runs) == 1 else None,
        "spent_chart": _spent_chart(first) if len(runs) == 1 else None,
        "settings": settings(first),
        "command": _command(first),
        "config": yaml.safe_dump(dict(first.config), sort_keys=False, allow_unicode=True),
        "start": first.starts[-1] if first.starts else None,
        "started": started(first),
        "notes": [note for run in runs for note in run.notes],
        "gaps": {name: count for run in runs for name in run.metrics() if (count := run.gaps(name))},
        "several": len(runs) > 1,
    }
    return context


def _word(run: Run) -> str:
    return "accuracy" if run.task in ("math", "sft") else "success"


def _facts(run: Run) -> list[str]:
    """Task, env or data, model and algorithm."""
    found = [run.task]
    env = at(run.config, "eval_env.name") if run.only_eval else None
    found += [str(env or at(run.config, "env.name") or at(run.config, "data.name") or "")]
    found += [str(at(run.config, "model.model_type") or "")]
    if not run.only_eval and run.task in ("math", "embodied"):
        on_policy = f"{at(run.config, 'algorithm.adv_type')} / {at(run.config, 'algorithm.loss_type')}"
        learner = at(run.config, "algorithm.learner") or "on_policy"
        found += [on_policy if learner == "on_policy" else str(learner)]
    return [text for text in found if text]


def _gained(group: Group) -> Paired | None:
    """The last evaluations of a group's runs against their first; None where they cannot be compared."""
    found = gain(group.runs)
    if found is None:
        return None
    pairs = [(run.first, run.last) for run in group.runs]
    steps = [sorted({evaluation.step for pair in pairs if (evaluation := pair[side])}) for side in (0, 1)]
    names = [f"step {', '.join(map(str, of_side))}" for of_side in steps]
    return Paired(before=names[0], after=names[1], asked=ASKED[found.first.runs[0].kind], comparison=found)


def _across(alike: Sequence[Group]) -> list[Paired]:
    """The last evaluations of each group against those of the first group."""
    last = [[run.last.saved for run in group.runs if run.last] for group in alike]
    found = []
    for group, saved in list(zip(alike, last, strict=True))[1:]:
        try:
            check_comparable([*last[0], *saved])
            pair = compare(Recipe(name="first", runs=tuple(last[0])), Recipe(name="second", runs=tuple(saved)))
        except (UserError, IndexError):
            continue
        asked = ASKED[saved[0].kind]
        found.append(Paired(before=alike[0].name, after=group.name, asked=asked, comparison=pair))
    return found


def _headline(group: Group, paired: Paired | None) -> dict[str, str] | None:
    """The one number, where it began, and how sure it is."""
    run, word = group.runs[0], _word(group.runs[0])
    of_runs = f", mean of {len(group.runs)} runs" if len(group.runs) > 1 else ""
    if paired is not None:
        row = paired.comparison.overall
        return {
            "now": percent(row.second),
            "from": percent(row.first),
            "text": f"{word} after {paired.after.removeprefix('step ')} training steps{of_runs}",
            "change": paired.in_words,
            "note": f"on the same {row.pairs} {paired.asked}{_FEW.get(len(group.runs), '')}",
        }
    rates = [(r.last.rate, r.last) for r in group.runs if r.last is not None and r.last.rate is not None]
    if rates:
        mean = sum(rate for rate, _ in rates) / len(rates)
        last = rates[0][1]
        note = f"{last.count} {ASKED[last.saved.kind]}" if len(rates) == 1 else f"mean of {len(rates)} runs"
        if len(rates) == 1 and last.interval is not None:
            note = f"95 % interval {percent(last.interval[0])} to {percent(last.interval[1])}, {note}"
        when = f"after {last.step} training steps" if last.step else "before any training here"
        return {"now": percent(mean), "from": "", "text": f"{word} in evaluation {when}", "change": "", "note": note}
    trained = run.series(run.goal[1])
    if not trained:
        return None
    recent, whose = trained.values[-10:], " of the first run" if of_runs else ""
    return {
        "now": percent(sum(recent) / len(recent)),
        "from": percent(trained.values[0]),
        "text": f"{word} of training rollouts, mean of the last {len(recent)} steps{whose}",
        "change": "",
        "note": "no evaluation so far",
    }


def _goal_charts(alike: Sequence[Group]) -> list[list[Chart]]:
    """Success over each axis, a row of evaluations and one of training."""
    rows = []
    for metric, what in zip(alike[0].runs[0].goal, ("evaluation", "training rollouts"), strict=True):
        found = []
        for axis in _AXES:
            curves = [c for group in alike if (c := curve(group, metric, axis)) is not None]
            if not curves or max(len(c.mean.x) for c in curves) < 2:
                continue
            name, unit = _axis(axis, max(c.mean.x[-1] for c in curves))
            title = f"{_word(alike[0].runs[0])}, {what}"
            label = f"{title}, over {name}; the last value is {percent(curves[0].mean.y[-1])}"
            found.append(Chart(title=title, svg=line_chart(curves, x=name, percent=True, unit=unit, label=label)))
        rows.append(found)
    return [row for row in rows if row]


def _axis(axis: Axis, end: float) -> tuple[str, float]:
    """The name of an axis that ends there, and its unit."""
    if axis != "seconds":
        return {"steps": "training step", "env steps": "env steps of training"}[axis], 1.0
    unit, size = ("s", 1.0) if end < 180 else ("min", 60.0) if end < 3 * 3600 else ("h", 3600.0)
    return f"time in training and evaluation, {unit}", size


def _signal_charts(alike: Sequence[Group]) -> list[Chart]:
    found = []
    for metric, title in _SIGNALS.items():
        curves = [c for group in alike if (c := curve(group, metric, "steps")) is not None]
        if curves and any(len(c.mean.x) > 1 and len(set(c.mean.y)) > 1 for c in curves):
            label = f"{title} over training steps, from {curves[0].mean.y[0]:.3g} to {curves[0].mean.y[-1]:.3g}"
            found.append(Chart(title=title, svg=line_chart(curves, x="training step", label=label)))
    return found


def _heat_maps(alike: Sequence[Group]) -> list[tuple[str, HeatMap]]:
    """Of each group the tasks' success, in evaluations and in training."""
    found = []
    for group in alike:
        of = f" · {group.name}" if len(alike) > 1 else ""
        for prefix, title in (("eval_task/", "evaluation"), ("env_task/", "training rollouts")):
            if (tasks := heat_map(group, prefix)) is not None:
                found.append((f"{title}{of}", tasks))
    return found


def _spent_chart(run: Run) -> Chart | None:
    found = spent(run)
    if found is None or not found.by_step:
        return None
    lines = {part: thinned(found.steps, values) for part, values in found.by_step.items()}
    x = next(iter(lines.values())).x
    parts = {part: line.y for part, line in lines.items()}
    return Chart(title="seconds of a training step", svg=stack_chart(x, parts, label="seconds of each part of a step"))


def _command(run: Run) -> str | None:
    return None if run.command is None else shlex.join(["python", "train.py", *run.command])


def _write_picture(run: Run, alike: Sequence[Group], path: Path) -> None:
    """``curve.png``: success over steps and time; none where there is no curve. Of one recipe both evaluations and
    training, of several the former if there are any."""
    both = list(zip(run.goal, ("evaluation", "training rollouts"), strict=True))
    for shown in [both] if len(alike) == 1 else [[goal] for goal in both]:
        panels = []
        for axis in _AXES[::2]:
            found = [(c, what) for metric, what in shown for group in alike if (c := curve(group, metric, axis))]
            curves = [c if len(shown) == 1 else replace(c, name=what) for c, what in found]
            if curves and max(len(c.mean.x) for c in curves) > 1:
                panels.append((*_axis(axis, max(c.mean.x[-1] for c in curves)), curves))
        if panels:
            y = _word(run) if len(shown) > 1 else f"{_word(run)}, {shown[0][1]}"
            with atomic(path, shared=True) as scratch:
                write_picture(scratch, panels, title=run.experiment, y=y)
            return


def percent(share: float | None) -> str:
    """A share for people."""
    return "–" if share is None else f"{100 * share:.1f} %"


def points(share: float) -> str:
    """A difference of shares in percentage points, with a sign unless it rounds to 0."""
    text = f"{100 * share:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def number(value: float) -> str:
    """Four digits at most, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """In the unit that suits."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{seconds / 60:.1f} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
