"""Whole runs through the launcher: in one process and in several, and again after an interruption."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.channel.base import Channel, run_blocking
from embodied_rl.channel.in_process import Scheduler
from embodied_rl.contracts import Trajectory
from embodied_rl.errors import UserError
from embodied_rl.launch import connect, make_backend, run
from embodied_rl.schema import Config
from embodied_rl.tasks.reporting import end_of, video_folder
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker
from embodied_rl.workers.rollout import RolloutWorker
from tests.checkpoints.saved import saved_tensors, saved_weights
from tests.configs import tiny_run
from tests.logged import metrics_of


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for name, item in value.items() for k, v in flatten(item, f"{prefix}/{name}").items()}
    return {prefix: value}


def assert_equal(left: Any, right: Any) -> None:
    left, right = flatten(left), flatten(right)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name], name


def only_run(config: Config) -> Path:
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    return directory


def rollout(config: Config) -> list[Trajectory]:
    """One training rollout's trajectories, taken from the channel before the actor sees them."""
    backend = make_backend(config)
    channels: dict[str, Channel] = {}
    make = backend.channel

    def recording(name: str, keys: Sequence[Hashable], capacity: int, readers: Sequence[int] = ()) -> Channel:
        channels[name] = make(name, keys, capacity, readers)
        return channels[name]

    backend.channel = recording  # type: ignore[method-assign]
    try:
        env, rollouts, actor = connect(config, backend)
        loaded = rollouts.call(RolloutWorker.load_weights, 0)
        actor.call(ActorWorker.publish_weights, 0).wait()
        loaded.wait()
        served = rollouts.call(RolloutWorker.serve, mode="train", step=3)
        env.call(EnvWorker.interact, step=3).wait()
        served.wait()
        get = channels["trajectories"].get_batch(4 * config.algorithm.rollout_epoch, key=0)
        if config.cluster.backend == "process":
            parts = run_blocking(get)
        else:
            scheduler = Scheduler()
            task = scheduler.add("test", get)
            scheduler.run_until(task)
            parts = task.result
        parts = [delivery.trajectory for delivery in parts]
        return sorted(parts, key=lambda t: (t.rollout_epoch, int(t.env_ids[0])))
    finally:
        backend.shutdown()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_serial_and_process_give_identical_trajectories(tmp_path: Path, algorithm: str) -> None:
    options = [f"algorithm={algorithm}", "model=mlp"]
    serial = rollout(tiny_run(tmp_path, "cluster=serial", *options))
    process = rollout(tiny_run(tmp_path, "cluster=process", *options))
    assert len(serial) == len(process) == 4  # two workers, two stages
    for left, right in zip(serial, process, strict=True):
        for name in Trajectory.__dataclass_fields__:
            assert_equal(getattr(left, name), getattr(right, name))
    assert torch.cat([t.env_ids for t in serial]).tolist() == list(range(16))


@pytest.mark.cold_start
def test_serial_and_process_train_alike(tmp_path: Path) -> None:
    runs = []
    for backend in ("serial", "process"):
        config = tiny_run(tmp_path, f"cluster={backend}", f"runner.experiment_name={backend}", "runner.max_steps=2")
        run(config)
        runs.append(only_run(config))
    assert metrics_of(runs[0]) == metrics_of(runs[1])
    assert_equal(*[saved_tensors(r / "checkpoints/global_step_2") for r in runs])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, algorithm: str) -> None:
    options = ["cluster=serial", f"algorithm={algorithm}", "runner.eval_at_end=false"]
    whole = tiny_run(tmp_path, *options, "runner.experiment_name=whole", "runner.max_steps=4")
    run(whole)
    first = tiny_run(tmp_path, *options, "runner.experiment_name=parts", "runner.max_steps=2")
    run(first)
    rest = tiny_run(tmp_path, *options, "runner.experiment_name=parts", "runner.max_steps=4", "runner.resume_dir=auto")
    run(rest)
    assert only_run(rest) == only_run(first), "a resumed run goes on in its directory"
    lines = metrics_of(only_run(whole))
    assert lines == metrics_of(only_run(rest))
    steps = [line["env/steps"] for line in lines]
    assert [line["env/steps_total"] for line in lines] == [sum(steps[:done]) for done in range(1, 5)]
    assert_equal(
        saved_tensors(only_run(whole) / "checkpoints/global_step_4"),
        saved_tensors(only_run(rest) / "checkpoints/global_step_4"),
    )


