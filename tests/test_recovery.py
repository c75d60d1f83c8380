"""Runs that lose env workers go on, and come to what they would have come to."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.envs.base import SimStep
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.launch import run
from embodied_rl.runtime import signals
from embodied_rl.runtime.memory import GIB, held
from embodied_rl.runtime.worker import WorkerError, WorkersLost
from embodied_rl.tasks.embodied.recovery import RolloutCalls
from tests.configs import config_of, tiny_run
from tests.test_end_to_end import metrics_of, only_run

pytestmark = pytest.mark.timeout(300)
AUTO_RESET = ("algorithm=ppo", "env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=8")
OFFLOAD = ("env.train.enable_offload=true", "env.eval.enable_offload=true")
TOGETHER = ("runner.max_steps=3", "runner.save_interval=-1", "runner.logger.logger_backends=[console,jsonl]")


class Accident(DummyEnv):
    """Has an accident in one step of the run: what, and at which step of a worker, says an environment variable."""

    _taken = 0

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        cls = type(self)
        cls._taken += 1
        kind, at, marker = os.environ["ACCIDENT"].split(",")
        if cls._taken == int(at):
            try:
                Path(marker).touch(exist_ok=kind == "again")
            except FileExistsError:  # the other worker had it, or the one before
                return super().step(slots, actions)
            accidents: dict[str, Callable[[], object]] = {
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "exit": lambda: os._exit(3),
                "hang": lambda: time.sleep(1000),
                "raise": lambda: 1 / 0,
                "again": lambda: 1 / 0,
            }
            accidents[kind]()
        return super().step(slots, actions)


class Leaking(DummyEnv):
    """From so many resets of a process on it holds half a GiB more than it should."""

    _resets, _leaked = 0, None

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        cls = type(self)
        cls._resets += 1
        if cls._resets >= int(os.environ["LEAKS_AT"]) and cls._leaked is None:
            cls._leaked = np.ones(2**29, dtype=np.uint8)
        super().reset(slots, reset_state_ids)


class Unequal(DummyEnv):
    """Of two workers the first is slow. The other dies as often as an environment variable says, once the first has
    played a rollout's twelve epochs."""

    _taken = 0

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        self._slow = self.task(reset_state_ids[0]).task_id < 2
        super().reset(slots, reset_state_ids)

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        cls = type(self)
        losses, folder = os.environ["LOSSES"].split(",")
        cls._taken += 1
        if self._slow:
            time.sleep(0.03)
            if cls._taken == 12 * 4:
                (Path(folder) / "played").touch()
        elif (had := len(list(Path(folder).glob("loss_*")))) < int(losses):
            while not (Path(folder) / "played").exists():
                time.sleep(0.01)
            time.sleep(0.5)  # in which the actor gets it
            (Path(folder) / f"loss_{had}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(slots, actions)


def outcome(tmp_path: Path, name: str, *options: str, losses: int = 1) -> list[dict[str, float]]:
    env_type = f"env.env_type={__name__}:Accident"
    config = tiny_run(tmp_path, env_type, f"runner.experiment_name={name}", *TOGETHER, *options)
    run(config)
    metrics = metrics_of(only_run(config))
    restarts = [step.pop("env/restarts", 0.0) for step in metrics]
    assert max(restarts) <= losses * (name == "disturbed")
    return metrics


def undisturbed(tmp_path: Path, *options: str) -> list[dict[str, float]]:
    """In one process, which is quicker to start and logs the same."""
    read = [option for option in options if not option.startswith("env.worker_timeout")]
    return outcome(tmp_path, "undisturbed", *read, "cluster=serial")


@pytest.mark.parametrize(
    ("kind", "at", "options"),
    [
        ("kill", 50, ()),
        ("kill", 100, ()),
        ("raise", 10, ("rollout.pipeline_stage_num=1",)),
        ("hang", 40, ("env.worker_timeout=15",)),
        ("exit", 24, AUTO_RESET),
        ("kill", 40, (*AUTO_RESET, *OFFLOAD)),
        ("kill", 52, ("algorithm.rollout_epoch=2",)),
        ("kill", 50, ("cluster.component_placement={env: 0-1, rollout: 0-1, actor: 0}",)),
        ("raise", 30, ("model.lora.rank=2",)),
    ],
    ids=str,
)
def test_a_lost_worker_is_replaced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    at: int,
    options: tuple[str, ...],
) -> None:
    monkeypatch.setenv("ACCIDENT", f"{kind},{at},{tmp_path / 'happened'}")
    disturbed = outcome(tmp_path, "disturbed", *options)
    assert (tmp_path / "happened").exists()
    said = " ".join(capsys.readouterr().out.split())
    assert "replaced; its rollout is made again" in said
    words = {"kill": "SIGKILL", "exit": "exit status 3", "hang": "hung: no sign of life", "raise": "ZeroDivisionError"}
    assert words[kind] in said
    assert disturbed == undisturbed(tmp_path, *options), "as if nothing had happened"


@pytest.mark.parametrize("losses", [1, 2])
def test_a_worker_is_replaced_where_another_has_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    """The actor has all that it waits for before the slow worker's rollout has been made again."""
    options = (
        f"env.env_type={__name__}:Unequal",
        "algorithm=ppo",
        "algorithm.rollout_epoch=12",
        "cluster.component_placement={env: 0-1, rollout: 0-1, actor: 0}",
        "rollout.pipeline_stage_num=1",
        "env.train.total_num_envs=4",
        "env.train.max_episode_steps=4",
        "runner.eval_at_end=false",
        "runner.max_steps=2",
    )
    monkeypatch.setenv("LOSSES", f"{losses},{tmp_path}")
    disturbed = outcome(tmp_path, "disturbed", *options, "cluster.stall_timeout=60", losses=losses)
    assert len(list(tmp_path.glob("loss_*"))) == losses
    monkeypatch.setenv("LOSSES", f"0,{tmp_path}")
    assert disturbed == undisturbed(tmp_path, *options)


