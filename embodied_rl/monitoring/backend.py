"""What a new metric backend has to provide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a backend may know of the run. Producer: ``MetricLogger``. Consumer: the backends' constructors."""

    run_dir: Path
    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    """The whole resolved config, for backends that store it."""
    first_step: int
    """Steps from here on are logged (again): what an earlier process logged for them no longer counts."""
    wandb_options: Mapping[str, Any]
    console: Console


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
