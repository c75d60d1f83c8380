"""The shape of ``eval_info.json`` is that of LeRobot 0.6.1's ``eval_policy_all``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from embodied_rl.contracts import EvaluatedEpisode
from embodied_rl.evaluation.report import eval_info
from embodied_rl.files import write_json

# Of its TaskMetrics, and of the dictionaries that it returns.
TASK_METRICS = {"sum_rewards", "max_rewards", "successes", "video_paths", "predicted_video_paths"}
GROUP = {"avg_sum_reward", "avg_max_reward", "pc_success", "n_episodes", "video_paths", "predicted_video_paths"}
OVERALL = GROUP | {"eval_s", "eval_ep_s"}


def episode(task: int, state: int, success: bool, *, max_reward: float | None = 1.0, video: str | None = None):
    return EvaluatedEpisode(
        env_id=state,
        task_id=task,
        instruction=f"task {task}",
        reset_state_id=10 * task + state,
        success=success,
        episode_return=2.0 * success,
        episode_length=5,
        max_reward=max_reward,
        init_state=state,
        policy_version=1,
        video=None if video is None else Path(video),
        tile=None if video is None else state,
    )


EPISODES = [
    episode(1, 1, True, video="v/b.mp4"),
    episode(0, 0, True, max_reward=3.0, video="v/a.mp4"),
    episode(0, 1, False, max_reward=None, video="v/a.mp4"),
    episode(1, 0, True),
]


def test_numbers_and_keys() -> None:
    info = eval_info(EPISODES, group="libero_10", eval_s=6.0, videos=[Path("v/a.mp4"), Path("v/b.mp4")])
    assert set(info) == {"per_task", "per_group", "overall"}
    assert set(info["overall"]) == OVERALL
    assert {name: set(group) for name, group in info["per_group"].items()} == {"libero_10": GROUP}
    assert [set(task) for task in info["per_task"]] == [{"task_group", "task_id", "metrics"}] * 2
    assert all(set(task["metrics"]) == TASK_METRICS for task in info["per_task"])
    overall = info["overall"]
    assert (overall["pc_success"], overall["n_episodes"], overall["avg_sum_reward"]) == (75.0, 4, 1.5)
    assert overall["avg_max_reward"] == pytest.approx(5 / 3), "numpy.nanmean, as upstream"
    assert (overall["eval_s"], overall["eval_ep_s"]) == (6.0, 1.5)
    assert overall["video_paths"] == ["v/a.mp4", "v/b.mp4"]
    assert {key: overall[key] for key in GROUP} == info["per_group"]["libero_10"]
    [first, second] = info["per_task"]
    assert (first["task_group"], first["task_id"], second["task_id"]) == ("libero_10", 0, 1)
    assert first["metrics"]["successes"] == [True, False]
    assert first["metrics"]["max_rewards"][0] == 3.0 and math.isnan(first["metrics"]["max_rewards"][1])
    assert (first["metrics"]["video_paths"], second["metrics"]["video_paths"]) == (["v/a.mp4"], ["v/b.mp4"])


def test_a_value_that_nobody_measured_is_nan_in_the_file(tmp_path: Path) -> None:
    info = eval_info([episode(0, 0, True, max_reward=None)], group="g", eval_s=1.0, videos=[])
    write_json(tmp_path / "eval_info.json", info, allow_nan=True)
    assert '"avg_max_reward": NaN' in (tmp_path / "eval_info.json").read_text()
