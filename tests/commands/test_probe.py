"""``python train.py probe`` on policies whose prospects are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from embodied_rl.checkpoints.store import complete_checkpoints
from embodied_rl.cli import config_of
from embodied_rl.commands.probe import main
from embodied_rl.errors import UserError
from embodied_rl.launch import run
from embodied_rl.schema import EmbodiedConfig

TINY = (
    "env=dummy",
    "cluster=serial",
    "env.train.total_num_envs=16",
    "env.eval.total_num_envs=8",
    "env.eval.episodes_per_task=4",
)


def probe(folder: Path, *overrides: str) -> dict[str, Any]:
    main([*overrides, f"runner.output_dir={folder}"])
    (file,) = folder.glob("probe_*/*/probe.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize(("reward", "case"), [("env.reward_coef=1", "dense"), ("env.reward_coef=0", "never")])
def test_a_policy_that_never_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: str, case: str
) -> None:
    short = ("env.train.max_episode_steps=2", "env.eval.max_episode_steps=2")
    found = probe(tmp_path, *TINY, *short, reward)
    assert found["case"] == case
    assert found["sampled_rate"] == found["greedy_rate"] == 0
    page = capsys.readouterr().out
    assert "nothing succeeds yet" in page and "03_move_the_point_to_the_goal_in_the_lower_right_quadrant" in page


def test_a_policy_that_always_succeeds(tmp_path: Path) -> None:
    assert probe(tmp_path, *TINY, "env.init_params.success_radius=3")["case"] == "always"


def test_nothing_is_trained_and_nothing_saved(tmp_path: Path) -> None:
    probe(tmp_path, *TINY, "runner.max_steps=3")
    (directory,) = tmp_path.glob("probe_*/*")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert not complete_checkpoints(directory / "checkpoints")


def test_a_model_whose_answers_are_all_alike(tmp_path: Path) -> None:
    """A very low temperature leaves one answer to each prompt."""
    math = ("task=math", "cluster=serial", "data.rollout_batch_size=32", "data.eval_size=32", "runner.max_steps=1")
    cold = probe(tmp_path / "cold", *math, "algorithm.sampling_params.temperature=0.01")
    assert cold["case"] == "alike"
    assert cold["informative"] < 0.1 < cold["expected"]
    warm = probe(tmp_path / "warm", *math)
    assert warm["case"] == "sometimes"
    assert warm["informative"] > 0.2


def test_it_plays_what_the_run_will_play(tmp_path: Path) -> None:
    math = ("task=math", "cluster=serial", "data.rollout_batch_size=16", "data.eval_size=8", "runner.max_steps=1")
    found = probe(tmp_path / "probe", *math)
    run(config_of(*math, "runner.report=false", "runner.save_interval=-1", f"runner.output_dir={tmp_path / 'run'}"))
    (metrics,) = (tmp_path / "run").rglob("metrics.jsonl")
    (step,) = (row for line in metrics.read_text().splitlines() if "time/step" in (row := json.loads(line)))
    assert found["informative"] == 1 - step["actor/groups_equal"]
    assert found["sampled_rate"] == step["rollout/accuracy"]


def test_a_policy_whose_groups_are_all_filtered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("env.train.max_episode_steps=2", "env.eval.max_episode_steps=2", "env.reward_coef=0")
    found = probe(tmp_path, *TINY, *short, "algorithm=dapo", "algorithm.filter_rewards=true")
    assert (found["case"], found["entropy"], found["informative"]) == ("never", None, 0)
    assert "no update" in capsys.readouterr().out


def test_a_task_has_its_own_numbers_in_both_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two groups a step play two of four tasks; the evaluation plays them all."""
    few = ("env.train.total_num_envs=8", "algorithm.group_size=4", "cluster.component_placement.env=0")
    by_chance = ("env.init_params.step_size=0.4", "algorithm.sampling_params.temperature_eval=1")
    found = probe(tmp_path, *TINY, *few, *by_chance, "rollout.pipeline_stage_num=1", "runner.max_steps=1")
    assert set(found["sampled_tasks"]) < set(found["greedy_tasks"])
    assert len(found["greedy_tasks"]) == 4
    (saved,) = tmp_path.glob("probe_*/*/eval_step_000000/eval.json")
    rates = {row["task_id"]: row["pc_success"] / 100 for row in json.loads(saved.read_text())["per_task"]}
    assert len(set(rates.values())) > 1, "else any order would do"
    assert {int(name[:2]): rate for name, rate in found["greedy_tasks"].items()} == rates
    lines = capsys.readouterr().out.splitlines()
    for name, rate in found["greedy_tasks"].items():
        (line,) = (line for line in lines if name in line)
        drawn = found["sampled_tasks"].get(name)
        assert line.split()[1:] == ["–" if drawn is None else f"{drawn:.1%}", f"{rate:.1%}"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiment=cartpole_ppo", "env.train.max_episode_steps=16", "env.eval.max_episode_steps=16"),
        (*TINY[:3], "eval_env=dummy", "eval_env.eval.total_num_envs=8", "eval_env.eval.episodes_per_task=2"),
        (*TINY, "runner.save_interval=1", "runner.max_keep=3", "runner.stop_at=1", "runner.val_check_interval=1"),
    ],
)
def test_whatever_the_run_saves_films_or_stops_at(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    own = () if "env=dummy" not in arguments else ("env.init_params.success_radius=1.0",)
    found = probe(tmp_path, *arguments, *own, "runner.max_steps=1")
    assert found["samples"] > 0


@pytest.mark.parametrize(("more", "tasks"), [((), [3]), (("experiment=none",), None)])
def test_an_env_that_stands_for_a_recipe(
    monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], tasks: list[int] | None
) -> None:
    class Planned(Exception):
        pass

    def planned(config: EmbodiedConfig) -> None:
        raise Planned(config.env.task_ids, config.runner.max_steps)

    monkeypatch.setattr("embodied_rl.commands.probe.plan_of", planned)
    with pytest.raises(Planned) as caught:
        main(["env=libero_10", *more])
    assert caught.value.args == (tasks, 2)


