"""Reports of training in simulators: step metrics from the workers' reports, and an evaluation's table and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

from embodied_rl.contracts import EpisodeRecord, EvaluatedEpisode
from embodied_rl.evaluation.eval_file import FILE_NAME
from embodied_rl.evaluation.report import INFO_FILE_NAME, episode_conditions, episode_seed, eval_info, eval_report
from embodied_rl.evaluation.success import SuccessReport, SuccessTable, success_table, task_name
from embodied_rl.files import write_json
from embodied_rl.monitoring.peak_memory import memory_metrics
from embodied_rl.monitoring.performance import Waits, spread
from embodied_rl.monitoring.trend import ENV_STEPS
from embodied_rl.monitoring.work import Flops, Work, perf_metrics
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.reporting import Advice, Reporter, Timed, eval_name, longest, step_problem
from embodied_rl.workers.env import EnvReport, EvalReport
from embodied_rl.workers.rollout import RolloutReport

_ADVICE = Advice(
    score="success rate",
    easier="start from a better policy, or use easier tasks, longer episodes or more envs",
    harder="there is little left to learn, so use harder tasks, or end here",
    equal=(
        "every group's members got the same return, so the gradient is zero: it takes groups in which some succeed and "
        "some fail; start from a better policy, or use easier tasks, longer episodes or more envs"
    ),
)
_AHEAD = "reset_ahead"
"""An env worker's phase before its rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The workers' reports of one rollout of all envs."""

    envs: Sequence[EnvReport]
    policies: Sequence[RolloutReport]


def rollout_metrics(
    rollouts: Sequence[Rollout],
    *,
    episodes: Sequence[EpisodeRecord],
    unfinished: int,
    steps_before: float | None,
    rollout_s: float,
) -> dict[str, float]:
    """Metrics of a training step's rollouts. ``time/`` values are wall seconds, of the slowest of the workers that did
    the same.

    Args:
        episodes: what ``env/success_once``, ``return`` and ``episode_len`` are the means of.
        unfinished: envs whose episode goes on in the next step.
        steps_before: simulator steps of the run's earlier training steps; None: nobody knows.
        rollout_s: wall seconds of all rollouts.
    """
    envs = [report for rollout in rollouts for report in rollout.envs]
    env_steps = sum(report.env_steps for report in envs)

    def env_time(phase: str) -> float:
        return sum(longest(rollout.envs, phase) for rollout in rollouts)

    def policy_time(phase: str) -> float:
        return sum(longest(rollout.policies, phase) for rollout in rollouts)

    metrics = {
        "env/episodes": float(len(episodes)),
        "env/unfinished": float(unfinished),
        "env/steps": float(env_steps),
    }
    if episodes:
        count = len(episodes)
        metrics |= {
            "env/success_once": sum(e.success for e in episodes) / count,
            "env/return": sum(e.episode_return for e in episodes) / count,
            "env/return_std": pstdev(e.episode_return for e in episodes),
            "env/episode_len": sum(e.episode_length for e in episodes) / count,
        }
        tasks = success_table(episodes)
        if len(tasks.tasks) > 1:
            metrics |= {f"env_task/{name}": value for name, value in task_metrics(tasks).items()}
    if steps_before is not None:
        metrics[ENV_STEPS] = steps_before + env_steps
    metrics |= {
        "time/env": env_time("env"),
        "time/reset": env_time("reset"),
        "time/reset_ahead": env_time(_AHEAD),
        "time/env_wait": env_time("wait"),
        "time/inference": policy_time("inference"),
        "time/inference_wait": policy_time("wait"),
        "time/policy_load": policy_time("load"),
        "time/policy_offload": policy_time("offload"),
        "rollout/env_steps_per_s": env_steps / rollout_s,
        "rollout/inferences": float(sum(report.inferences for rollout in rollouts for report in rollout.policies)),
        "rollout/interruptions": float(max(r.interruptions for rollout in rollouts for r in rollout.policies)),
    }
    metrics |= {f"time/env_{phase}": spent for phase in ("acquire", "release") if (spent := env_time(phase))}
    if waited := policy_time("weights_wait"):
        metrics["time/weights_wait"] = waited
    # A worker that serves several rollouts is there once.
    work = [together(worker) for worker in zip(*(rollout.policies for rollout in rollouts), strict=True)]
    metrics |= memory_metrics("env", [report.peak_memory for report in envs])
    metrics |= memory_metrics("rollout", [report.peak_memory for rollout in rollouts for report in rollout.policies])
    return metrics | perf_metrics("rollout", work, metrics["time/inference"])


def episodes_of(rollouts: Sequence[Rollout]) -> list[EpisodeRecord]:
    """The episodes that ended in them."""
    return [episode for rollout in rollouts for report in rollout.envs for episode in report.episodes]


def waits(rollouts: Sequence[Rollout]) -> Waits:
    """Seconds in which the workers of a training step's rollouts waited."""

    def mean(reports: Sequence[Timed], phase: str) -> float:
        return fmean(report.seconds.get(phase, 0.0) for report in reports)

    def taken(report: EnvReport) -> float:
        return sum(seconds for phase, seconds in report.seconds.items() if phase != _AHEAD)

    resets = [[report.seconds.get("reset", 0.0) for report in rollout.envs] for rollout in rollouts]
    # Policies wait for weights that are due, and envs for these policies, while the actor updates: not in the part of
    # the step that is its rollout.
    return {
        "requests": sum(mean(rollout.policies, "wait") for rollout in rollouts),
        "answers": sum(max(0.0, mean(r.envs, "wait") - mean(r.policies, "weights_wait")) for r in rollouts),
        "weights": sum(mean(rollout.policies, "weights") for rollout in rollouts),
        "stragglers": sum(spread([taken(report) for report in rollout.envs]) for rollout in rollouts),
        "resets": sum(map(max, resets)),
        "reset_spread": sum(map(spread, resets)),
    }


