"""An evaluation for programs: the content of ``eval.json``, with its conditions, and of ``eval_info.json``."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from embodied_rl.contracts import EvaluatedEpisode
from embodied_rl.envs.base import adapter_class
from embodied_rl.evaluation.eval_file import EPISODES, SCHEMA_VERSION, number_or_null
from embodied_rl.evaluation.success import SuccessRow, SuccessTable
from embodied_rl.extras import versions
from embodied_rl.params import jsonable, parse_params
from embodied_rl.schema import EmbodiedConfig

INFO_FILE_NAME: Final = "eval_info.json"
PACKAGES: Final = ("torch", "numpy")
"""Packages whose versions every evaluation notes."""


def eval_report(
    table: SuccessTable,
    episodes: Sequence[EvaluatedEpisode],
    *,
    meta: Mapping[str, Any],
    seed: int | None = None,
    eval_s: float | None = None,
    video_paths: Sequence[Path] = (),
    sampled: SuccessTable | None = None,
) -> dict[str, Any]:
    """The content of eval.json. Everything but ``timing`` is the same for the same results.

    ``pc_`` values are percentages, lengths are simulator steps, ``timing`` is wall time in seconds. The names of the
    overall values follow LeRobot's ``eval_info.json``.

    Args:
        episodes: those of the table, in any order; their videos relative to where videos are kept.
        meta: what was evaluated, and under what: :func:`episode_conditions`, checkpoint, policy version. JSON types
            only.
        seed: what the initial states are functions of, beside their number; None where the number is enough.
        eval_s: wall seconds of the evaluation; None leaves the timing section out.
        sampled: the same episodes with actions drawn as in training; None leaves that section out.
    """
    overall = table.overall
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": EPISODES,
        "meta": dict(meta),
        "overall": {
            **_numbers(overall),
            "mean_task_pc_success": round(100 * table.mean_task_success, 4),
            "n_tasks": len(table.tasks),
            "video_paths": [Path(path).as_posix() for path in video_paths],
        },
        "per_task": [{"task_id": row.task_id, "instruction": row.instruction, **_numbers(row)} for row in table.tasks],
        "per_suite": [
            {
                "suite": row.suite,
                **_numbers(row.pooled),
                "mean_task_pc_success": round(100 * row.mean_task_success, 4),
                "n_tasks": row.tasks,
            }
            for row in table.suites
        ],
        "episodes": [_episode(episode, seed) for episode in _ordered(episodes)],
    }
    if sampled is not None:
        report["sampled"] = {
            "overall": _numbers(sampled.overall),
            "per_task": [{"task_id": row.task_id, **_numbers(row)} for row in sampled.tasks],
        }
    if eval_s is not None:
        report["timing"] = {"eval_s": round(eval_s, 3), "eval_ep_s": round(eval_s / overall.episodes, 3)}
    return report


def eval_info(
    episodes: Sequence[EvaluatedEpisode], *, group: str, eval_s: float, videos: Sequence[Path]
) -> dict[str, Any]:
    """The content of ``eval_info.json``: an evaluation as ``lerobot-eval`` writes it, so that readers of its files read
    ours. Source: ``eval_policy_all`` in ``lerobot/scripts/lerobot_eval.py`` of LeRobot 0.6.1.

    Rewards are those that training sees; NaN, as there, where there is no number. ``predicted_video_paths`` are empty,
    as no policy here predicts images.

    Args:
        episodes: at least one; in any order.
        group: the name of the task group, such as libero_10.
        eval_s: wall seconds of the evaluation.
        videos: all of it.
    """
    ordered = _ordered(episodes)
    tasks: dict[int, list[EvaluatedEpisode]] = {}
    for episode in ordered:
        tasks.setdefault(episode.task_id, []).append(episode)
    totals = {
        "avg_sum_reward": _mean(episode.episode_return for episode in ordered),
        "avg_max_reward": _mean(map(_max_reward, ordered)),
        "pc_success": 100 * fmean(episode.success for episode in ordered),
        "n_episodes": len(ordered),
        "video_paths": [video.as_posix() for video in videos],
        "predicted_video_paths": [],
    }
    return {
        "per_task": [
            {"task_group": group, "task_id": task_id, "metrics": _info_metrics(part)} for task_id, part in tasks.items()
        ],
        "per_group": {group: totals},
        "overall": {**totals, "eval_s": eval_s, "eval_ep_s": eval_s / len(ordered)},
    }


def episode_conditions(
    config: EmbodiedConfig, *, image_shapes: Mapping[str, tuple[int, int]], task_ids: Sequence[int]
) -> dict[str, Any]:
    """The settings, beside the policy, that decide how episodes go; by them evaluations are known to be comparable.

    Args:
        image_shapes: camera -> (height, width) of the images that the policy was given.
        task_ids: the tasks that were evaluated.
    """
    env, adapter = config.evaluated, adapter_class(config.evaluated.env_type)
    sampling, drawn = config.algorithm.sampling_params, {}
    if sampling.temperature_eval > 0:  # and only what is cut, as reports from before there were these do not say it
        drawn |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        drawn |= {"top_k": sampling.top_k} if sampling.top_k is not None else {}
    return {
        "env": env.name,
        "env_type": env.env_type,
        "task_ids": sorted(task_ids),
        "episodes_per_task": env.eval.episodes_per_task,
        "max_episode_steps": env.eval.max_episode_steps,
        "ignore_terminations": env.eval.ignore_terminations,
        "temperature": sampling.temperature_eval,
        **drawn,
        "num_action_chunks": config.model.num_action_chunks,
        "cameras": {name: list(shape) for name, shape in sorted(image_shapes.items())},
        "init_params": jsonable(parse_params(adapter.Params, env.init_params, "env.init_params")),
        "use_rel_reward": env.use_rel_reward,
        "reward_coef": env.reward_coef,
        "seed": env.seed,
        "versions": {"python": platform.python_version(), **versions(*PACKAGES, *getattr(adapter, "packages", ()))},
    }


def episode_seed(config: EmbodiedConfig) -> int | None:
    """The seed that the initial states are functions of, beside their number; None where the number is enough."""
    seeded = getattr(adapter_class(config.evaluated.env_type), "states_need_seed", True)
    return config.evaluated.seed if seeded else None


def _ordered(episodes: Sequence[EvaluatedEpisode]) -> list[EvaluatedEpisode]:
    return sorted(episodes, key=lambda episode: (episode.task_id, episode.reset_state_id))


def _episode(episode: EvaluatedEpisode, seed: int | None) -> dict[str, Any]:
    video = None
    if episode.video is not None:
        box = {} if episode.box is None else {"box": list(episode.box)}
        video = {"file": episode.video.as_posix(), "tile": episode.tile, **box}
    return {
        "task_id": episode.task_id,
        "instruction": episode.instruction,
        "init_state": episode.init_state,
        "reset_state_id": episode.reset_state_id,
        "seed": seed,
        "success": episode.success,
        "failed": episode.failed,
        "return": number_or_null(episode.episode_return),
        "max_reward": number_or_null(episode.max_reward),
        "length": episode.episode_length,
        "policy_version": episode.policy_version,
        "video": video,
    }


def _numbers(row: SuccessRow) -> dict[str, Any]:
    return {
        "pc_success": round(100 * row.success_rate, 4),
        "pc_success_ci95": [round(100 * end, 4) for end in row.interval],
        "n_episodes": row.episodes,
        "n_successes": row.successes,
        "n_failures": row.failures,
        # A simulator's NaN reward must not cost the report of a long evaluation.
        "avg_sum_reward": number_or_null(row.mean_return),
        "avg_episode_length": round(row.mean_length, 4),
        "avg_success_length": None if row.mean_success_length is None else round(row.mean_success_length, 4),
    }


def _info_metrics(episodes: Sequence[EvaluatedEpisode]) -> dict[str, Any]:
    return {
        "sum_rewards": [episode.episode_return for episode in episodes],
        "max_rewards": [_max_reward(episode) for episode in episodes],
        "successes": [episode.success for episode in episodes],
        "video_paths": list(dict.fromkeys(episode.video.as_posix() for episode in episodes if episode.video)),
        "predicted_video_paths": [],
    }


def _max_reward(episode: EvaluatedEpisode) -> float:
    return math.nan if episode.max_reward is None else episode.max_reward


def _mean(values: Iterable[float]) -> float:
    """The mean without NaN, as LeRobot's; NaN of nothing else."""
    numbers = [value for value in values if not math.isnan(value)]
    return fmean(numbers) if numbers else math.nan
