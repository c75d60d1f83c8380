"""When a run evaluates."""

from __future__ import annotations

from pathlib import Path

from embodied_rl.evaluation.eval_file import evaluations_of
from embodied_rl.schema import RunnerConfig


def evaluates_after(config: RunnerConfig, step: int) -> bool:
    """Whether an evaluation is due after so many training steps."""
    at_end = config.eval_at_end and step == config.max_steps
    return at_end or (config.val_check_interval > 0 and step % config.val_check_interval == 0)


def misses_evaluation(config: RunnerConfig, checkpoint: Path, step: int) -> bool:
    """Whether the run that a checkpoint of this step is in failed, or was ended, before an evaluation that was due."""
    if checkpoint.parent.name != "checkpoints":  # its run is elsewhere
        return False
    return evaluates_after(config, step) and step not in evaluations_of(checkpoint.parent.parent)