@pytest.mark.parametrize("options", [(), AUTO_RESET], ids=str)
def test_a_run_that_was_resumed_replaces_workers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    options = (*options, "runner.save_interval=1", "runner.eval_at_end=false")
    monkeypatch.setenv("ACCIDENT", f"kill,0,{tmp_path / 'happened'}")
    outcome(tmp_path, "disturbed", *options, "runner.max_steps=1", "cluster=serial")
    monkeypatch.setenv("ACCIDENT", f"kill,10,{tmp_path / 'happened'}")
    disturbed = outcome(tmp_path, "disturbed", *options, "runner.resume_dir=auto")
    assert (tmp_path / "happened").exists()
    assert disturbed == undisturbed(tmp_path, *options)


def test_a_run_that_was_resumed_with_other_settings_keeps_its_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its envs begin behind the episodes that the run has had, and so do those that take their place."""
    options = (*AUTO_RESET, "runner.save_interval=1", "runner.eval_at_end=false")
    resumed = (*options, "runner.resume_dir=auto", "++env.init_params.step_size=0.4")
    monkeypatch.setenv("ACCIDENT", f"kill,0,{tmp_path / 'happened'}")
    for name in ("disturbed", "undisturbed"):
        outcome(tmp_path, name, *options, "runner.max_steps=1", "cluster=serial")
    monkeypatch.setenv("ACCIDENT", f"kill,10,{tmp_path / 'happened'}")
    disturbed = outcome(tmp_path, "disturbed", *resumed)
    assert (tmp_path / "happened").exists()
    assert "every env starts a new episode, as other settings make other ones" in capsys.readouterr().out
    assert disturbed == undisturbed(tmp_path, *resumed)


@pytest.mark.parametrize(
    "options",
    [
        ("env=dummy", "cluster=serial"),
        ("env=dummy", "rollout.max_staleness=1"),
        ("task=collect", "env=dummy"),
        ("env=dummy", "algorithm=ppo", "env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=8",
         "algorithm.filter_rewards=true", "algorithm.max_resample_rounds=1"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("key", ["env.max_restarts=3", "env.worker_timeout=9", "env.max_memory_gb=9"])
def test_the_keys_are_refused_where_nothing_reads_them(options: tuple[str, ...], key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key.partition('=')[0]}: this run would not read it, since env workers are"
    ):
        config_of(*options, key)


def test_the_same_failure_again_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCIDENT", f"again,20,{tmp_path / 'happened'}")
    with pytest.raises(WorkerError, match=r"ZeroDivisionError[\s\S]*\(again, in the same rollout\)"):
        outcome(tmp_path, "again")


@pytest.mark.cold_start  # a warm worker holds more
@pytest.mark.parametrize(
    ("leaks_at", "options"),
    [(5, ()), (5, (*AUTO_RESET, "runner.max_steps=6")), (5, ("runner.val_check_interval=2",))],
    ids=str,
)
def test_a_worker_that_grows_is_recycled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    leaks_at: int,
    options: tuple[str, ...],
) -> None:
    """Between rollouts, and the run is that of workers that do not grow. It counts as no restart."""
    leaks = (f"env.env_type={__name__}:Leaking", *options)
    monkeypatch.setenv("LEAKS_AT", str(leaks_at))
    recycled = outcome(tmp_path, "recycled", *leaks, "env.max_memory_gb=0.8", "env.max_restarts=1")
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"EnvGroup\[[01]\] held (0\.[89]|1\.)\d* GiB.*, more than env.max_memory_gb=0.8: replaced", said)
    assert [step.pop("env/recycled", 0.0) for step in recycled][-1] == 2
    monkeypatch.setenv("LEAKS_AT", "1000000")
    assert recycled == undisturbed(tmp_path, *leaks)


@pytest.mark.cold_start
def test_a_limit_below_what_a_simulator_needs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKS_AT", "1")
    words = r"env.max_memory_gb: got 0.8, but EnvGroup\[0\] held .* did so after a single rollout"
    with pytest.raises(UserError, match=words):
        outcome(tmp_path, "large", f"env.env_type={__name__}:Leaking", "env.max_memory_gb=0.8")


@pytest.mark.cold_start
def test_a_run_that_holds_more_than_it_may_ends_with_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is the test's process, which holds what other tests left: the limit is above that."""
    monkeypatch.setenv("LEAKS_AT", "3")
    limit = round(held(os.getpid()).resident / GIB + 1.2, 1)
    words = (
        rf"processes hold \d+\.\d+ GiB, more than cluster.memory_limit={limit:g}:\n"
        r"(  [^\n]*\n)*  EnvGroup\[\d\]: (0\.[5-9]|1\.)\d* GiB\n"
    )
    with pytest.raises(WorkerError, match=words):
        outcome(
            tmp_path, "over", f"env.env_type={__name__}:Leaking", f"cluster.memory_limit={limit}", "runner.max_steps=50"
        )


def test_a_signal_that_comes_while_a_worker_is_replaced_is_not_dropped() -> None:
    class Recovery:
        def recycle(self) -> None: ...

        def recover(self, lost: WorkersLost) -> None:
            with signals.deferred():
                signal.raise_signal(signal.SIGINT)

    def begin(again: bool) -> Any:
        raise WorkersLost("env[0] died")

    with pytest.raises(KeyboardInterrupt):
        RolloutCalls(begin, Recovery()).wait()  # type: ignore[arg-type]  # what it calls of one
