"""What cannot be in any task's ``runner`` section."""

from __future__ import annotations

from collections.abc import Iterator

from embodied_rl.schema import Config


def saves_checkpoints(c: Config) -> bool:
    """Whether the run saves any."""
    return c.runner.save_interval > 0 or c.runner.save_interval_seconds is not None


def runner_problems(c: Config) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    contents = c.runner.save_contents
    if "model" not in contents or len(set(contents)) != len(contents):
        yield f"runner.save_contents: got {contents}, expected [model, optimizer], or [model] for weights alone"
    if c.runner.stop_at is not None and c.runner.val_check_interval < 1:
        yield (
            f"runner.stop_at: got {c.runner.stop_at}, which evaluations during training are compared with, but there "
            f"are none (runner.val_check_interval={c.runner.val_check_interval}); set both or none"
        )
    interval = c.runner.weight_sync_interval
    for key in ("save_interval", "val_check_interval"):
        period = getattr(c.runner, key)
        if period > 0 and period % interval:
            why = {
                "save_interval": "a run that goes on from a checkpoint begins with the newest weights",
                "val_check_interval": "an evaluation needs the newest weights",
            }[key]
            yield (
                f"runner.{key}: got {period}, no multiple of runner.weight_sync_interval={interval}, but {why}, so the "
                f"rollouts that follow would be others; use {period // interval * interval + interval}"
            )