def test_going_back_to_an_earlier_checkpoint_sets_later_ones_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("cluster=serial", "runner.save_interval=1", "runner.max_keep=null", "runner.eval_at_end=false")
    config = tiny_run(tmp_path, *options, "runner.max_steps=3")
    run(config)
    earlier = only_run(config) / "checkpoints/global_step_1"
    capsys.readouterr()
    run(tiny_run(tmp_path, *options, "runner.max_steps=2", f"runner.resume_dir={earlier}"))
    said = " ".join(capsys.readouterr().out.split())
    assert "global_step_2, global_step_3: of later steps than global_step_1" in said
    there = ["former_global_step_2", "former_global_step_3", "global_step_1", "global_step_2"]
    assert sorted(path.name for path in earlier.parent.iterdir()) == there
    run(tiny_run(tmp_path, *options, "runner.max_steps=4", "runner.resume_dir=auto"))
    said = " ".join(capsys.readouterr().out.split())
    assert f"weights of: {earlier.with_name('global_step_2')}" in said, "what was trained last, not the former ones"
    assert "of later steps" not in said


def test_checkpoints_beside_one_of_another_run_stay(tmp_path: Path) -> None:
    config = tiny_run(
        tmp_path, "cluster=serial", "runner.save_interval=1", "runner.max_keep=null", "runner.max_steps=2"
    )
    run(config)
    kept = tmp_path / "kept"
    (only_run(config) / "checkpoints").rename(kept)
    elsewhere = ("runner.experiment_name=elsewhere", f"runner.resume_dir={kept / 'global_step_1'}")
    run(tiny_run(tmp_path, "cluster=serial", *elsewhere, "runner.max_steps=2"))
    assert sorted(path.name for path in kept.iterdir()) == ["global_step_1", "global_step_2"]


