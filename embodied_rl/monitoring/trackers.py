"""Metric backends of three experiment trackers: MLflow, SwanLab and trackio. None needs the network unless asked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import yaml

from embodied_rl.extras import imported
from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.monitoring.trend import overview

_MLFLOW_PARAM_LENGTH: Final = 6000
"""Characters of a value, which a longer one is cut to."""


class _RunId:
    """The tracker's own name of a run, kept in the run directory so that a resumed run goes on under it."""

    def __init__(self, run: RunInfo, tracker: str) -> None:
        self._path = run.run_dir / f"{tracker}_run_id.txt"
        self.known = self._path.read_text().strip() if run.first_step > 1 and self._path.exists() else None
        """None: the run is a new one."""

    def keep(self, name: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(f"{name}\n")


class MlflowBackend:
    """Metrics, the configuration and videos as an MLflow run (mlflow, or mlflow-skinny with sqlalchemy and alembic)."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        tracking_uri: str | None = None
        """Where runs are kept; null: ``mlflow.db`` in the run directory (``mlflow ui --backend-store-uri
        sqlite:///<run directory>/mlflow.db``)."""

    def __init__(self, run: RunInfo, params: Params) -> None:
        mlflow = imported("mlflow", "the logger backend 'mlflow'", "mlflow")
        entities = imported("mlflow.entities", "the logger backend 'mlflow'", "mlflow")
        self._metric = entities.Metric
        run.run_dir.mkdir(parents=True, exist_ok=True)
        self._client = mlflow.MlflowClient(params.tracking_uri or f"sqlite:///{run.run_dir.resolve()}/mlflow.db")
        run_id = _RunId(run, "mlflow")
        if run_id.known:
            self._id = run_id.known
            return
        artifacts = None if params.tracking_uri else f"file://{run.run_dir.resolve()}/mlflow"
        found = self._client.get_experiment_by_name(run.project_name)
        experiment = (
            found.experiment_id
            if found
            else self._client.create_experiment(run.project_name, artifact_location=artifacts)
        )
        self._id = self._client.create_run(experiment, run_name=run.experiment_name).info.run_id
        run_id.keep(self._id)
        values = [entities.Param(key, str(value)[:_MLFLOW_PARAM_LENGTH]) for key, value in _flat(run.config)]
        for first in range(0, len(values), 100):  # the server's limit for one call
            self._client.log_batch(self._id, params=values[first : first + 100])
        self._client.log_text(self._id, yaml.safe_dump(dict(run.config), sort_keys=False), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        values = [self._metric(name, value, now, step) for name, value in (dict(metrics) | overview(metrics)).items()]
        self._client.log_batch(self._id, metrics=values)

    def log_video(self, step: int, name: str, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), f"videos/step_{step:06d}")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabBackend:
    """Metrics and the configuration as a SwanLab run in ``<run directory>/swanlab``."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        mode: Literal["offline", "online", "local", "disabled"] = "offline"
        """online sends to SwanLab, after ``swanlab login``; ``swanlab sync`` sends an offline run later."""
        workspace: str | None = None

    def __init__(self, run: RunInfo, params: Params) -> None:
        self._swanlab = imported("swanlab", "the logger backend 'swanlab'", "swanlab")
        run_id = _RunId(run, "swanlab")
        folder = run.run_dir / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"id": run_id.known, "resume": "allow"} if run_id.known else {}
        if params.workspace is not None:
            options["workspace"] = params.workspace
        started = self._swanlab.init(
            project=run.project_name,
            name=run.experiment_name,
            config=dict(run.config),
            log_dir=str(folder),
            mode=params.mode,
            **options,
        )
        run_id.keep(started.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics) | overview(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class TrackioBackend:
    """Metrics and the configuration in trackio's local store (``trackio show``), or in a Hugging Face Space."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        space_id: str | None = None
        """A Space that shows the metrics, such as ``my-name/my-runs``; null: none, the store stays on this machine."""

    def __init__(self, run: RunInfo, params: Params) -> None:
        self._trackio: ModuleType = imported("trackio", "the logger backend 'trackio'", "trackio")
        run_id = _RunId(run, "trackio")
        name = run_id.known or f"{run.experiment_name}_{run.run_dir.name}"
        self._trackio.init(
            project=run.project_name,
            name=name,
            config=dict(run.config),
            space_id=params.space_id,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        run_id.keep(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics) | overview(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each setting."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
