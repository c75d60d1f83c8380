"""When runs save: by steps, by time, while they go on, and when they are told to end."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from embodied_rl.checkpoints import store
from embodied_rl.checkpoints.shards import ShardWriter
from embodied_rl.checkpoints.store import complete_checkpoints, read_state, verify
from embodied_rl.errors import CheckpointError, UserError
from embodied_rl.evaluation.eval_file import evaluations_of
from embodied_rl.launch import run
from embodied_rl.runtime.signals import Terminated
from embodied_rl.tasks import saving
from embodied_rl.tasks.saving import CheckpointSaver
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker
from tests.checkpoints.saved import saved_tensors
from tests.configs import config_of, tiny_run
from tests.test_end_to_end import assert_equal, metrics_of, only_run

QUICK = ("cluster=serial", "runner.eval_at_end=false")


def steps(run_dir: Path) -> list[int]:
    """Of the whole checkpoints, which also are what was saved."""
    checkpoints = complete_checkpoints(run_dir / "checkpoints")
    for path in checkpoints:
        assert {"policy.json", "actor/shard_00001.safetensors"} <= verify(path).keys()
    return [read_state(path).step for path in checkpoints]


def test_an_asynchronous_save_is_the_same_checkpoint(tmp_path: Path) -> None:
    runs = []
    for name, asynchronous in (("plain", "false"), ("async", "true")):
        options = ["runner.max_steps=3", "runner.max_keep=2", f"runner.save_async={asynchronous}"]
        config = tiny_run(tmp_path, *QUICK, f"runner.experiment_name={name}", *options)
        run(config)
        runs.append(only_run(config))
        assert steps(runs[-1]) == [2, 3], "the last is complete when the run ends"
        assert not list((runs[-1] / "checkpoints").glob(".*"))
    for step in (2, 3):
        left, right = (saved_tensors(r / f"checkpoints/global_step_{step}") for r in runs)
        assert_equal(left, right)


def test_an_asynchronous_failure_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("embodied_rl.checkpoints.shards.ShardWriter.write_data", full)
    config = tiny_run(tmp_path, *QUICK, "runner.max_steps=1", "runner.save_async=true")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left on device"):
        run(config)
    assert steps(only_run(config)) == []


def test_saving_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 10))
    # 10 s pass between two looks at the clock.
    monkeypatch.setattr(
        saving, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), perf_counter=time.perf_counter)
    )
    options = ("runner.save_interval=-1", "runner.max_steps=5", "runner.max_keep=null")
    config = tiny_run(tmp_path, *QUICK, *options, "runner.save_interval_seconds=20")
    run(config)
    # A look a step: 10 s, 20 s and a save, which looks too, and so on; the last step is saved in any case.
    assert steps(only_run(config)) == [2, 4, 5]


def test_auto_says_where_nothing_can_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*QUICK, "runner.max_steps=1", "runner.resume_dir=auto")
    config = tiny_run(tmp_path, *options)
    run(config)
    anew = f"runner.resume_dir=auto: no whole checkpoint in {only_run(config).parent}, so the run begins at step 0"
    assert capsys.readouterr().out.splitlines().count(anew) == 1
    (only_run(config) / "checkpoints/global_step_1/state.json").unlink()
    torn = only_run(config).name
    run(config)
    lines = capsys.readouterr().out.splitlines()
    assert f"{anew}; {torn}/checkpoints/global_step_1 without state.json: not whole, so not taken" in lines


def test_contents(tmp_path: Path) -> None:
    options = ("runner.max_steps=1", "runner.save_contents=[model]")
    run(tiny_run(tmp_path, *QUICK, *options))
    with pytest.raises(CheckpointError, match="holds no optimiser"):
        run(tiny_run(tmp_path, *QUICK, "runner.max_steps=2", "runner.resume_dir=auto"))
    run(tiny_run(tmp_path, *QUICK, "runner.only_eval=true", "runner.resume_dir=auto"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["runner.save_contents=[optimizer]"], r"runner.save_contents: got \['optimizer'\], expected \[model"),
        (
            ["runner.weight_sync_interval=2"],
            "runner.save_interval: got 1, no multiple of runner.weight_sync_interval=2",
        ),
        (
            ["runner.weight_sync_interval=2", "runner.save_interval=2", "runner.val_check_interval=3"],
            "runner.val_check_interval: got 3, no multiple of .* use 4",
        ),
        (["runner.stop_at=0.5"], r"runner.stop_at: got 0.5, .* none \(runner.val_check_interval=-1\); set both"),
        (["runner.save_interval=-1", "runner.save_async=true"], "runner.save_async: this run would not read it"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of("env=dummy", *options)


def test_the_interval_between_two_versions_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions: list[set[int]] = []
    update = ActorWorker.update

    @functools.wraps(update)
    def spied(worker: ActorWorker, *, step: int) -> object:
        versions.append({v for t in worker._received for v in t.policy_versions.unique().tolist()})
        return update(worker, step=step)

    monkeypatch.setattr(ActorWorker, "update", spied)
    options = ["runner.weight_sync_interval=2", "runner.save_interval=2", "runner.max_steps=5"]
    run(tiny_run(tmp_path, "cluster=serial", *options))
    assert versions == [{0}, {0}, {2}, {2}, {4}]
    whole = tiny_run(tmp_path, *QUICK, *options, "runner.experiment_name=whole", "runner.max_steps=4")
    run(whole)
    first = tiny_run(tmp_path, *QUICK, *options, "runner.experiment_name=parts", "runner.max_steps=2")
    run(first)
    rest = ("runner.experiment_name=parts", "runner.max_steps=4", "runner.resume_dir=auto")
    run(tiny_run(tmp_path, *QUICK, *options, *rest))
    assert metrics_of(only_run(whole)) == metrics_of(only_run(first))


def test_the_last_evaluation_is_of_the_newest_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[int] = []
    publish = ActorWorker.publish_weights

    @functools.wraps(publish)
    async def spied(worker: ActorWorker, version: int) -> float:
        published.append(version)
        return await publish(worker, version)

    monkeypatch.setattr(ActorWorker, "publish_weights", spied)
    options = ["runner.weight_sync_interval=2", "runner.save_interval=-1", "runner.max_steps=3"]
    run(tiny_run(tmp_path, "cluster=serial", *options))
    assert published == [0, 2, 3]


@pytest.mark.parametrize("at", [2, 4], ids=["on the way", "after the last step"])
def test_an_evaluation_that_was_due_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    options = [*QUICK, "runner.save_interval=2", "runner.val_check_interval=2", "runner.max_steps=4"]
    config = tiny_run(tmp_path, *options)
    interrupt(monkeypatch, EnvWorker, "evaluate", at_call=at - 1)  # two env workers
    with pytest.raises(Terminated):
        run(config)
    assert f"checkpoint of step {at} is complete" in " ".join(capsys.readouterr().out.split())
    monkeypatch.undo()
    run_dir = only_run(config)
    assert sorted(evaluations_of(run_dir)) == list(range(2, at, 2))
    rest = tiny_run(tmp_path, *options, "runner.resume_dir=auto")
    run(rest)
    assert sorted(evaluations_of(run_dir)) == [2, 4]
    whole = tiny_run(tmp_path, *options, "runner.experiment_name=whole")
    run(whole)
    left, right = (evaluations_of(only_run(c))[at].read_text() for c in (config, whole))
    assert json.loads(left)["episodes"] == json.loads(right)["episodes"]
    with pytest.raises(UserError, match="has 4 steps already"):
        run(rest)


def interrupt(
    monkeypatch: pytest.MonkeyPatch, owner: object, method: str, *, at_call: int, by: int = signal.SIGTERM
) -> None:
    """A signal to this process in the middle of the run."""
    original: Callable[..., object] = getattr(owner, method)
    calls = iter(range(1, 1000))

    @functools.wraps(original)
    def interrupted(*args: object, **kwargs: object) -> object:
        if next(calls) == at_call:
            os.kill(os.getpid(), by)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, interrupted)


@pytest.mark.parametrize(
    ("by", "asynchronous"), [(signal.SIGTERM, "false"), (signal.SIGTERM, "true"), (signal.SIGINT, "false")]
)
def test_ended_in_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by: int, asynchronous: str
) -> None:
    interrupt(monkeypatch, EnvWorker, "interact", at_call=5, by=by)  # two env workers: in the third step
    options = ["runner.save_interval=10", "runner.max_steps=9", f"runner.save_async={asynchronous}"]
    config = tiny_run(tmp_path, *QUICK, *options)
    with pytest.raises(Terminated if by == signal.SIGTERM else KeyboardInterrupt) as ending:
        run(config)
    if isinstance(ending.value, Terminated):
        assert ending.value.code == 128 + signal.SIGTERM
    said = " ".join(capsys.readouterr().out.split())
    assert f"{'terminated' if by == signal.SIGTERM else 'interrupted'}: checkpoint of step 2 is complete" in said
    assert f"go on with: runner.resume_dir={only_run(config)}" in said
    assert steps(only_run(config)) == [2]
    monkeypatch.undo()
    rest = tiny_run(tmp_path, *QUICK, *options, "runner.max_steps=3", "runner.resume_dir=auto")
    run(rest)
    whole = tiny_run(tmp_path, *QUICK, *options, "runner.max_steps=3", "runner.experiment_name=whole")
    run(whole)
    assert metrics_of(only_run(rest)) == metrics_of(only_run(whole)), "as if it had not been terminated"


def test_terminated_in_a_long_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saving, "_GRACE_S", 0.0)
    interrupt(monkeypatch, ActorWorker, "update", at_call=2)
    config = tiny_run(tmp_path, *QUICK, "runner.save_interval=10", "runner.max_steps=9")
    with pytest.raises(Terminated):
        run(config)
    assert "no checkpoint of step 1: step 2 was being trained" in " ".join(capsys.readouterr().out.split())
    assert steps(only_run(config)) == []


def test_terminated_in_an_update_while_an_earlier_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saving, "_GRACE_S", 0.0)
    interrupt(monkeypatch, ActorWorker, "update", at_call=4)
    write, terminated, awaited = ShardWriter.write_data, CheckpointSaver.save_at_termination, threading.Event()

    def slowly(*args: Any) -> object:
        assert awaited.wait(5), "nobody waits for it"
        return write(*args)

    def waiting(saver: CheckpointSaver) -> str:
        threading.Timer(0.5, awaited.set).start()
        # A worker in the middle of an update answers nobody.
        monkeypatch.setattr(ActorWorker, "finish_save", lambda *_: pytest.fail("it calls"))
        return terminated(saver)

    monkeypatch.setattr(ShardWriter, "write_data", slowly)
    monkeypatch.setattr(CheckpointSaver, "save_at_termination", waiting)
    config = tiny_run(tmp_path, *QUICK, "runner.save_interval=2", "runner.max_steps=9", "runner.save_async=true")
    with pytest.raises(Terminated):
        run(config)
    outcome = "no checkpoint of step 3: step 4 was being trained; checkpoint of step 2 is complete"
    assert f"terminated: {outcome}" in " ".join(capsys.readouterr().out.split())
    assert steps(only_run(config)) == [2]


def test_terminated_in_an_update_while_nothing_is_written_for_long(tmp_path: Path) -> None:
    """A checkpoint that is there is not waited for, and one that does not come not for ever; an older one of the same
    step is none."""
    saver = CheckpointSaver(
        config=tiny_run(tmp_path, "runner.save_async=true").runner,
        run_dir=tmp_path,
        actor=None,  # type: ignore[arg-type]  # nobody calls it
        finished=149,
        saved=100,
        updating=True,
    )
    there = tmp_path / "there"
    there.mkdir()
    state = store.RunState(step=100, policy_version=100)
    late = "was not written in time"
    for scratch, directory, outcome in (
        (tmp_path / "nowhere", there, "is complete"),
        (tmp_path, tmp_path / "nowhere", late),
        (tmp_path, there, late),
    ):
        saver._unpublished = store.Publication(scratch=scratch, directory=directory, state=state, max_keep=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "_PATIENCE_S", 0.2)
            found = saver.save_at_termination()
        assert found == f"no checkpoint of step 149: step 150 was being trained; checkpoint of step 100 {outcome}"


@pytest.mark.parametrize(
    ("by", "word", "name", "raised"),
    [
        (signal.SIGINT, "interrupted", "Ctrl-C", KeyboardInterrupt),
        (signal.SIGTERM, "terminated", "SIGTERM", Terminated),
    ],
)
def test_an_update_is_finished(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: int,
    word: str,
    name: str,
    raised: type[BaseException],
) -> None:
    interrupt(monkeypatch, ActorWorker, "update", at_call=2, by=by)
    options = ["runner.save_interval=10", "runner.max_steps=3", "algorithm=ppo", "env.train.auto_reset=true"]
    config = tiny_run(tmp_path, *QUICK, *options)
    with pytest.raises(raised):
        run(config)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{word}: finishing step 2's update, then saving; {name} again ends at once" in said
    assert f"{word}: checkpoint of step 2 is complete" in said
    assert steps(only_run(config)) == [2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    rest = tiny_run(tmp_path, *QUICK, *options, "runner.resume_dir=auto")
    run(rest)
    whole = tiny_run(tmp_path, *QUICK, *options, "runner.experiment_name=whole")
    run(whole)
    assert metrics_of(only_run(rest)) == metrics_of(only_run(whole)), "as if it had not been interrupted"


def test_ctrl_c_twice_in_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, ActorWorker, "update", at_call=2, by=signal.SIGINT)
    interrupt(monkeypatch, ActorWorker, "update", at_call=2, by=signal.SIGINT)
    config = tiny_run(tmp_path, *QUICK, "runner.save_interval=10", "runner.max_steps=9")
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert "no checkpoint of step 1: step 2 was being trained" in " ".join(capsys.readouterr().out.split())
    assert steps(only_run(config)) == []


def test_ctrl_c_twice_in_an_update_does_not_wait_for_an_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        interrupt(monkeypatch, ActorWorker, "update", at_call=4, by=signal.SIGINT)
    monkeypatch.setattr(ActorWorker, "finish_save", lambda *_: pytest.fail("it waits"))
    config = tiny_run(tmp_path, *QUICK, "runner.save_interval=2", "runner.max_steps=9", "runner.save_async=true")
    with pytest.raises(KeyboardInterrupt):
        run(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "no checkpoint of step 3: step 4 was being trained" in said and "is complete" not in said


def test_a_half_written_checkpoint_goes_at_the_next_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of another run, whose disk it fills; not while a run still writes it."""
    config = tiny_run(tmp_path, *QUICK, "runner.max_steps=1", "runner.save_interval=-1")
    earlier = tmp_path / "results" / config.runner.experiment_name / "2000-01-01_00-00-00" / "checkpoints"
    torn, written = store.checkpoint_dir(earlier.parent, 3), store.checkpoint_dir(earlier.parent, 4)
    torn = torn.with_name(f".{torn.name}.writing")
    torn.mkdir(parents=True)
    (torn / "shard").write_bytes(bytes(1000))
    run(config)
    assert f"removed a half-written checkpoint: {torn}" in capsys.readouterr().out.replace("\n", "")
    assert not torn.exists()
    scratch = store.begin(written)
    run(config)
    assert scratch.exists()


