"""Protocol of metric backends, and what they know of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import rich
from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts of a run for its metric backends. Producer: ``launch.py``. Consumer: the backends' constructors."""

    run_dir: Path
    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    """The whole resolved config, for backends that store it."""
    wandb_options: Mapping[str, Any] = field(default_factory=dict)
    first_step: int = 0
    """First step that this process logs: 0, or the next one of a resumed run. What the run directory holds for that
    step and later ones is dropped, so no step is there twice. The step before it, which a resumed run starts from, may
    still be added to (an evaluation before training)."""
    console: Console = field(default_factory=rich.get_console)
    """Default: the one that the progress bar uses, too."""


class MetricBackend(Protocol):
    """One destination of metrics. Construct as ``Backend(run_info)``; or, of a class with a dataclass ``Params``, as
    ``Backend(run_info, params)``, ``params`` being built from the config's ``runner.logger.params.<name>``."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store one step's metrics. A step may come in several calls; steps never decrease."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class VideoBackend(Protocol):
    """A backend that also shows videos."""

    def log_video(self, step: int, name: str, path: Path) -> None: ...


@runtime_checkable
class TextBackend(Protocol):
    """A backend that also shows texts."""

    def log_text(self, step: int, name: str, text: str) -> None: ...
