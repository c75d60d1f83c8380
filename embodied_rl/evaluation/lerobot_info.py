"""``eval_info.json``: an evaluation as ``lerobot-eval`` writes it, so that what reads its files reads ours.

Source: ``eval_policy_all`` in ``lerobot/scripts/lerobot_eval.py`` of LeRobot 0.6.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from embodied_rl.contracts import EvaluatedEpisode

INFO_FILE_NAME: Final = "eval_info.json"


def eval_info(
    episodes: Sequence[EvaluatedEpisode], *, group: str, eval_s: float, videos: Sequence[Path]
) -> dict[str, Any]:
    """The content of the file.

    Rewards are those that training sees; NaN, as there, where there is no number. ``predicted_video_paths`` are empty,
    as no policy here predicts images.

    Args:
        episodes: at least one; in any order.
        group: the name of the task group, such as libero_10.
        eval_s: wall seconds of the evaluation.
        videos: all of it.
    """
    tasks: dict[int, list[EvaluatedEpisode]] = {}
    for episode in sorted(episodes, key=lambda e: (e.task_id, e.reset_state_id)):
        tasks.setdefault(episode.task_id, []).append(episode)
    ordered = [episode for part in tasks.values() for episode in part]
    totals = {
        "avg_sum_reward": _mean(episode.episode_return for episode in ordered),
        "avg_max_reward": _mean(_number(episode.max_reward) for episode in ordered),
        "pc_success": 100 * fmean(episode.success for episode in ordered),
        "n_episodes": len(ordered),
        "video_paths": [video.as_posix() for video in videos],
        "predicted_video_paths": [],
    }
    return {
        "per_task": [
            {"task_group": group, "task_id": task_id, "metrics": _metrics(part)} for task_id, part in tasks.items()
        ],
        "per_group": {group: totals},
        "overall": {**totals, "eval_s": eval_s, "eval_ep_s": eval_s / len(ordered)},
    }


def _metrics(episodes: Sequence[EvaluatedEpisode]) -> dict[str, Any]:
    return {
        "sum_rewards": [episode.episode_return for episode in episodes],
        "max_rewards": [_number(episode.max_reward) for episode in episodes],
        "successes": [episode.success for episode in episodes],
        "video_paths": list(dict.fromkeys(episode.video.as_posix() for episode in episodes if episode.video)),
        "predicted_video_paths": [],
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(values: Iterable[float]) -> float:
    """Without NaN, as there; NaN of nothing else."""
    numbers = [value for value in values if not math.isnan(value)]
    return fmean(numbers) if numbers else math.nan