def together(reports: Sequence[RolloutReport]) -> Work | None:
    """A worker's work in several rollouts; None where it is not known of each."""
    work = [report.work for report in reports if report.work is not None]
    if len(work) < len(reports):
        return None
    return Work(flops=sum((part.flops for part in work), Flops()), peak=work[0].peak)


def task_metrics(table: SuccessTable) -> dict[str, float]:
    """Each task's success rate, named by its number and its instruction.

    A task of one instruction keeps its name. Where an adapter words a task in several ways, the name follows the
    wording of the lowest initial state played.
    """
    return {f"{task_name(row.task_id, row.instruction)}/success": row.success_rate for row in table.tasks}


def warning(metrics: Mapping[str, float], config: EmbodiedConfig) -> str | None:
    """The problem of a training step, as :func:`step_problem`; None if there is none."""
    return step_problem(metrics, config, _ADVICE)


_UNTOLD = (
    "warning: no step said whether it succeeded, so the rate says nothing; info['success'] tells it, and of "
    "env=gymnasium env.init_params.success_key, another entry of info, or success_return, a return that counts"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReporter(Reporter[EmbodiedConfig]):
    """Shows an evaluation's table and writes it to ``<run>/eval_step_<n>/``: ``eval.json``, and ``eval_info.json`` as
    LeRobot does."""

    video_dir: Path

    def report(
        self,
        table: SuccessTable,
        reports: Sequence[EvalReport],
        sampled: SuccessTable | None = None,
        *,
        step: int,
        seconds: float,
    ) -> None:
        """Show and write what the workers found; ``table`` sums it up, ``sampled`` the same episodes with actions drawn
        as in training."""
        config, cfg = self.config, self.config.evaluated
        title = f"{cfg.name} after {step} training steps, episodes of at most {cfg.eval.max_episode_steps} env steps"
        self.console.print(SuccessReport(table, title=title, sampled=sampled))
        if not any(report.tells_success for report in reports):
            self.console.print(_UNTOLD, markup=False, highlight=False, soft_wrap=True)
        path = self.run_dir / eval_name(step) / FILE_NAME
        task_ids = [row.task_id for row in table.tasks if row.task_id is not None]
        meta = {
            **episode_conditions(config, image_shapes=reports[0].image_shapes, task_ids=task_ids),
            **self.policy_facts(step),
            "digest": _digest(config),
        }
        episodes = [episode for report in reports for episode in report.episodes]
        videos = [video for report in reports for video in report.videos]
        content = eval_report(
            table,
            [self._relative(episode) for episode in episodes],
            meta=meta,
            seed=episode_seed(config),
            eval_s=seconds,
            video_paths=[video.relative_to(self.video_dir) for video in videos],
            sampled=sampled,
        )
        write_json(path, content)
        info = eval_info(episodes, group=cfg.name, eval_s=seconds, videos=videos)
        write_json(path.with_name(INFO_FILE_NAME), info, allow_nan=True)
        self.console.print(f"table:  {path}", markup=False, highlight=False, soft_wrap=True)
        for folder in sorted({video.parent for video in videos}):
            count = sum(video.parent == folder for video in videos)
            self.console.print(f"videos: {folder} ({count})", markup=False, highlight=False, soft_wrap=True)

    def _relative(self, episode: EvaluatedEpisode) -> EvaluatedEpisode:
        if episode.video is None:
            return episode
        return replace(episode, video=episode.video.relative_to(self.video_dir))


def _digest(config: EmbodiedConfig) -> str:
    """Tells two evaluations apart that ran with different settings of env, model or sampling."""
    content = {
        "env": asdict(config.evaluated),
        "model": asdict(config.model),
        "sampling": asdict(config.algorithm.sampling_params),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
