"""``task=collect`` as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

from embodied_rl import launch
from embodied_rl.cli import config_of
from embodied_rl.demonstrations.collection import Collection
from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.demonstrations.lerobot.episode import STAGING, count_staged
from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.demonstrations.plan import CONFIG
from embodied_rl.demonstrations.play import play
from embodied_rl.envs.base import SimEnv, SimObs, SimStep
from embodied_rl.envs.dummy import DummyEnv, DummyExpert, DummyParams
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.schema import CollectConfig
from embodied_rl.workers import collector as worker
from tests.configs import embodied_sft

DUMMY = ("env=dummy", "env.init_params.image_size=16")


def config(directory: Path, *overrides: str, env: Sequence[str] = DUMMY) -> CollectConfig:
    found = config_of(
        "task=collect",
        *env,
        "cluster=serial",
        "collect.episodes_per_task=2",
        f"collect.path={directory / 'data'}",
        f"runner.output_dir={directory / 'results'}",
        "runner.logger.logger_backends=[jsonl]",
        *overrides,
    )
    assert isinstance(found, CollectConfig)
    return found


def contents(root: Path) -> dict[str, bytes]:
    """The files that hold episodes."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.glob("[!.m]*/**/*")) if p.is_file()}


def test_the_data_are_what_the_expert_did(tmp_path: Path) -> None:
    launch.run(config(tmp_path, "collect.expert_noise=false"))
    read = Demonstrations(tmp_path / "data", chunk=4)
    assert (read.num_episodes, read.cameras) == (8, {"agentview": (16, 16)})
    env = DummyEnv(1, DummyParams(image_size=16), seed=0)
    expert = DummyExpert(env)
    obs, actions, _ = read.sample(range(read.num_frames))
    frame = 0
    for state in (20, 21, 84, 85, 148, 149, 212, 213):  # each task's states 20 and 21: the first 20 are evaluation's
        env.reset([0], [state])
        expert.reset(0)
        while True:
            seen, action = env.observe([0]), expert.act(0, None)
            assert obs.state[frame].tolist() == seen.state[0].tolist()
            assert actions[frame, 0].tolist() == action.tolist()
            assert obs.instructions[frame] == env.task(state).instruction
            difference = obs.images["agentview"][frame].int() - torch.from_numpy(seen.images["agentview"][0]).int()
            assert difference.abs().float().mean() < 6  # a disc of few pixels loses colour in yuv420p
            frame += 1
            if env.step([0], action[None]).success[0]:
                break
    assert frame == read.num_frames
    provenance = json.loads((tmp_path / "data/meta/provenance.json").read_text())
    assert provenance[0]["episodes"] == [0, 8] and "torch" in provenance[0]["packages"]
    assert yaml.safe_load((tmp_path / "data" / CONFIG).read_text())["env"]["init_params"] == {"image_size": 16}


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_data(tmp_path: Path) -> None:
    launch.run(config(tmp_path / "a", "cluster.component_placement.env=0"))
    launch.run(config(tmp_path / "b", "cluster=process", "cluster.component_placement.env=0-1"))
    assert contents(tmp_path / "a/data") == contents(tmp_path / "b/data") != {}


