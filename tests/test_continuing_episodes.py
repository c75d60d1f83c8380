"""Episodes that go on over training steps, in whole runs: what the metrics say of them and what a checkpoint holds."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.envs.base import SimStep
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.envs.open_episodes import EnvState, read
from embodied_rl.launch import run
from embodied_rl.runtime.signals import Terminated
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.embodied.run import reportable
from embodied_rl.tasks.embodied.settings import changes, settings_of
from embodied_rl.workers.env import EnvWorker
from tests.configs import embodied, tiny_run
from tests.test_end_to_end import metrics_of, only_run

HORIZON, ROLLOUT, ENVS = 40, 8, 16
SERIAL = "cluster=serial"
EVERY_STEP = ("runner.save_interval=1", "runner.max_keep=null")


def going_on(directory: Path, *overrides: str) -> EmbodiedConfig:
    """Forty steps an episode, eight a training step; some succeed."""
    return tiny_run(
        directory,
        "algorithm=ppo",
        "env.train.auto_reset=true",
        f"env.train.max_episode_steps={HORIZON}",
        f"env.train.max_steps_per_rollout_epoch={ROLLOUT}",
        f"env.train.total_num_envs={ENVS}",
        "++env.init_params.success_radius=0.3",
        "++env.init_params.step_size=0.4",
        "runner.eval_at_end=false",
        *overrides,
    )


def saved(config: EmbodiedConfig, step: int) -> EnvState:
    state = read(only_run(config) / f"checkpoints/global_step_{step}")
    assert state is not None
    return state


def steps_held(state: EnvState) -> int:
    """Simulator steps in episodes that are in no metric yet."""
    return sum(len(e.actions) for e in state.episodes) + sum(r.episode_length for r in state.unreported)


def check_sums(config: EmbodiedConfig, step: int) -> None:
    """Every simulator step up to ``step`` is in an episode that the metrics have, or in the checkpoint."""
    lines = metrics_of(only_run(config))[:step]
    reported = sum(round(line["env/episodes"] * line.get("env/episode_len", 0)) for line in lines)
    assert reported + steps_held(saved(config, step)) == sum(line["env/steps"] for line in lines)


def test_failures_are_counted_and_each_episode_once(tmp_path: Path) -> None:
    config = going_on(tmp_path, SERIAL, "actor.optim.lr=1e-6", "runner.max_steps=10", *EVERY_STEP)
    run(config)
    lines = metrics_of(only_run(config))
    told = [line for line in lines if line["env/episodes"]]
    assert told[0]["step"] == HORIZON // ROLLOUT, "not before the slowest env's first episode ended"
    assert all(0.05 < line["env/success_once"] < 0.95 for line in told)
    assert all(line["env/episodes"] >= ENVS for line in told)
    assert all("env/success_once" not in line for line in lines if not line["env/episodes"])
    assert all(line["env/unfinished"] == ENVS for line in lines)
    for step in range(1, 11):
        check_sums(config, step)


def test_checkpoints_older_than_a_key_go_on_where_it_does_nothing(tmp_path: Path) -> None:
    assert "env.train.stagger" not in settings_of(going_on(tmp_path))
    assert settings_of(going_on(tmp_path, "env.train.stagger=true"))["env.train.stagger"] is True


def test_rollouts_of_whole_episodes_tell_of_each_at_once(tmp_path: Path) -> None:
    config = going_on(tmp_path, SERIAL, "env.train.max_steps_per_rollout_epoch=48", "runner.max_steps=2")
    run(config)
    assert all(line["env/episodes"] >= ENVS for line in metrics_of(only_run(config)))


@pytest.mark.parametrize("ended", [[0, 0, 1], [0, 1, 2, 3], []])
def test_which_episodes_say_something_of_all_envs(ended: list[int]) -> None:
    records = [
        EpisodeRecord(
            env_id=env_id,
            task_id=0,
            instruction="",
            reset_state_id=0,
            success=True,
            episode_return=1.0,
            episode_length=1,
        )
        for env_id in ended
    ]
    assert reportable(records, num_envs=4) == (len(set(ended)) == 4)


def test_a_run_that_is_terminated_saves_where_its_last_step_left_the_envs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step's rollout has begun, or is over and waits for its update."""
    original = EnvWorker.interact
    calls = iter(range(1, 100))

    @functools.wraps(original)
    async def interrupted(*args: object, **kwargs: object) -> object:
        report = await original(*args, **kwargs)  # type: ignore[arg-type]
        if next(calls) == 6:  # two env workers
            os.kill(os.getpid(), signal.SIGTERM)
        return report

    monkeypatch.setattr(EnvWorker, "interact", interrupted)
    options = (SERIAL, "runner.max_steps=4", "runner.save_interval=10")
    config = going_on(tmp_path, *options)
    with pytest.raises(Terminated):
        run(config)
    monkeypatch.undo()
    check_sums(config, 2)
    run(going_on(tmp_path, *options, "runner.resume_dir=auto"))
    whole = going_on(tmp_path, *options, "runner.experiment_name=whole")
    run(whole)
    assert metrics_of(only_run(config)) == metrics_of(only_run(whole))