def test_what_it_refuses() -> None:
    with pytest.raises(UserError, match=r"got algorithm\.learner=sac.*expected one that learns from each step's"):
        main(["experiment=pendulum_sac"])
    with pytest.raises(UserError, match=r"expected runner\.init_from"):
        main(["experiment=dummy_grpo", "runner.resume_dir=auto"])
    with pytest.raises(UserError, match="expected one that learns by trying: embodied, math"):
        main(["task=sft"])


class Corner(gymnasium.Env):
    """A picture with a bright corner, where the camera is the right way up. No episode succeeds."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, turned: bool = False, render_mode: str | None = None) -> None:
        self.turned, self.render_mode = turned, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}

    def render(self) -> np.ndarray:
        picture = np.zeros((48, 48, 3), np.uint8)
        picture[:16, :24] = self.np_random.integers(150, 255, 3)
        return picture[::-1, ::-1] if self.turned else picture


def test_a_policy_that_sees_its_camera_turned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gymnasium.register("tests/Corner-v0", entry_point=f"{__name__}:Corner")
    seen = ("env=gymnasium", "env.init_params.id=tests/Corner-v0", "env.init_params.pixels=true", "model=cnn")
    small = ("cluster=serial", "env.train.max_episode_steps=8", "env.eval.max_episode_steps=8", "algorithm=grpo")
    counts = ("env.train.total_num_envs=16", "env.eval.total_num_envs=4", "env.eval.episodes_per_task=4")
    size = ("env.init_params.camera_height=48", "env.init_params.camera_width=48")
    given = (*seen, *small, *counts, *size)
    named = ("runner.experiment_name=taught", f"runner.output_dir={tmp_path}")
    run(config_of(*given, "runner.max_steps=1", "runner.save_interval=1", "runner.report=false", *named))
    capsys.readouterr()
    before = f"runner.init_from={tmp_path / 'taught'}"
    assert probe(tmp_path / "right", *given, before)["case"] == "never"
    assert "its pictures" not in capsys.readouterr().out
    found = probe(tmp_path / "wrong", *given, before, "env.init_params.kwargs={turned: true}")
    assert found["case"] == "unlike"
    page = capsys.readouterr().out
    assert "it sees something else than it learned from" in page
    assert "camera agentview: its pictures are unlike" in page
    assert "turned by 180 degrees" in page