def test_a_killed_collection_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []

    def limited(sim: object, reset_state_id: int, *rest: object, **options: object) -> object:
        if len(played) == 3:
            raise KeyboardInterrupt
        played.append(reset_state_id)
        return play(sim, reset_state_id, *rest, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(worker, "play", limited)
        with pytest.raises(KeyboardInterrupt):
            launch.run(config(tmp_path))
    assert count_staged(tmp_path / "data").successes == 3
    with pytest.raises(UserError, match="the collection is not finished"):
        Demonstrations(tmp_path / "data", chunk=1)

    def counted(sim: object, reset_state_id: int, *rest: object, **options: object) -> object:
        played.append(reset_state_id)
        return play(sim, reset_state_id, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "play", counted)
    launch.run(config(tmp_path))
    assert sorted(played) == [20, 21, 84, 85, 148, 149, 212, 213]
    launch.run(config(tmp_path / "whole"))
    assert contents(tmp_path / "data") == contents(tmp_path / "whole/data")
    assert list((tmp_path / "data" / STAGING).iterdir()) == []


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_more_are_added_and_none_is_played_twice(tmp_path: Path) -> None:
    launch.run(config(tmp_path, "env.task_ids=[0,1]", "collect.episodes_per_task=1"))
    launch.run(config(tmp_path, "env.task_ids=[0,2]", "collect.episodes_per_task=2"))
    root = tmp_path / "data"
    records = DataSet.open(root).episodes()
    assert [(r["task_id"], r["reset_state_id"]) for r in records] == [(0, 20), (1, 84), (0, 21), (2, 148), (2, 149)]
    provenance = json.loads((root / "meta/provenance.json").read_text())
    assert [run["episodes"] for run in provenance] == [[0, 2], [2, 5]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collection, "_note_provenance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch.run(config(tmp_path, "env.task_ids=[3]"))
    launch.run(config(tmp_path, "env.task_ids=[0,2]"))
    provenance = json.loads((root / "meta/provenance.json").read_text())
    assert [run["episodes"] for run in provenance] == [[0, 2], [2, 5], [5, 7]], "none is missing"
    before = contents(root)
    launch.run(config(tmp_path, "env.task_ids=[0,2]"))
    assert contents(root) == before


def test_failures_are_dropped_or_kept_as_such(tmp_path: Path) -> None:
    # Eight steps are enough from some initial states and not from others.
    few = ("collect.max_episode_steps=7", "collect.max_attempts=1", "collect.episodes_per_task=4")
    launch.run(config(tmp_path / "a", *few))
    launch.run(config(tmp_path / "b", *few, "collect.keep_failures=true"))
    records = [DataSet.open(d).episodes() for d in (tmp_path / "a/data", tmp_path / "b/data")]
    successes = [[r["reset_state_id"] for r in found if r["success"]] for found in records]
    assert successes[0] == successes[1] and 0 < len(successes[0]) < 16
    assert len(records[0]) == len(successes[0]) and len(records[1]) == 16
    assert all(r["length"] == 7 for r in records[1] if not r["success"])
    assert Demonstrations(tmp_path / "b/data", chunk=1).num_episodes == len(successes[0])


def test_another_attempt_follows_a_failure(tmp_path: Path) -> None:
    launch.run(config(tmp_path, "collect.max_episode_steps=7", "collect.max_attempts=12"))
    records = DataSet.open(tmp_path / "data").episodes()
    assert [r["demonstration"] for r in records] == [0, 1] * 4
    assert max(r["attempt"] for r in records) > 0


class Judged(DummyEnv):
    """No goal: it is the way that counts."""

    success_return = 0.9

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        return replace(super().step(slots, actions), success=np.zeros(len(slots), dtype=np.bool_))


class PicturesOnly(DummyEnv):
    """Without a state."""

    state_dim = 0

    def observe(self, slots: Sequence[int]) -> SimObs:
        obs = super().observe(slots)
        return replace(obs, state=obs.state[:, :0])


class KnowingExpert(DummyExpert):
    """Sees more than a policy."""

    def act(self, slot: int, generator: np.random.Generator | None) -> NDArray[np.float32]:
        env: Any = self._env
        position, goal = env._position[slot], env._goal[slot]
        return np.clip((goal - position) / env.step_size, -1.0, 1.0).astype(np.float32)


PIXELS = (f"env.env_type={__name__}:PicturesOnly", f"collect.expert={__name__}:KnowingExpert")


@pytest.mark.parametrize("image_format", ["video", "png"])
def test_an_env_may_give_nothing_but_pictures(tmp_path: Path, image_format: str) -> None:
    """The data set has no state then, and is one that such an env's policies imitate."""
    for episodes in (1, 2):
        few = (f"collect.episodes_per_task={episodes}", f"collect.image_format={image_format}")
        launch.run(config(tmp_path, *PIXELS, *few))
    source = DataSet.open(tmp_path / "data")
    assert not [name for name in source.info["features"] if "state" in name]
    assert len(source.episodes()) == 8
    with pytest.raises(UserError, match=r"has no feature 'observation.state' for the state"):
        Demonstrations(tmp_path / "data", chunk=2)
    read = Demonstrations(tmp_path / "data", chunk=2, state=False)
    obs, actions, _ = read.sample([0, 5])
    assert (read.state_dim, obs.state.shape, actions.shape) == (0, (2, 0), (2, 2, 2))
    assert obs.images["agentview"].shape == (2, 16, 16, 3)


@pytest.mark.parametrize("model", ["cnn", "tiny_vla"])
def test_pictures_alone_are_imitated(tmp_path: Path, model: str) -> None:
    large = "env.init_params.image_size=36"
    launch.run(config(tmp_path, *PIXELS, env=[DUMMY[0], large]))
    sizes = ("cluster=serial", "data.batch_size=16", "actor.global_batch_size=16", "runner.max_steps=2")
    few = ("env.eval.total_num_envs=4", "env.eval.episodes_per_task=1", "env.eval.max_episode_steps=4")
    own = (f"model={model}", f"runner.output_dir={tmp_path / 'trained'}", "runner.logger.logger_backends=[jsonl]")
    launch.run(embodied_sft(tmp_path / "data", large, PIXELS[0], *own, *sizes, *few))
    [log] = (tmp_path / "trained").glob("*/*/metrics.jsonl")
    losses = [json.loads(line).get("actor/policy_loss") for line in log.read_text().splitlines()]
    assert len([loss for loss in losses if loss is not None]) == 2
    with pytest.raises(UserError, match=r"has no feature 'observation.state' for the state"):
        launch.run(embodied_sft(tmp_path / "data", large, *own, *sizes, *few))


class Nested(DummyEnv):
    """Its cameras are called as Gymnasium's nested dicts call theirs."""

    @staticmethod
    def image_shapes_of(params: DummyParams) -> Mapping[str, tuple[int, int]]:
        return {"robot/front": (16, 16), "robot/wrist": (16, 16), "top": (16, 16)}


def test_names_of_cameras_that_lerobot_takes_not_are_refused_before_playing(tmp_path: Path) -> None:
    nested = (f"env.env_type={__name__}:Nested", f"collect.expert={DummyExpert.__module__}:DummyExpert")
    with pytest.raises(UserError, match=r"cameras of env=dummy: got robot/front, robot/wrist, expected") as caught:
        launch.run(config(tmp_path, *nested))
    assert "'env.init_params.images={robot_front: robot/front, robot_wrist: robot/wrist, top: top}'" in str(
        caught.value
    )
    assert not (tmp_path / "data").exists()


def test_an_episode_may_succeed_by_its_return(tmp_path: Path) -> None:
    judged = (f"env.env_type={__name__}:Judged", f"collect.expert={DummyExpert.__module__}:DummyExpert")
    few = ("collect.max_episode_steps=7", "collect.max_attempts=1", "collect.keep_failures=true")
    launch.run(config(tmp_path, *judged, *few, "collect.episodes_per_task=4"))
    source = DataSet.open(tmp_path / "data")
    level, records = source.rows("next.reward")[:, 0], source.episodes()
    reached = [bool(level[r["dataset_to_index"] - 1] >= 0.9) for r in records]
    assert [r["success"] for r in records] == reached and 0 < sum(reached) < len(reached)
    assert not source.column("next.success").any(), "which says where the goal holds"


def test_without_noise_no_episode_is_recorded_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = ("collect.expert_noise=false", "collect.max_episode_steps=7", "collect.keep_failures=true")
    few = ("env.task_ids=[0]", "env.init_params.states_per_task=32", "collect.max_attempts=4")
    for episodes in (2, 6):
        launch.run(config(tmp_path, *same, *few, f"collect.episodes_per_task={episodes}"))
    records = DataSet.open(tmp_path / "data").episodes()
    states, found = [r["reset_state_id"] for r in records], sum(r["success"] for r in records)
    assert len(set(states)) == len(states) > found + 2 and 0 < found < 6
    said = " ".join(capsys.readouterr().out.split())
    assert f"task 0 has {found} of 6 demonstrations; raise collect.max_attempts for more, or set collect.noise" in said


def test_nothing_worth_keeping_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of 24 attempts left anything to keep: none succeeded"):
        launch.run(config(tmp_path, "collect.max_episode_steps=2"))


def test_a_trained_model_may_play(tmp_path: Path) -> None:
    from embodied_rl.models.base import PolicySpec
    from embodied_rl.models.registry import build_policy

    spec = PolicySpec(action_dim=2, num_action_chunks=4, state_dim=4, image_shapes={}, values_per_chunk=0)
    build_policy("mlp", spec, {}).save_pretrained(tmp_path / "weights")
    launch.run(
        config(
            tmp_path,
            "env.init_params.image_size=0",
            "collect.policy=model",
            "collect.temperature=1.0",
            f"model.path={tmp_path / 'weights'}",
            "model.num_action_chunks=4",
            "collect.max_episode_steps=10",
            "collect.max_attempts=1",
            "collect.keep_failures=true",
        )
    )
    read = Demonstrations(tmp_path / "data", chunk=4, successes_only=False)
    assert (read.num_episodes, dict(read.cameras)) == (8, {})
    assert json.loads((tmp_path / "data/meta/provenance.json").read_text())[0]["weights"] == str(tmp_path / "weights")


def test_what_makes_no_sense_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collect.expert: no scripted expert plays env_type 'maniskill'"):
        config(tmp_path, env=["env=maniskill_push_cube"])
    with pytest.raises(ConfigError, match=r"collect.policy=model: no weights are given"):
        config(tmp_path, "collect.policy=model")
    with pytest.raises(ConfigError, match=r"runner.resume_dir: got 'auto', but a collection resumes from collect.path"):
        config(tmp_path, "runner.resume_dir=auto")
    with pytest.raises(ConfigError, match=r"env.use_rel_reward: this run would not read it.*no success_return"):
        config(tmp_path, "env.use_rel_reward=false")
    with pytest.raises(ConfigError, match=r"actor.seed: this run would not read it"):
        config(tmp_path, "actor.seed=3")
    with pytest.raises(ConfigError, match=r"collect.temperature: this run would not read it.*the expert plays"):
        config(tmp_path, "collect.temperature=1.0")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds something else than a collection"):
        config(tmp_path)


def test_a_folder_keeps_to_its_settings(tmp_path: Path) -> None:
    launch.run(config(tmp_path))
    config(tmp_path, "collect.episodes_per_task=5", "env.task_ids=[1]")
    with pytest.raises(ConfigError, match=r"played with other settings: env.init_params was .*16.*, now .*32"):
        config(tmp_path, "env.init_params.image_size=32")
    with pytest.raises(ConfigError, match=r"collect.noise was 0.0, now 0.3"):
        config(tmp_path, "collect.noise=0.3")


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_how_long_noise_lasts_decides_where_there_is_some(tmp_path: Path, noise: float) -> None:
    """A collection that was begun with another default goes on."""
    launch.run(config(tmp_path, f"collect.noise={noise}"))
    [settings] = tmp_path.rglob("meta/collection.yaml")
    settings.write_text(settings.read_text().replace("noise_correlation: 0.0", "noise_correlation: 0.8"))
    assert "noise_correlation: 0.8" in settings.read_text()
    more = [f"collect.noise={noise}", "collect.episodes_per_task=5"]
    if noise:
        with pytest.raises(ConfigError, match=r"collect.noise_correlation was 0.8, now 0.0"):
            config(tmp_path, *more)
        more.append("collect.noise_correlation=0.8")
    launch.run(config(tmp_path, *more))


def test_bursts_of_noise_are_marked_and_left_out_of_imitation(tmp_path: Path) -> None:
    bursts = ("collect.noise=0.5", "collect.noise_bursts=[2,4]")
    launch.run(config(tmp_path, *bursts))
    source = DataSet.open(tmp_path / "data")
    disturbed = source.column("disturbed")
    assert 0.1 < disturbed.mean() < 0.6
    data = Demonstrations(tmp_path / "data", chunk=4)
    assert data.num_frames == (~disturbed).sum()
    _, _, valid = data.sample(range(data.num_frames))
    assert (valid.sum(1) < 4).any() and valid[:, 0].all()
    with pytest.raises(ConfigError, match=r"collect.noise_bursts was \[2, 4\], now None"):
        config(tmp_path, "collect.noise=0.5")
    launch.run(config(tmp_path, *bursts, "collect.episodes_per_task=5"))
    assert Demonstrations(tmp_path / "data", chunk=4).num_episodes > data.num_episodes


def test_bursts_without_noise_or_with_one_that_lasts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collect.noise_bursts: this run would not read it.*collect.noise is 0"):
        config(tmp_path, "collect.noise_bursts=[2,4]")
    with pytest.raises(ConfigError, match=r"collect.noise_correlation: this run would not read it.*a burst's noise"):
        config(tmp_path, "collect.noise=0.1", "collect.noise_bursts=[2,4]", "collect.noise_correlation=0.5")
    for wrong in ("[2]", "[0,4]", "3"):
        with pytest.raises(ConfigError, match=r"collect.noise_bursts"):
            config(tmp_path, "collect.noise=0.1", f"collect.noise_bursts={wrong}")


@pytest.mark.parametrize("key", ["runner.init_from", "collect.teacher"])
def test_a_folder_keeps_to_the_checkpoint_of_a_run_that_goes_on(tmp_path: Path, key: str) -> None:
    run, small = tmp_path / "runs", [*DUMMY, "model=mlp", "cluster=serial", "runner.val_check_interval=-1"]
    train = [
        *small,
        "runner.save_interval=1",
        f"runner.output_dir={run}",
        "runner.experiment_name=a",
        "env.eval.video_cfg.save_video=false",
    ]
    launch.run(config_of(*train, "runner.max_steps=1"))
    given = [f"{key}={run / 'a'}", "model=mlp", *(["collect.policy=model"] if key == "runner.init_from" else [])]
    given += ["collect.max_episode_steps=10", "collect.max_attempts=1", "collect.keep_failures=true"]
    launch.run(config(tmp_path, *given))
    [first] = run.glob("a/*/checkpoints/global_step_1")
    config(tmp_path, *given, "collect.episodes_per_task=5")
    launch.run(config_of(*train, "runner.max_steps=2", "runner.resume_dir=auto"))
    with pytest.raises(ConfigError, match=rf"other settings: {key} was {first}, now .*global_step_2. Set them as"):
        config(tmp_path, *given, "collect.episodes_per_task=5")
    [folder] = run.glob("a/*")
    moved = folder.rename(tmp_path / "moved") / first.relative_to(folder)
    launch.run(config(tmp_path, *given[1:], f"{key}={moved}", "collect.episodes_per_task=5"))
    assert Demonstrations(tmp_path / "data", chunk=4, successes_only=False).num_episodes == 4 * 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowParams:
    pace: float = 0.5


class SlowExpert(DummyExpert):
    """Another way of playing, with an option."""

    Params = SlowParams

    def __init__(self, env: SimEnv, params: SlowParams) -> None:
        super().__init__(env)


def test_a_folder_keeps_to_its_expert(tmp_path: Path) -> None:
    launch.run(config(tmp_path))
    slow = f"collect.expert={__name__}:SlowExpert"
    with pytest.raises(ConfigError, match=r"played with other settings: collect.expert was None, now .*SlowExpert"):
        config(tmp_path, slow)
    launch.run(config(tmp_path / "slow", slow))
    with pytest.raises(ConfigError, match=r"collect.expert_params was {}, now {'pace': 0.3}"):
        config(tmp_path / "slow", slow, "collect.expert_params.pace=0.3")


def test_a_folder_of_before_there_was_a_choice_has_the_envs_own_expert(tmp_path: Path) -> None:
    launch.run(config(tmp_path))
    record = tmp_path / "data" / CONFIG
    before = yaml.safe_load(record.read_text())
    del before["collect"]["expert"], before["collect"]["expert_params"]
    record.write_text(yaml.safe_dump(before))
    config(tmp_path)
    with pytest.raises(ConfigError, match=r"collect.expert was None, now .*SlowExpert"):
        config(tmp_path, f"collect.expert={__name__}:SlowExpert")


@pytest.mark.slow
@pytest.mark.xdist_group("simulator")
def test_libero(tmp_path: Path) -> None:
    pytest.importorskip("libero")
    launch.run(
        config(
            tmp_path,
            "env.task_ids=[0]",
            "collect.episodes_per_task=1",
            env=[
                "env=libero_spatial",
                "env.init_params.camera_heights=64",
                "env.init_params.camera_widths=64",
                "env.init_params.draft=true",
            ],
        )
    )
    read = Demonstrations(tmp_path / "data", chunk=8)
    assert read.cameras == {"agentview": (64, 64), "wrist": (64, 64)}
    assert (read.state_dim, read.action_dim, read.num_episodes) == (8, 7, 1)