def test_going_back_to_an_earlier_checkpoint_sets_later_evaluations_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say nothing of what is trained now; the checkpoint's own counts. Not before the run can begin."""
    options = ("cluster=serial", "runner.save_interval=1", "runner.max_keep=null", "runner.val_before_train=false")
    filmed = ("env.eval.video_cfg.save_video=true", "runner.val_check_interval=1")
    config = tiny_run(tmp_path, *options, *filmed, "runner.max_steps=3")
    run(config)
    directory = only_run(config)
    earlier = f"runner.resume_dir={directory / 'checkpoints/global_step_1'}"
    capsys.readouterr()
    config = tiny_run(tmp_path, *options, earlier, "runner.max_steps=2", "runner.eval_at_end=false")

    def setup(worker: EnvWorker, *, train: bool) -> None:
        raise UserError("no such robot")

    def count_evaluated(worker: EnvWorker) -> int:
        raise UserError("no such robot")

    for owner, method, failing in ((EnvWorker, "setup", setup), (EnvWorker, "count_evaluated", count_evaluated)):
        with monkeypatch.context() as broken:
            broken.setattr(owner, method, failing)
            with pytest.raises(UserError, match="no such robot"):
                run(tiny_run(tmp_path, *options, earlier, "runner.max_steps=2"))
        assert (directory / "eval_step_000003").is_dir()
        assert (directory / "checkpoints/global_step_3").is_dir()
    capsys.readouterr()
    run(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "eval_step_000002, eval_step_000003: evaluations after later steps than global_step_1" in said
    assert next(iter(end_of(directory, config, None))).endswith("% after 1 steps")
    kept = ["eval_step_000001", "former_eval_step_000002", "former_eval_step_000003"]
    for folder in (directory, video_folder(config, directory)):
        assert sorted(path.name for path in folder.glob("*eval_step_*")) == kept


def test_an_evaluation_names_the_checkpoint_of_its_own_weights(tmp_path: Path) -> None:
    """Not that of the run's first weights, once others were trained."""
    run(tiny_run(tmp_path, "cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false"))
    options = ("runner.max_steps=2", "runner.resume_dir=auto", "runner.val_before_train=true")
    config = tiny_run(tmp_path, "cluster=serial", *options)
    run(config)
    files = [only_run(config) / f"eval_step_{step:06d}/eval.json" for step in (1, 2)]
    found = [json.loads(file.read_text())["meta"] for file in files]
    assert [(m["policy_version"], m["checkpoint"]) for m in found] == [(1, "global_step_1"), (2, None)]


def test_every_episode_that_is_to_be_filmed_is(tmp_path: Path) -> None:
    """Also where more stand side by side than an overview has tiles."""
    lanes = ("cluster=serial", "cluster.component_placement.env=0", "rollout.pipeline_stage_num=1")
    count = ("env.eval.total_num_envs=20", "env.eval.episodes_per_task=10", "env.eval.max_episode_steps=4")
    filmed = ("env.eval.video_cfg.save_video=true", "env.eval.video_cfg.max_videos=null", "runner.only_eval=true")
    config = tiny_run(tmp_path, *lanes, *count, *filmed)
    run(config)
    [file] = (tmp_path / "results").rglob("eval.json")
    episodes = json.loads(file.read_text())["episodes"]
    assert len(episodes) == 40
    assert len({(e["video"]["file"], e["video"]["tile"]) for e in episodes}) == 40


def test_evaluation_only_gives_the_same_table_twice(tmp_path: Path) -> None:
    run(tiny_run(tmp_path, "cluster=serial", "runner.max_steps=1"))
    options = ("runner.only_eval=true", "runner.resume_dir=auto", "env.eval.video_cfg.save_video=true")
    options += ("env.eval.video_cfg.max_videos=null",)
    evaluation = tiny_run(tmp_path, "cluster=serial", *options)
    run(evaluation)
    run(evaluation)
    tables = []
    directories = list((tmp_path / "results" / evaluation.runner.experiment_name).glob("*-eval"))
    for directory in directories:
        table = json.loads((directory / "eval_step_000001/eval.json").read_text())
        del table["timing"]
        tables.append(table)
    assert len(tables) == 2
    assert tables[0] == tables[1]
    assert tables[0]["overall"]["n_episodes"] == 8
    assert [row["n_episodes"] for row in tables[0]["per_task"]] == [2, 2, 2, 2]
    episodes = tables[0]["episodes"]
    assert [(e["task_id"], e["init_state"], e["reset_state_id"]) for e in episodes] == [
        (task, state, 64 * task + state) for task in range(4) for state in range(2)
    ]
    assert {e["policy_version"] for e in episodes} == {1}
    info = json.loads((directories[0] / "eval_step_000001/eval_info.json").read_text())
    assert info["overall"]["pc_success"] == tables[0]["overall"]["pc_success"]
    assert [task["metrics"]["successes"] for task in info["per_task"]] == [
        [e["success"] for e in episodes if e["task_id"] == task] for task in range(4)
    ]
    assert all(Path(video).is_file() for video in info["overall"]["video_paths"])
    assert sum(e["success"] for e in episodes) == tables[0]["overall"]["n_successes"]
    # Two workers with two stages of two envs each: four files, two tiles each, every episode in a tile of its own.
    shown = [(e["video"]["file"], e["video"]["tile"]) for e in episodes]
    assert {file for file, _ in shown} == set(tables[0]["overall"]["video_paths"])
    assert sorted(set(shown)) == [(file, tile) for file in sorted({file for file, _ in shown}) for tile in (0, 1)]
    videos = list((tmp_path / "videos").rglob("*.mp4"))
    assert len(videos) == 2 * len(tables[0]["overall"]["video_paths"]) > 0


@pytest.mark.parametrize(("temperature", "alike"), [(1e-6, True), (1.0, False)])
def test_samples_stand_beside_medians(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float, alike: bool
) -> None:
    draws = ("env.eval.sampled=true", f"algorithm.sampling_params.temperature={temperature}")
    config = tiny_run(tmp_path, "cluster=serial", "runner.only_eval=true", *draws)
    run(config)
    directory = only_run(config)
    content = json.loads((directory / "eval_step_000000/eval.json").read_text())
    overall, sampled = content["overall"], content["sampled"]
    assert [row["task_id"] for row in sampled["per_task"]] == [0, 1, 2, 3]
    assert sampled["overall"]["n_episodes"] == overall["n_episodes"] == 8, "the same episodes"
    difference = abs(sampled["overall"]["avg_sum_reward"] - overall["avg_sum_reward"])
    assert difference < 1e-3 if alike else difference > 1e-2
    [row] = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert row["eval/sampled_success_rate"] == sampled["overall"]["pc_success"] / 100
    assert "sampled" in capsys.readouterr().out


def test_an_evaluation_alone_is_not_held_to_the_sizes_of_training(tmp_path: Path) -> None:
    sizes = ("env.train.total_num_envs=7", "env.train.max_steps_per_rollout_epoch=8", "algorithm.group_size=3")
    evaluation = tiny_run(tmp_path, "cluster=serial", "runner.only_eval=true", *sizes)
    run(evaluation)
    assert len(list(only_run(evaluation).glob("eval_step_*/eval.json"))) == 1
    with pytest.raises(UserError, match=r"env\.eval\.total_num_envs: got 7"):
        tiny_run(tmp_path, "runner.only_eval=true", "env.eval.total_num_envs=7")


def test_a_finished_run_is_not_resumed_for_nothing(tmp_path: Path) -> None:
    options = ["cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false"]
    run(tiny_run(tmp_path, *options))
    with pytest.raises(UserError, match=r"has 1 steps already; raise runner\.max_steps"):
        run(tiny_run(tmp_path, *options, "runner.resume_dir=auto"))


def test_a_step_that_taught_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false"]
    run(tiny_run(tmp_path, *options, "env.reward_coef=0.0"))
    assert "every group's members got the same return" in " ".join(capsys.readouterr().out.split())
    config = tiny_run(tmp_path, *options, "algorithm=dapo", "algorithm.max_resample_rounds=0")
    run(replace(config, env=replace(config.env, init_params={"success_radius": 0.001})))
    assert "no update: algorithm.filter_rewards masked every group" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "options",
    [
        ["algorithm=rloo"],
        ["algorithm=reinforce_pp"],
        ["algorithm=reinforce_pp", "algorithm.adv_type=reinforce_plus_plus_baseline", "algorithm.group_size=4"],
        ["algorithm=grpo", "algorithm.adv_type=raw"],
    ],
)
def test_every_estimator_trains(tmp_path: Path, options: list[str]) -> None:
    config = tiny_run(tmp_path, "cluster=serial", *options, "runner.max_steps=1", "runner.eval_at_end=false")
    run(config)
    [line] = metrics_of(only_run(config))
    assert line["actor/grad_norm"] > 0
    assert line["actor/samples"] == 64  # 16 envs, none of them done before its fourth chunk


