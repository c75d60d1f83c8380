"""Where a run's metrics go."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich
from rich.console import Console

from embodied_rl.errors import UserError, suggestion
from embodied_rl.monitoring.backend import MetricBackend, RunInfo, TextBackend, VideoBackend

BACKENDS = {
    "console": "embodied_rl.monitoring.builtin:ConsoleBackend",
    "jsonl": "embodied_rl.monitoring.builtin:JsonlBackend",
    "tensorboard": "embodied_rl.monitoring.builtin:TensorboardBackend",
    "wandb": "embodied_rl.monitoring.builtin:WandbBackend",
}
"""Name in ``logger_backends`` -> class, imported when first used."""


def check_backends(names: Sequence[str]) -> None:
    """Raise unless every name is a backend and none comes twice. Imports nothing, so a config check may call it.

    Raises:
        UserError: with the nearest known name.
    """
    for index, name in enumerate(names):
        if name not in BACKENDS:
            raise UserError(
                f"unknown logger backend {name!r}.{suggestion(name, BACKENDS)} Known: {', '.join(sorted(BACKENDS))}"
            )
        if name in names[:index]:
            raise UserError(f"the logger backend {name!r} is listed twice")


class MetricLogger:
    """Sends each step's metrics to every chosen backend.

    Names are paths such as ``env/success_once`` or ``actor/policy_loss``; the part before the first slash groups them.

    Args:
        first_step: the first step this process logs: 0, or where a resumed run goes on. What the run directory holds
            for that step and later ones is dropped, so no step is there twice. The step before it, which a resumed
            run starts from, may still be added to (an evaluation before training).
        console: default is the one that the progress bar uses too.

    Raises:
        UserError: an unknown backend, a missing package, an option that wandb does not know.
    """

    def __init__(
        self,
        backends: Sequence[str],
        run_dir: Path,
        *,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        wandb_options: Mapping[str, Any],
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        check_backends(backends)
        run = RunInfo(
            run_dir=Path(run_dir),
            project_name=project_name,
            experiment_name=experiment_name,
            config=config,
            first_step=first_step,
            wandb_options=wandb_options,
            console=console or rich.get_console(),
        )
        self._step = max(first_step - 1, 0)
        self._backends: list[MetricBackend] = []
        try:
            for name in backends:
                module, _, attribute = BACKENDS[name].partition(":")
                self._backends.append(getattr(importlib.import_module(module), attribute)(run))
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, Any], *, prefix: str = "") -> None:
        """Log numbers (Python, numpy or one-element tensors) under ``prefix/name``.

        A step's metrics may come in several calls.

        Raises:
            ValueError: a value that is no number, or a step smaller than the last one or than ``first_step - 1``.
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