def test_a_second_ctrl_c_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, EnvWorker, "interact", at_call=5, by=signal.SIGINT)
    interrupt(monkeypatch, ActorWorker, "save", at_call=1, by=signal.SIGINT)
    config = tiny_run(tmp_path, *QUICK, "runner.save_interval=10", "runner.max_steps=9")
    with pytest.raises(KeyboardInterrupt):
        run(config)
    said = capsys.readouterr().out
    assert "interrupted: saving what is finished" in said and "is complete" not in said and "go on" not in said
    assert steps(only_run(config)) == []


def test_an_interrupted_evaluation_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, EnvWorker, "evaluate", at_call=1, by=signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_run(tmp_path, *QUICK, "runner.only_eval=true"))
    assert "interrupted: " not in capsys.readouterr().out


def test_terminated_while_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process the writing itself is interrupted: half a checkpoint does not get a name."""
    interrupt(monkeypatch, ActorWorker, "save", at_call=2)
    config = tiny_run(tmp_path, *QUICK, "runner.max_steps=9")
    with pytest.raises(Terminated):
        run(config)
    assert "no checkpoint of step 2: " in " ".join(capsys.readouterr().out.split())
    assert steps(only_run(config)) == [1]


def test_terminated_while_it_computes_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That takes a while and does not hold up the end; it is done again."""
    interrupt(monkeypatch, store, "seal", at_call=2)
    config = tiny_run(tmp_path, *QUICK, "runner.max_steps=9")
    with pytest.raises(Terminated):
        run(config)
    assert "checkpoint of step 2 is complete" in " ".join(capsys.readouterr().out.split())
    assert steps(only_run(config)) == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("by", "to_all"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)])