def test_other_settings_start_new_episodes_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (SERIAL, "runner.save_interval=1", "runner.max_keep=null")
    config = going_on(tmp_path, *options, "runner.max_steps=7")
    run(config)
    numbers = [e.number for e in saved(config, 7).episodes]
    more = going_on(tmp_path, *options, "runner.max_steps=8", "runner.resume_dir=auto", "env.train.total_num_envs=32")
    capsys.readouterr()
    run(more)
    said = " ".join(capsys.readouterr().out.split())
    assert "every env starts a new episode" in said
    assert "env.train.total_num_envs: 16 -> 32" in said
    state = saved(more, 8)
    assert len(state.episodes) == 32
    assert min(e.number for e in state.episodes) > max(numbers), "no initial states are drawn again"


def test_what_changes_no_episode_makes_no_new_ones(tmp_path: Path) -> None:
    config = embodied("env=libero_10", "++env.init_params.max_cached_scenes=2", "++env.init_params.render_width=64")
    settings = settings_of(config)
    assert changes(settings, embodied("env=libero_10")) == []
    [changed] = changes(settings, embodied("env=libero_10", "++env.init_params.drawn_states=7"))
    assert changed.startswith("env.init_params: ")
    assert "'drawn_states': 7" in changed
    assert "render_width" not in changed


def test_a_checkpoint_without_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (SERIAL, "runner.save_interval=1")
    whole = ("env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=null")
    run(going_on(tmp_path, *options, *whole, "runner.max_steps=1"))
    capsys.readouterr()
    config = going_on(tmp_path, *options, "runner.max_steps=2", "runner.resume_dir=auto")
    run(config)
    assert "global_step_1 was saved without env.train.auto_reset" in " ".join(capsys.readouterr().out.split())
    assert len(saved(config, 2).episodes) == ENVS


def test_a_simulator_that_goes_elsewhere_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (SERIAL, "runner.save_interval=1", "++env.init_params.success_radius=0.01")
    run(going_on(tmp_path, *options, "runner.max_steps=1"))
    monkeypatch.setattr(DummyEnv, "step", other_step(DummyEnv.step))
    capsys.readouterr()
    run(going_on(tmp_path, *options, "runner.max_steps=2", "runner.resume_dir=auto"))
    assert f"{ENVS} of {ENVS} envs did not come to the very state" in " ".join(capsys.readouterr().out.split())


def other_step(step: Callable[..., SimStep]) -> Callable[..., SimStep]:
    """A step of the dummy env that another machine has rounded."""

    def rounded(env: DummyEnv, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        return step(env, slots, actions * np.float32(1 + 1e-5))

    return rounded


@pytest.mark.slow
def test_rollouts_that_run_ahead_of_a_checkpoint_are_not_in_it(tmp_path: Path) -> None:
    options = ["rollout.max_staleness=2", "algorithm.update_epoch=8", "runner.save_interval=1", "runner.max_keep=null"]
    for asynchronous in ("true", "false"):
        directory = tmp_path / asynchronous
        config = going_on(directory, *options, "runner.max_steps=8", f"runner.save_async={asynchronous}")
        run(config)
        assert max(line["actor/staleness"] for line in metrics_of(only_run(config))) > 0
        for step in range(1, 9):
            check_sums(config, step)
    run(going_on(directory, *options, "runner.max_steps=10", "runner.resume_dir=auto"))
    check_sums(config, 10)
