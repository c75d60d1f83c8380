"""Metrics and videos in Weights & Biases (optional extra)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_rl.errors import UserError, suggestion
from embodied_rl.extras import install_command
from embodied_rl.monitoring.backend import RunInfo

RUN_ID_FILE = "wandb_run_id.txt"
_OWNED = {
    "project": "logger.project_name",
    "name": "runner.experiment_name",
    "dir": "runner.output_dir",
    "config": "the run's own config",
}


class WandbBackend:
    """``wandb.init`` with the options of ``logger.wandb``; a resumed run continues its own W&B run."""

    def __init__(self, run: RunInfo) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"the logger backend 'wandb' needs a package that is not installed: {install_command('wandb')}"
            ) from error
        options: dict[str, Any] = dict(run.wandb_options)
        _check_options(options, set(inspect.signature(wandb.init).parameters) - set(_OWNED))
        run.run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run.run_dir / RUN_ID_FILE
        if run.first_step > 0 and id_file.exists():
            options = {"id": id_file.read_text().strip(), "resume": "allow"} | options
        self._video = wandb.Video
        self._run = wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            dir=str(run.run_dir),
            config=dict(run.config),
            **options,
        )
        id_file.write_text(f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_video(self, step: int, name: str, path: Path) -> None:
        self._run.log({name: self._video(str(path), format="mp4")}, step=step)

    def close(self) -> None:
        self._run.finish()


def _check_options(options: Mapping[str, object], known: set[str]) -> None:
    settings = options.get("settings")
    nested = list(settings) if isinstance(settings, Mapping) else []
    for name in (*options, *nested):
        if name in {"key", "api_key"}:
            raise UserError(
                f"logger.wandb: got {name!r}, but configs are stored and shared, so no key belongs in one. "
                "Run `wandb login` or set WANDB_API_KEY."
            )
    for name in options:
        if name in _OWNED:
            raise UserError(f"logger.wandb.{name}: it follows from {_OWNED[name]}; set that and remove this one")
        if name not in known:
            raise UserError(f"logger.wandb.{name}: wandb.init has no such option.{suggestion(name, known)}")
