"""MLflow, SwanLab and trackio, each by its own client: ``scripts/optional_env.sh`` installs them."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.errors import UserError
from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.monitoring.metrics import MetricLogger, backend_problems

METRICS = {"env/episodes": 8.0, "env/success_once": 0.25}


def info(run_dir: Path, first_step: int = 1) -> RunInfo:
    return RunInfo(
        run_dir=run_dir,
        project_name="project",
        experiment_name="experiment",
        config={"env": {"name": "toy"}, "runner": {"max_steps": 2}},
        first_step=first_step,
    )


def train(backend: str, run_dir: Path, params: dict[str, Any] | None = None) -> None:
    """Two steps, the second in a resumed run."""
    video = run_dir.parent / "task_03.mp4"
    video.write_bytes(b"0000")
    for step in (1, 2):
        with MetricLogger([backend], info(run_dir, step), {backend: params} if params else None) as logger:
            logger.log(step, {**METRICS, "env/success_once": 0.25 * step})
            logger.log_video(step, "eval/task_03", video)


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    train("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.data.params["env.name"] == "toy" and run.data.params["runner.max_steps"] == "2"
    history = client.get_metric_history(run.info.run_id, "0_overview/success")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert run.info.status == "FINISHED"
    assert sorted(path.name for path in (tmp_path / "run/mlflow").rglob("*.*")) == [
        "config.yaml",
        "task_03.mp4",
        "task_03.mp4",
    ]


def test_trackio(tmp_path: Path) -> None:
    trackio = pytest.importorskip("trackio")
    utils = pytest.importorskip("trackio.utils")
    with pytest.MonkeyPatch.context() as patch:
        for module in [utils, *(m for name, m in list(sys.modules.items()) if name.startswith("trackio."))]:
            if hasattr(module, "TRACKIO_DIR"):
                patch.setattr(module, "TRACKIO_DIR", tmp_path / "store")
        train("trackio", tmp_path / "run")
        [run] = trackio.Api().runs("project")
    [database] = (tmp_path / "store").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [1, 2], "the resumed run went on"
    assert json.loads(rows[1][1])["0_overview/success"] == 0.5
    assert run.name == (tmp_path / "run/trackio_run_id.txt").read_text().strip()


def test_swanlab(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    train("swanlab", tmp_path / "run")
    found = sorted((tmp_path / "run/swanlab").glob("run-*/run-*.swanlab"))
    assert found and all(path.stat().st_size > 0 for path in found)
    name = (tmp_path / "run/swanlab_run_id.txt").read_text().strip()
    assert {path.stem for path in found} == {f"run-{name}"}


@pytest.mark.parametrize("tracker", ["mlflow", "swanlab", "trackio"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(UserError, match=f"'{tracker}' needs a package that is not installed: pip install"):
        MetricLogger([tracker], info(tmp_path))


def test_options_are_checked_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", None)
    [problem] = backend_problems(["swanlab"], {"swanlab": {"mode": "cloud"}})
    assert "runner.logger.params.swanlab" in problem and "offline" in problem
    [problem] = backend_problems(["console"], {"mlflow": {}})
    assert "runner.logger.params.mlflow: no such backend in runner.logger.logger_backends" in problem
