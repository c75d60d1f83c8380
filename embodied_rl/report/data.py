"""What a run directory says: configuration, metrics, evaluations. It may still be written, or have been cut off."""

from __future__ import annotations

import datetime
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from embodied_rl.checkpoints.resume import CONFIG_FILE, read_config
from embodied_rl.checkpoints.store import EVALUATION
from embodied_rl.errors import CheckpointError, UserError
from embodied_rl.evaluation.eval_file import EPISODES, SavedEvaluation, evaluations_of, read_evaluation
from embodied_rl.files import parse_json
from embodied_rl.monitoring.builtin import METRICS_FILE
from embodied_rl.params import at
from embodied_rl.report.facts import is_alive, read_starts

ENV_STEPS: Final = "env/steps_total"
STEP_S: Final = "time/step"
EVAL_S: Final = "eval/seconds"
_GOALS: Final = (("eval/success_rate", "env/success_once"), ("eval/accuracy", "rollout/accuracy"))
"""Metric of evaluations, and of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A metric of a run over its training steps; only steps with a number."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """An episode in a video."""

    episode: Hashable
    """As in :attr:`SavedEvaluation.outcomes`."""
    init_state: int | None
    """Number of the initial state within its task; None of a file that has none."""
    success: bool
    box: tuple[int, int, int, int] | None
    """Left, top, right, bottom in the video's pictures; None of a file of an earlier version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """A video of an evaluation, and the episodes in it."""

    path: Path
    task: int | None
    """None: of several tasks."""
    label: str
    """The task's instruction."""
    tiles: tuple[Tile, ...]

    @property
    def outcomes(self) -> tuple[bool, ...]:
        """Success of each episode, tile by tile."""
        return tuple(tile.success for tile in self.tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRate:
    """A task's row, or a source's, in an evaluation; shares in [0, 1]."""

    task: int | str
    label: str
    successes: float
    count: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An ``eval.json``."""

    step: int
    saved: SavedEvaluation
    rate: float | None
    """Success rate or accuracy in [0, 1]; None where nothing was verified."""
    interval: tuple[float, float] | None
    """95 %, as the evaluation itself has it."""
    tasks: tuple[TaskRate, ...]
    films: tuple[Film, ...]

    @property
    def count(self) -> int:
        """Episodes, or prompts with a verified answer."""
        return sum(row.count for row in self.tasks)

    @property
    def in_simulator(self) -> bool:
        return self.saved.kind == EPISODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory as it was read."""

    path: Path
    config: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    """Lines of ``metrics.jsonl``, by step."""
    evaluations: Mapping[int, Evaluation]
    """By finished training steps, ascending."""
    starts: tuple[Mapping[str, Any], ...]
    """Entries of ``run.json``; none of a run of an earlier version."""
    notes: tuple[str, ...]
    """Files that could not be read, in words."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def experiment(self) -> str:
        return str(at(self.config, "runner.experiment_name") or self.path.parent.name)

    @property
    def task(self) -> str:
        return str(at(self.config, "runner.task_type") or "embodied")

    @property
    def only_eval(self) -> bool:
        return bool(at(self.config, "runner.only_eval"))

    @property
    def max_steps(self) -> int:
        return int(at(self.config, "runner.max_steps") or 0)

    @property
    def step(self) -> int:
        """Training steps finished."""
        trained = [row["step"] for row in self.rows if STEP_S in row]
        return max([*trained, *self.evaluations], default=0)

    @property
    def under_way(self) -> bool:
        return bool(self.starts) and is_alive(dict(self.starts[-1]))

    @property
    def command(self) -> list[str] | None:
        """Arguments of the last start."""
        return self.starts[-1].get("command") if self.starts else None

    @property
    def state(self) -> str:
        """Where the run stands, in a few words."""
        where = "" if self.only_eval or not self.max_steps else f" after {self.step} of {self.max_steps} steps"
        if self.under_way:
            return f"under way{where}"
        ending = self.starts[-1].get("ending") if self.starts else None
        if ending not in (None, "finished"):
            return f"{ending}{where}"
        if ending == "finished" or not where or self.step >= self.max_steps:
            return "evaluated" if self.only_eval else f"finished after {self.step} steps"
        return f"ended{where}"

    @property
    def goal(self) -> tuple[str, str]:
        """The metrics of success: in evaluations, and in training."""
        return _GOALS[1] if self.task in ("math", "sft") else _GOALS[0]

    @property
    def first(self) -> Evaluation | None:
        return next(iter(self.evaluations.values()), None)

    @property
    def last(self) -> Evaluation | None:
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    def metrics(self) -> list[str]:
        """Names, in the order in which they appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def series(self, metric: str) -> Series:
        """A metric where it is a finite number."""
        found = [(row["step"], row[metric]) for row in self.rows if _is_number(row.get(metric))]
        return Series(steps=tuple(step for step, _ in found), values=tuple(float(value) for _, value in found))

    def gaps(self, metric: str) -> int:
        """Steps at which the metric was not finite."""
        return sum(metric in row and row[metric] is None for row in self.rows)

    def seconds(self) -> dict[int, float]:
        """Step -> wall seconds of training and evaluations until its end; the start of workers and checkpoints are not
        in it."""
        passed, found = 0.0, {}
        for row in self.rows:
            passed += sum(row[name] for name in (STEP_S, EVAL_S) if _is_number(row.get(name)))
            found[row["step"]] = passed
        return found

    def env_steps(self) -> dict[int, float]:
        """Step -> simulator steps of training until its end."""
        found = {row["step"]: float(row[ENV_STEPS]) for row in self.rows if _is_number(row.get(ENV_STEPS))}
        return {0: 0.0, **found} if found else {}

    def total(self, metric: str) -> float:
        """The sum over all steps."""
        return math.fsum(self.series(metric).values)


def find_run(path: Path) -> Path:
    """A run directory, or the newest one in an experiment's.

    Raises:
        UserError: there is none.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; expected a run directory, as results/<experiment>/<time>")
    if (path / CONFIG_FILE).is_file():
        return path
    inside = [child for child in path.iterdir() if (child / CONFIG_FILE).is_file()]
    if not inside:
        raise UserError(f"{path}: is no run directory, nor an experiment's: expected a {CONFIG_FILE} in it or below")
    # What an evaluation of its own left there has no checkpoints and no curves.
    return max([child for child in inside if not child.name.endswith(EVALUATION)] or inside)


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises:
        UserError: it is none.
    """
    notes: list[str] = []
    try:
        config = read_config(path / CONFIG_FILE)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    starts = tuple(read_starts(path))
    films = _film_folder(path, config, starts)
    evaluations = {}
    for step, file in sorted(evaluations_of(path).items()):
        try:
            evaluations[step] = _evaluation(step, file, films)
        except UserError as error:
            notes.append(str(error))
    return Run(
        path=path,
        config=config,
        rows=tuple(_rows(path / METRICS_FILE, notes)),
        evaluations=evaluations,
        starts=starts,
        notes=tuple(notes),
    )


def _rows(path: Path, notes: list[str]) -> Iterable[Mapping[str, Any]]:
    """The whole lines of ``metrics.jsonl``. The last one may just be being written, or have been cut by the end of the
    process; others that are no step's metrics are noted."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row
        elif number < len(lines):
            notes.append(f"{path}:{number}: is no step's metrics and was left out")


def _evaluation(step: int, file: Path, film_folder: Path | None) -> Evaluation:
    saved = read_evaluation(file, f"step {step}")
    content = parse_json(file.read_text(encoding="utf-8"))
    grouped: dict[int | str, list[tuple[str, float]]] = {}
    for outcome in saved.outcomes.values():
        if outcome.score is not None:
            grouped.setdefault(outcome.task, []).append((outcome.label, outcome.score))
    tasks = [
        TaskRate(
            task=task,
            label=found[0][0],
            successes=math.fsum(score for _, score in found),
            count=len(found),
            rate=math.fsum(score for _, score in found) / len(found),
        )
        for task, found in sorted(grouped.items(), key=lambda item: (str(type(item[0])), item[0]))
    ]
    count = sum(row.count for row in tasks)
    overall = content["overall"]
    bounds = overall.get("pc_success_ci95") or overall.get("pc_accuracy_ci95")
    return Evaluation(
        step=step,
        saved=saved,
        rate=math.fsum(row.successes for row in tasks) / count if count else None,
        interval=(bounds[0] / 100, bounds[1] / 100) if bounds else None,
        tasks=tuple(tasks),
        films=tuple(_films(content.get(EPISODES, []), film_folder)) if film_folder else (),
    )


def _films(episodes: Sequence[Mapping[str, Any]], folder: Path) -> Iterable[Film]:
    """The videos that episodes are in and that are still there, in the order of their tasks."""
    shown: dict[str, list[Mapping[str, Any]]] = {}
    for episode in episodes:
        if video := episode.get("video"):
            shown.setdefault(video["file"], []).append(episode)
    for name, inside in shown.items():
        if not (folder / name).is_file():
            continue
        inside.sort(key=lambda episode: episode["video"].get("tile") or 0)
        tasks = {episode["task_id"]: episode["instruction"] for episode in inside}
        yield Film(
            path=folder / name,
            task=next(iter(tasks)) if len(tasks) == 1 else None,
            label=next(iter(tasks.values())) if len(tasks) == 1 else f"{len(tasks)} tasks",
            tiles=tuple(map(_tile, inside)),
        )


def _tile(episode: Mapping[str, Any]) -> Tile:
    box = episode["video"].get("box")
    return Tile(
        episode=(episode["task_id"], episode["reset_state_id"], episode.get("seed")),
        init_state=episode.get("init_state"),
        success=bool(episode["success"]),
        box=tuple(box) if box else None,
    )


def _film_folder(path: Path, config: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> Path | None:
    """The folder of a run's evaluations' videos; None where none can be."""
    env = "eval_env" if at(config, "eval_env") else "env"
    base = at(config, f"{env}.eval.video_cfg.video_base_dir")
    if base is None:
        return None
    below = Path(str(base)) / f"{at(config, 'runner.experiment_name')}_{path.resolve().name}"
    roots = [Path(str(start.get("folder"))) for start in reversed(starts)]
    return next((root / below for root in [*roots, Path.cwd()] if (root / below).is_dir()), None)


def started(run: Run) -> datetime.datetime | None:
    """The time of the first start."""
    try:
        return datetime.datetime.fromisoformat(str(run.starts[0]["started"])) if run.starts else None
    except ValueError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
