"""Whole runs of ``task=dagger``, and takeovers of ``task=collect``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.cli import config_of
from embodied_rl.contracts import EnvObs
from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.demonstrations.plan import plan
from embodied_rl.demonstrations.play import play
from embodied_rl.envs.dummy import DummyEnv, DummyExpert, DummyParams
from embodied_rl.errors import CheckpointError, ConfigError, UserError
from embodied_rl.launch import run
from embodied_rl.schema import CollectConfig, DaggerConfig
from embodied_rl.tasks.planning import plan_of
from embodied_rl.workers import collector
from embodied_rl.workers.players import model_policy
from tests.checkpoints.saved import saved_weights
from tests.configs import embodied, embodied_sft, tiny_run
from tests.demonstrations.recording import record
from tests.test_end_to_end import metrics_of, only_run

CHUNK = 8
QUICK = (
    "cluster=serial",
    "data.batch_size=64",
    "actor.global_batch_size=32",
    "runner.max_steps=9",
    "runner.val_check_interval=-1",
    "runner.eval_at_end=false",
    "runner.save_interval=3",
    "dagger.interval=3",
    "dagger.rounds=2",
    "dagger.episodes_per_task=2",
    "dagger.takeover_after=[2,6]",
    "dagger.max_episode_steps=32",
)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("data"), range(20, 256, 32))


def dagger(directory: Path, data: Path, *overrides: str) -> DaggerConfig:
    config = config_of(
        "task=dagger",
        "env=dummy",
        "model=mlp",
        f"data.path={data}",
        "runner.report=false",
        "env.eval.video_cfg.save_video=false",
        "cluster.num_threads.actor=1",
        f"runner.output_dir={directory / 'results'}",
        "runner.logger.logger_backends=[jsonl]",
        *QUICK,
        *overrides,
    )
    assert isinstance(config, DaggerConfig)
    return config


def finished(config: DaggerConfig) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What a run logged, and its last weights."""
    run(config)
    return metrics_of(only_run(config)), saved_weights(only_run(config) / "checkpoints/global_step_9")


def assert_same(left: tuple[Any, dict[str, torch.Tensor]], right: tuple[Any, dict[str, torch.Tensor]]) -> None:
    assert left[0] == right[0]
    assert all(torch.equal(tensor, right[1][name]) for name, tensor in left[1].items())


def test_a_round_holds_what_the_expert_does_where_the_model_leads(tmp_path: Path, few: Path) -> None:
    """Played again by hand: the checkpoint's median actions, chunk by chunk, and from the takeover on the expert's."""
    config = dagger(tmp_path, few, "dagger.expert_noise=false")
    run(config)
    root = only_run(config)
    env = DummyEnv(1, DummyParams(), seed=0)
    expert, tasks = DummyExpert(env), {task: range(64 * task, 64 * task + 64) for task in range(4)}
    for number in (1, 2):
        jobs = plan(tasks, config.dagger, {}, first=2 * (number - 1))
        policy = model_policy(config.model, env, root / f"checkpoints/global_step_{3 * number}", 0).eval()
        read = Demonstrations(root / f"dagger/round_{number:03d}", chunk=1)
        obs, actions, _ = read.sample(range(read.num_frames))
        frame, levels = 0, []
        assert len({attempt.takeover for job in jobs for attempt in job.attempts}) > 1
        for attempt in [job.attempts[0] for job in jobs]:
            assert attempt.reset_state_id % 64 in (20 + 2 * (number - 1), 21 + 2 * (number - 1))
            env.reset([0], [attempt.reset_state_id])
            succeeded = any(
                env.step([0], action[None]).success[0] for action in chosen(policy, env, attempt.takeover, attempt)
            )
            expert.reset(0)
            if not succeeded:
                levels.append(env._start_distance[0] - env._distance(np.array([0]))[0])
            while not succeeded:
                seen, action = env.observe([0]), expert.act(0, None)
                assert obs.state[frame].tolist() == seen.state[0].tolist()
                assert actions[frame, 0].tolist() == action.tolist()
                frame += 1
                succeeded = env.step([0], action[None]).success[0]
        assert frame == read.num_frames > 0
        records = DataSet.open(root / f"dagger/round_{number:03d}").episodes()
        assert [record["start_level"] for record in records] == pytest.approx(levels)
        assert max(map(abs, levels)) > 0.1
    logged = [line for line in metrics_of(root) if "dagger/round" in line]
    assert [(line["dagger/round"], line["dagger/success"]) for line in logged] == [(1.0, 1.0), (2.0, 1.0)]
    base = Demonstrations(few, chunk=1).num_frames
    new = [line["dagger/new_frames"] for line in logged]
    assert [line["dagger/frames"] for line in logged] == [base + new[0], base + sum(new)]


