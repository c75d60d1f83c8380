"""The metric backends that write to files or services."""

from __future__ import annotations

import inspect
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from PIL import Image

from embodied_rl.errors import UserError, suggestion
from embodied_rl.extras import install_command
from embodied_rl.files import atomic, parse_json
from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.monitoring.trend import ENV_STEPS, overview

METRICS_FILE: Final = "metrics.jsonl"
_RUN_ID_FILE: Final = "wandb_run_id.txt"
_WANDB_OWNED: Final = {
    "project": "logger.project_name",
    "name": "runner.experiment_name",
    "dir": "runner.output_dir",
    "config": "the run's own config",
}
"""Option of ``wandb.init`` -> where it comes from."""


class JsonlBackend:
    """Metrics as ``metrics.jsonl``: one JSON object a step, readable with ``pandas.read_json(path, lines=True)``.

    Every call reaches the file at once. A further call for the same step rewrites that step's line with both.

    A value that is not finite is written as null, as JSON has no NaN.
    """

    def __init__(self, run: RunInfo) -> None:
        path = run.run_dir / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _drop_steps_from(path, run.first_step)
        self._file = path.open("a+b")
        self._line: dict[str, Any] = parse_json(kept[-1]) if kept else {}
        self._line_start = sum(len(line) for line in kept[:-1])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._line.get("step"):
            self._file.truncate(self._line_start)
        else:
            self._line, self._line_start = {"step": step}, self._file.seek(0, 2)
        self._line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(self._line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def logged_before(run_dir: Path, metric: str, step: int) -> float | None:
    """The value of ``metric`` at ``step`` in the run's file; None without one."""
    path = run_dir / METRICS_FILE
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}") and (values := parse_json(line)).get("step") == step:
                return values.get(metric)
    return None


def _drop_steps_from(path: Path, first_step: int) -> list[bytes]:
    """Keep and return the lines of earlier steps; drop a last line that a killed process left incomplete."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            step = parse_json(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: expected a JSON object with a 'step'; got {line[:80]!r}. Repair or move the file."
            ) from error
        if step < first_step:
            kept.append(line)
    if kept != lines:
        with atomic(path) as scratch:
            scratch.write_bytes(b"".join(kept))
    return kept


class TensorboardBackend:
    """Metrics as TensorBoard events in ``<run dir>/tensorboard``."""

    def __init__(self, run: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "the logger backend 'tensorboard' needs a package that is not installed: pip install tensorboard"
            ) from error
        # TensorBoard hides what earlier event files hold for these steps.
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.first_step)
        # Its steps are env steps, so it cannot be hidden by training steps.
        self._by_env_steps = SummaryWriter(str(run.run_dir / "tensorboard" / "by_env_steps"))
        if run.first_step <= 1:
            settings = yaml.safe_dump(dict(run.config), sort_keys=False)
            self._writer.add_text("config", f"```yaml\n{settings}```", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        first = overview(metrics)
        for name, value in (first | dict(metrics)).items():
            self._writer.add_scalar(name, value, step)
        if (env_steps := metrics.get(ENV_STEPS)) is not None:
            for name, value in first.items():
                self._by_env_steps.add_scalar(name, value, int(env_steps))
            self._by_env_steps.flush()
        self._writer.flush()

    def log_video(self, step: int, name: str, path: Path) -> None:
        """As a moving picture among the images, a second in four frames."""
        from tensorboard.compat.proto import summary_pb2

        Summary: Any = summary_pb2.Summary  # type: ignore[attr-defined]  # made when it is imported
        picture = Summary.Image(encoded_image_string=_gif(path, per_second=4.0, width=320))
        writer = self._writer._get_file_writer()
        writer.add_summary(Summary(value=[Summary.Value(tag=name, image=picture)]), step)
        self._writer.flush()

    def log_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        self._by_env_steps.close()


def _gif(video: Path, *, per_second: float, width: int) -> bytes:
    """A video as an animated GIF of so many frames a second, which show it in real time, at most ``width`` wide."""
    import av  # what comes with it takes a tenth of a second, and most runs show no video

    frames: list[Image.Image] = []
    with av.open(str(video)) as container:
        for frame in container.decode(video=0):
            if frame.time is None or frame.time * per_second >= len(frames):
                picture = frame.to_image(threads=1)
                picture.thumbnail((width, picture.height))
                frames.append(picture)
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=1000 / per_second, loop=0)
    return buffer.getvalue()


class WandbBackend:
    """Metrics and videos in Weights & Biases: ``wandb.init`` with the options of ``logger.wandb``. A resumed run
    continues its own W&B run."""

    def __init__(self, run: RunInfo) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"the logger backend 'wandb' needs a package that is not installed: {install_command('wandb')}"
            ) from error
        options: dict[str, Any] = dict(run.wandb_options)
        _check_wandb_options(options, set(inspect.signature(wandb.init).parameters) - set(_WANDB_OWNED))
        run.run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run.run_dir / _RUN_ID_FILE
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
        if "env" in run.config:  # a panel can be switched to training steps
            self._run.define_metric(ENV_STEPS)
            self._run.define_metric("0_overview/*", step_metric=ENV_STEPS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics) | overview(metrics), step=step)

    def log_video(self, step: int, name: str, path: Path) -> None:
        self._run.log({name: self._video(str(path), format="mp4")}, step=step)

    def close(self) -> None:
        self._run.finish()


def _check_wandb_options(options: Mapping[str, object], known: set[str]) -> None:
    settings = options.get("settings")
    nested = list(settings) if isinstance(settings, Mapping) else []
    for name in (*options, *nested):
        if name in {"key", "api_key"}:
            raise UserError(
                f"logger.wandb: got {name!r}, but configs are stored and shared, so no key belongs in one. "
                "Run `wandb login` or set WANDB_API_KEY."
            )
    for name in options:
        if name in _WANDB_OWNED:
            raise UserError(f"logger.wandb.{name}: it follows from {_WANDB_OWNED[name]}; set that and remove this one")
        if name not in known:
            raise UserError(f"logger.wandb.{name}: wandb.init has no such option.{suggestion(name, known)}")
