"""Metrics as TensorBoard events in ``<run dir>/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping

from embodied_rl.errors import UserError
from embodied_rl.monitoring.backend import RunInfo

FOLDER = "tensorboard"


class TensorboardBackend:
    def __init__(self, run: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "the logger backend 'tensorboard' needs a package that is not installed: pip install tensorboard"
            ) from error
        # TensorBoard hides what earlier event files hold for these steps.
        self._writer = SummaryWriter(str(run.run_dir / FOLDER), purge_step=run.first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