def chosen(policy: Any, env: DummyEnv, steps: int, attempt: Any) -> Iterator[np.ndarray]:
    """The policy's actions until the takeover, decided as it goes."""
    left: list[np.ndarray] = []
    for _ in range(steps):
        if not left:
            seen = env.observe([0])
            obs = EnvObs(
                env_ids=torch.zeros(1, dtype=torch.int64),
                images={},
                state=torch.from_numpy(seen.state),
                instructions=(env.task(attempt.reset_state_id).instruction,),
            )
            with torch.inference_mode():
                left = list(
                    policy.act(obs, greedy=True, temperature=1.0, generator=None).actions[0].clip(-1, 1).numpy()
                )
        yield left.pop(0)


@pytest.mark.parametrize(
    "options",
    [
        ("data.prefetch=0",),
        ("cluster.component_placement={actor: 0, rollout: 0, env: 0, collector: 0-2}",),
    ],
    ids=str,
)
def test_neither_reading_ahead_nor_the_number_of_collectors_matters(
    tmp_path: Path, few: Path, options: tuple[str, ...]
) -> None:
    assert_same(finished(dagger(tmp_path / "a", few)), finished(dagger(tmp_path / "b", few, *options)))


@pytest.mark.slow
def test_processes_do_what_one_does(tmp_path: Path, few: Path) -> None:
    options = ("cluster=process", "cluster.component_placement={actor: 0, rollout: 0-1, env: 0-1, collector: 0-1}")
    assert_same(finished(dagger(tmp_path / "a", few)), finished(dagger(tmp_path / "b", few, *options)))


@pytest.mark.parametrize(
    ("episodes", "options"),
    [(3, ()), (11, ("data.weights=[3,1]",))],
    ids=["in the first round", "in the second, with shares"],
)
def test_a_run_interrupted_in_a_round_is_the_run_that_never_stopped(
    tmp_path: Path, few: Path, monkeypatch: pytest.MonkeyPatch, episodes: int, options: tuple[str, ...]
) -> None:
    whole = finished(dagger(tmp_path / "a", few, *options))
    played: list[int] = []

    def limited(sim: Any, reset_state_id: int, *rest: Any, **options: Any) -> Any:
        if len(played) == episodes:
            raise KeyboardInterrupt
        played.append(reset_state_id)
        return play(sim, reset_state_id, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(collector, "play", limited)
        with pytest.raises(KeyboardInterrupt):
            run(dagger(tmp_path / "b", few, *options))
    assert_same(whole, finished(dagger(tmp_path / "b", few, *options, "runner.resume_dir=auto")))


def test_from_an_earlier_checkpoint_later_rounds_are_played_again(
    tmp_path: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dagger(tmp_path, few)
    whole = finished(config)
    first = only_run(config) / "checkpoints/global_step_3"
    before = {path: path.stat().st_mtime_ns for path in (only_run(config) / "dagger").glob("*/data/*/*")}
    metrics, weights = finished(dagger(tmp_path, few, f"runner.resume_dir={first}"))
    assert "round_002: of a later step than global_step_3, it will be played again" in " ".join(
        capsys.readouterr().out.split()
    )
    after = {path: path.stat().st_mtime_ns for path in (only_run(config) / "dagger").glob("*/data/*/*")}
    assert [path.parents[2].name for path in after if after[path] == before[path]] == ["round_001"]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole[1].items())
    assert metrics[-1] == whole[0][-1]


def elsewhere(config: DaggerConfig, step: int, folder: Path) -> Path:
    """A copy of a run's checkpoint, in ``folder``."""
    name = f"global_step_{step}"
    return Path(shutil.copytree(only_run(config) / "checkpoints" / name, folder / name))


def test_a_round_may_be_due_right_after_a_checkpoint_from_elsewhere(tmp_path: Path, few: Path) -> None:
    config = dagger(tmp_path / "a", few)
    whole = finished(config)
    copied = elsewhere(config, 3, tmp_path)
    again = dagger(tmp_path / "b", few, f"runner.resume_dir={copied}")
    metrics, weights = finished(again)
    assert metrics == whole[0][3:] and [line["dagger/round"] for line in metrics if "dagger/round" in line] == [1, 2]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole[1].items())
    assert (only_run(again) / "checkpoints/global_step_3").exists(), "the new run goes on by itself"