def test_training_videos_go_where_their_own_config_says(tmp_path: Path) -> None:
    videos = ["env.train.video_cfg.save_video=true", f"env.train.video_cfg.video_base_dir={tmp_path / 'training'}"]
    run(tiny_run(tmp_path, "cluster=serial", *videos, "runner.max_steps=1", "runner.eval_at_end=false"))
    videos = sorted(path.relative_to(tmp_path / "training").parts[1:] for path in tmp_path.rglob("*.mp4"))
    every_stage = [f"epoch0_worker{worker}_stage{stage}.mp4" for worker in (0, 1) for stage in (0, 1)]
    assert videos == [("step_000001", name) for name in every_stage]
    assert not (tmp_path / "videos").exists()


def test_two_actor_ranks_train_as_one(tmp_path: Path) -> None:
    weights = []
    for ranks, cluster in (("0", "serial"), ("0-1", "process")):
        config = tiny_run(
            tmp_path,
            f"cluster={cluster}",
            f"cluster.component_placement.actor={ranks}",
            f"runner.experiment_name=ranks_{ranks}",
            "runner.max_steps=2",
            "runner.eval_at_end=false",
            "algorithm.n_minibatches=2",
        )
        run(config)
        weights.append(saved_weights(only_run(config) / "checkpoints/global_step_2"))
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-5, atol=1e-6)


def test_tiny_vla_trains_on_images(tmp_path: Path) -> None:
    config = tiny_run(
        tmp_path,
        "cluster=serial",
        "model=tiny_vla",
        "model.num_action_chunks=4",
        "++env.init_params.image_size=32",
        "runner.max_steps=1",
    )
    run(config)
    [line] = metrics_of(only_run(config))
    assert line["actor/grad_norm"] > 0
    assert line["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)  # rollout and actor agree on the log-probabilities


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", ["serial", "process"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_dummy_env_is_learned(tmp_path: Path, algorithm: str, cluster: str) -> None:
    config = tiny_run(
        tmp_path,
        f"experiment=dummy_{algorithm}",
        f"cluster={cluster}",
        "runner.val_before_train=true",
        "env.train.total_num_envs=64",
        "env.train.max_episode_steps=32",
        "env.eval.total_num_envs=64",
        "env.eval.max_episode_steps=32",
        "env.eval.episodes_per_task=16",
    )
    run(config)
    rates = [line["eval/success_rate"] for line in metrics_of(only_run(config)) if "eval/success_rate" in line]
    assert rates[0] == 0.0
    assert rates[-1] > 0.9
