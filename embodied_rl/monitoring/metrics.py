"""Logging of a run's metrics to the backends that the configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from embodied_rl.errors import ConfigError, UserError, suggestion
from embodied_rl.monitoring.backend import MetricBackend, RunInfo, TextBackend, VideoBackend
from embodied_rl.monitoring.console import LogBackend
from embodied_rl.params import parse_params
from embodied_rl.registry import Registry

BACKENDS: Final = Registry(
    "runner.logger.logger_backends",
    {
        "console": "embodied_rl.monitoring.console:ConsoleBackend",
        "verbose": "embodied_rl.monitoring.console:VerboseBackend",
        "jsonl": "embodied_rl.monitoring.builtin:JsonlBackend",
        "tensorboard": "embodied_rl.monitoring.builtin:TensorboardBackend",
        "wandb": "embodied_rl.monitoring.builtin:WandbBackend",
        "mlflow": "embodied_rl.monitoring.trackers:MlflowBackend",
        "swanlab": "embodied_rl.monitoring.trackers:SwanlabBackend",
        "trackio": "embodied_rl.monitoring.trackers:TrackioBackend",
    },
    group="embodied_rl.loggers",
)
"""Name in ``logger_backends`` -> class, imported when first used."""
_PARAMS: Final = "runner.logger.params"


def backend_problems(names: Sequence[str], params: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Everything wrong with the backends' names and options. Imports the backends, but no package of theirs.

    Args:
        params: :func:`short_name` of a backend -> its own options.
    """
    short = [short_name(name) for name in names]
    for index, name in enumerate(names):
        if short[index] in short[:index]:
            yield f"{BACKENDS.key}: {short[index]!r} is listed twice"
            continue
        try:
            if problem := BACKENDS.problem(name):
                yield problem
            elif name not in BACKENDS or hasattr(BACKENDS.load(name), "Params"):
                _options(BACKENDS.load(name), name, params)
        except ConfigError as error:
            yield from error.problems
        except UserError as error:
            yield str(error)
    for name in params:
        if name in BACKENDS and not hasattr(BACKENDS.load(name), "Params"):
            yield f"{_PARAMS}.{name}: {name} has no options here" + (
                "; they are runner.logger.wandb" if name == "wandb" else ""
            )
        elif name not in short:
            yield f"{_PARAMS}.{name}: no such backend in {BACKENDS.key}.{suggestion(name, short)}"


def short_name(name: str) -> str:
    """A backend's name in ``runner.logger.params``: that of the class, for one of a module or file."""
    return name.rpartition(":")[2]


def _options(backend: Any, name: str, params: Mapping[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    """The backend's constructor's arguments after ``run``: its ``Params``, where it has some."""
    given, where = params.get(short_name(name), {}), f"{_PARAMS}.{short_name(name)}"
    schema = getattr(backend, "Params", None)
    if schema is not None:
        return (parse_params(schema, given, where),)
    if given:
        raise UserError(f"{where}: the class {backend.__name__} has no dataclass Params, so it has no options")
    return ()


class MetricLogger:
    """Sends each step's metrics to every chosen backend, and all of them to ``run.log``.

    Names are paths such as ``env/success_once`` or ``actor/policy_loss``; the part before the first slash groups them.

    Args:
        params: :func:`short_name` of a backend -> its own options.

    Raises:
        UserError: an unknown backend, a missing package, an option that wandb does not know.
    """

    def __init__(
        self, backends: Sequence[str], run: RunInfo, params: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        if problems := list(backend_problems(backends, params or {})):
            raise ConfigError(problems)
        self._step = max(run.first_step - 1, 0)
        self._backends: list[MetricBackend] = []
        try:
            for name in backends:
                backend = BACKENDS.load(name)
                self._backends.append(backend(run, *_options(backend, name, params or {})))
            if "verbose" not in backends:  # which run.log has anyway
                self._backends.append(LogBackend(run))
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, Any], *, prefix: str = "") -> None:
        """Log numbers (Python, numpy or one-element tensors) under ``prefix/name``.

        A step's metrics may come in several calls.

        Raises:
            ValueError: a value that is no number, or a step smaller than the last one or than ``run.first_step - 1``.
        """
        self._advance(step)
        values = {}
        for name, value in metrics.items():
            full_name = f"{prefix.rstrip('/')}/{name}" if prefix else name
            try:
                values[full_name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"metric {full_name!r}: got {value!r}, expected one number") from error
        for backend in self._backends:
            backend.log(step, values)

    def log_video(self, step: int, name: str, path: Path) -> None:
        """Show an mp4 file in the backends that can (wandb)."""
        self._advance(step)
        for backend in self._backends:
            if isinstance(backend, VideoBackend):
                backend.log_video(step, name, path)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Show Markdown in the backends that can (tensorboard)."""
        self._advance(step)
        for backend in self._backends:
            if isinstance(backend, TextBackend):
                backend.log_text(step, name, text)

    def _advance(self, step: int) -> None:
        if step < self._step:
            raise ValueError(f"got metrics of step {step} after step {self._step}: steps must not go back")
        self._step = step

    def close(self) -> None:
        """Flush and close every backend, also after an error in one of them."""
        errors = []
        while self._backends:
            try:
                self._backends.pop().close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