def test_a_checkpoint_without_the_rounds_before_it_is_refused(tmp_path: Path, few: Path) -> None:
    config = dagger(tmp_path / "a", few)
    whole = finished(config)
    copied = elsewhere(config, 6, tmp_path)
    words = (
        rf"global_step_6: expected the rounds .* in {re.escape(str(tmp_path / 'b'))}.*/dagger, which lacks round_001\. "
        r".* as <folder>/checkpoints/global_step_6 .* as <folder>/dagger; .* a checkpoint of step 3 or earlier"
    )
    with pytest.raises(CheckpointError, match=words):
        run(dagger(tmp_path / "b", few, f"runner.resume_dir={copied}"))
    copied = elsewhere(config, 6, tmp_path / "moved/checkpoints")
    shutil.copytree(only_run(config) / "dagger", tmp_path / "moved/dagger")
    run(dagger(tmp_path / "c", few, f"runner.resume_dir={copied}"))
    weights = saved_weights(tmp_path / "moved/checkpoints/global_step_9")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole[1].items())


def test_a_round_that_kept_nothing_is_not_missed(tmp_path: Path, few: Path) -> None:
    """The expert has no time to succeed in any."""
    short = ("dagger.takeover_after=[1,1]", "dagger.max_episode_steps=2", "dagger.rounds=1", "dagger.max_attempts=1")
    config = dagger(tmp_path, few, *short)
    run(config)
    [line] = [line for line in metrics_of(only_run(config)) if "dagger/round" in line]
    assert line["dagger/new_frames"] == 0
    middle = f"runner.resume_dir={only_run(config) / 'checkpoints/global_step_6'}"
    run(dagger(tmp_path, few, *short, middle))
    shutil.rmtree(only_run(config) / "dagger/round_001")
    with pytest.raises(CheckpointError, match="which lacks round_001"):
        run(dagger(tmp_path, few, *short, middle))


def test_a_round_may_have_bursts_of_noise(tmp_path: Path, few: Path) -> None:
    bursts = ("dagger.noise=0.5", "dagger.noise_bursts=[2,4]", "dagger.takeover_after=[0,1]", "dagger.beta=1")
    config = dagger(tmp_path, few, *bursts, "runner.max_steps=4", "dagger.rounds=1")
    run(config)
    root = only_run(config) / "dagger/round_001"
    disturbed = DataSet.open(root).column("disturbed")
    assert 0 < disturbed.sum() < len(disturbed)
    assert Demonstrations(root, chunk=4).num_frames == (~disturbed).sum()


def test_a_round_says_what_noise_was_executed(tmp_path: Path, few: Path) -> None:
    """So that nobody takes its actions for those that led to its rewards."""
    config = dagger(tmp_path, few, "dagger.noise=0.05", "runner.max_steps=4", "dagger.rounds=1")
    run(config)
    root = only_run(config) / "dagger/round_001"
    assert [played["noise"] for played in json.loads((root / "meta/provenance.json").read_text())] == [0.05]
    with pytest.raises(ConfigError, match=r"algorithm\.replay\.demonstrations=.*/round_001: .* noise of 0\.05 "):
        plan_of(embodied("env=dummy", "model=sac_mlp", "algorithm=rlpd", f"algorithm.replay.demonstrations={root}"))