def test_processes_are_ended(tmp_path: Path, by: int, to_all: bool) -> None:
    """The command as a user runs it, workers in processes. Ctrl-C in a terminal goes to them, too, and some systems
    send SIGTERM to all."""
    command = [sys.executable, "-m", "embodied_rl", "env=dummy", "runner.save_interval=1000", "runner.max_steps=1000"]
    command += [f"runner.output_dir={tmp_path}", "env.eval.video_cfg.save_video=false", "algorithm.update_epoch=1"]
    command += [
        "env.train.max_episode_steps=64",
        "runner.logger.logger_backends=[jsonl]",
        "cluster.num_threads.actor=1",
    ]
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        metrics: list[Path] = []
        while not metrics or metrics[0].read_text().count("\n") < 2:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
            metrics = list(tmp_path.rglob("metrics.jsonl"))
        reached = [process.pid]
        if to_all:
            reached += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        for pid in reversed(reached):
            os.kill(pid, by)
        assert process.wait(60) == 128 + by
    text = " ".join((tmp_path / "log").read_text().split())
    done = metrics[0].read_text().count("\n")
    if match := re.search(r"checkpoint of step (\d+) is complete", text):
        assert int(match[1]) in (done - 1, done)  # the line may be there before the step counts as finished
        assert steps(metrics[0].parent) == [int(match[1])]
    else:
        assert by == signal.SIGTERM
        assert f"step {done + 1} was being trained" in text or f"step {done} was being trained" in text, text


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_a_folder_where_a_file_is_to_be(tmp_path: Path, name: str) -> None:
    config = tiny_run(tmp_path, *QUICK, "runner.max_steps=1")
    run(config)
    path = only_run(config) / name
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=f"{name}: Is a directory; the run writes it: move away what is there"):
        run(tiny_run(tmp_path, *QUICK, "runner.max_steps=2", "runner.resume_dir=auto"))