def test_too_few_initial_states_are_known_before_any_step(tmp_path: Path, few: Path) -> None:
    with pytest.raises(UserError, match=r"dagger.skip_states: got 20, but task 0 has 20 initial states"):
        run(dagger(tmp_path, few, "env.init_params.states_per_task=20", "env.eval.episodes_per_task=2"))
    assert not list(tmp_path.rglob("global_step_*"))


def test_demonstrations_from_evaluated_states_are_told(
    tmp_path: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = ("runner.max_steps=2", "dagger.interval=1", "dagger.rounds=1")
    for evaluated, told in ((20, False), (21, True)):
        run(dagger(tmp_path, few, *once, f"env.eval.episodes_per_task={evaluated}"))
        said = " ".join(capsys.readouterr().out.split())
        assert ("to leave all of those alone set dagger.skip_states=21" in said) is told


def test_the_expert_alone_with_beta_1(tmp_path: Path, few: Path) -> None:
    """Then a round is as long as whole demonstrations are."""
    config = dagger(tmp_path, few, "dagger.beta=1.0", "runner.max_steps=4")
    run(config)
    [line] = [line for line in metrics_of(only_run(config)) if "dagger/round" in line]
    lengths = [e["length"] for e in DataSet.open(only_run(config) / "dagger/round_001").episodes()]
    assert line["dagger/new_frames"] == sum(lengths)
    assert len(lengths) == 8
    shares = [
        sum(
            attempt.takeover > 0
            for job in plan({0: range(1000)}, config.dagger, {}, alone=alone)
            for attempt in job.attempts
        )
        for alone in (0.0, 1.0)
    ]
    assert shares[0] > 0 == shares[1]


def test_a_trained_policy_may_be_the_teacher(tmp_path: Path, few: Path) -> None:
    """Of another model and chunk length than the learner's; its median actions are what is recorded."""
    teacher = embodied_sft(
        few,
        "cluster=serial",
        "model.num_action_chunks=4",
        "data.batch_size=256",
        "runner.max_steps=60",
        "actor.optim.lr=3e-3",
        "runner.val_check_interval=-1",
        "runner.eval_at_end=false",
        "runner.save_interval=60",
        f"runner.output_dir={tmp_path / 'teacher'}",
    )
    run(teacher)
    checkpoint = only_run(teacher) / "checkpoints/global_step_60"
    config = dagger(tmp_path, few, f"dagger.teacher={only_run(teacher)}", "runner.max_steps=4", "dagger.max_attempts=4")
    run(config)
    root = only_run(config) / "dagger/round_001"
    provenance = json.loads((root / "meta/provenance.json").read_text())
    assert provenance[0]["weights"].endswith("global_step_3")
    env = DummyEnv(1, DummyParams(), seed=0)
    policy = model_policy(teacher.model, env, checkpoint, 0).eval()
    read = Demonstrations(root, chunk=1)
    obs, actions, _ = read.sample(range(read.num_frames))
    firsts = np.flatnonzero(np.diff(obs.env_ids.numpy(), prepend=-1))
    with torch.inference_mode():
        expected = policy.act(
            EnvObs(
                env_ids=obs.env_ids[firsts],
                images={},
                state=obs.state[firsts],
                instructions=tuple(obs.instructions[i] for i in firsts),
            ),
            greedy=True,
            temperature=1.0,
            generator=None,
        ).actions[:, 0]
    assert torch.allclose(actions[firsts, 0], expected.clip(-1, 1), atol=1e-6)


def test_a_large_enough_set_of_takeovers_is_a_data_set_for_anybody(tmp_path: Path, few: Path) -> None:
    """``task=collect`` with takeovers, then ``task=sft`` on both sets together."""
    base = embodied_sft(
        few, *(o for o in QUICK if not o.startswith("dagger")), f"runner.output_dir={tmp_path / 'base'}"
    )
    run(base)
    config = config_of(
        "task=collect",
        "env=dummy",
        "model=mlp",
        "cluster=serial",
        f"runner.init_from={only_run(base)}",
        "collect.takeover_after=[3,3]",
        "collect.episodes_per_task=2",
        f"collect.path={tmp_path / 'data'}",
        f"runner.output_dir={tmp_path / 'results'}",
    )
    assert isinstance(config, CollectConfig)
    run(config)
    lengths = [e["length"] for e in DataSet.open(tmp_path / "data").episodes()]
    whole = [e["length"] for e in DataSet.open(few).episodes()]
    assert len(lengths) == 8
    assert np.mean(lengths) > 0
    both = embodied_sft(
        few,
        *(o for o in QUICK if not o.startswith("dagger")),
        f"data.path=[{few},{tmp_path / 'data'}]",
        f"runner.output_dir={tmp_path / 'both'}",
    )
    run(both)
    last = metrics_of(only_run(both))[-1]
    assert last["data/epoch"] == pytest.approx(9 * 64 / (sum(whole) + sum(lengths)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("dagger.takeover_after=[9,3]",),
            r"dagger.takeover_after: got \[9, 3\], expected two numbers of control steps",
        ),
        (("dagger.takeover_after=[3,32]",), r"below dagger.max_episode_steps=32"),
        (("dagger.interval=9",), "before the first round; use task=sft"),
        (("dagger.teacher=/nowhere",), "dagger.teacher=/nowhere: no such directory"),
        (("runner.save_contents=[optimizer]",), "every round begins with a checkpoint whose model plays"),
        (("dagger.expert=nobody",), "nobody"),
    ],
    ids=str,
)
def test_mistakes(tmp_path: Path, few: Path, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dagger(tmp_path, few, *options)


def test_an_env_without_an_expert(tmp_path: Path, few: Path) -> None:
    words = r"dagger.expert: no scripted expert plays .*Or let a trained model play: dagger.teacher=<checkpoint>"
    with pytest.raises(ConfigError, match=words):
        dagger(tmp_path, few, "env=robosuite_lift")


def test_a_takeover_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collect.takeover_after=\[1, 2\]: no weights are given"):
        config_of("task=collect", "env=dummy", "collect.takeover_after=[1,2]")


def test_it_is_evaluated_as_any_policy(tmp_path: Path, few: Path) -> None:
    config = dagger(tmp_path, few)
    run(config)
    shutil.rmtree(only_run(config) / "dagger")  # an evaluation needs no demonstrations
    checkpoint = only_run(config) / "checkpoints/global_step_9"
    evaluated = dagger(
        tmp_path / "eval",
        few,
        f"runner.resume_dir={checkpoint}",
        "runner.only_eval=true",
        "env.eval.episodes_per_task=2",
        "env.eval.total_num_envs=8",
    )
    run(evaluated)
    assert (only_run(evaluated) / "eval_step_000009/eval.json").exists()


@pytest.mark.slow
def test_reinforcement_learning_goes_on_from_it(tmp_path: Path, few: Path) -> None:
    config = dagger(tmp_path, few)
    run(config)
    rl = tiny_run(
        tmp_path / "rl", "model=mlp", "cluster=serial", f"runner.init_from={only_run(config)}", "runner.max_steps=1"
    )
    run(rl)
    assert len(metrics_of(only_run(rl))) >= 1


class Mortal(DummyExpert):
    """Kills its process once in the run."""

    def reset(self, slot: int) -> None:
        super().reset(slot)
        marker = Path(os.environ["MORTAL"])
        if not marker.exists() and next(marker.parent.glob("results/*/*/dagger/round_002"), None):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_collector_that_dies_is_a_failure_to_recover_from(
    tmp_path: Path, few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "a/died"))
    options = ("cluster=process", f"dagger.expert={__name__}:Mortal", "runner.recover=auto")
    died = finished(dagger(tmp_path / "a", few, *options))
    assert (tmp_path / "a/died").exists()
    monkeypatch.setenv("MORTAL", str(tmp_path / "b/died"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/died").touch()
    assert_same(died, finished(dagger(tmp_path / "b", few, *options)))
