"""Envs that are reset while the actor updates: the run is the one in which they are not."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from embodied_rl.contracts import Trajectory
from embodied_rl.envs.chunked import ChunkedEnv
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.launch import run
from embodied_rl.tasks.embodied.run import EmbodiedRunner
from embodied_rl.tasks.loop import TrainingLoop
from embodied_rl.workers.env import EnvWorker
from tests.checkpoints.saved import saved_tensors
from tests.configs import tiny_run
from tests.logged import accounted
from tests.test_end_to_end import assert_equal, metrics_of, only_run
from tests.workers.job import Job, small

SERIAL = ("cluster=serial", "cluster.component_placement={env: 0, rollout: 0, actor: 0}", "runner.eval_at_end=false")
SERIAL += ("algorithm=grpo", "algorithm.group_size=4")


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the workers did when training envs were reset: ``prepare`` or ``roll``."""
    found: list[str] = []
    doing = ["roll"]
    reset, prepare = ChunkedEnv.reset, EnvWorker.prepare

    def noted(self: ChunkedEnv, *args: object, **kwargs: object) -> object:
        found.append(doing[-1])
        return reset(self, *args, **kwargs)  # type: ignore[arg-type]

    @functools.wraps(prepare)
    def preparing(self: EnvWorker, *, step: int, task_weights: Mapping[int, float] | None = None) -> None:
        doing.append("prepare")
        prepare(self, step=step, task_weights=task_weights)
        doing.pop()

    monkeypatch.setattr(ChunkedEnv, "reset", noted)
    monkeypatch.setattr(EnvWorker, "prepare", preparing)
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "roll prepare prepare"),
        (("rollout.pipeline_stage_num=2",), "roll roll prepare prepare prepare prepare"),
        (("algorithm.rollout_epoch=2",), "roll prepare prepare"),
        (("env.train.task_sampling=success", "env.init_params.success_radius=0.6"), "roll prepare prepare"),
        (("env.train.use_fixed_reset_state_ids=true",), "roll prepare prepare"),
        (("runner.weight_sync_interval=2", "runner.save_interval=4"), "roll prepare prepare"),
        # An evaluation after the second step needs the env workers first; it has an env of its own.
        (("runner.val_check_interval=2",), "roll prepare roll roll"),
        (("env.train.video_cfg.save_video=true",), "roll roll roll"),
        (("env.train.enable_offload=true",), "roll roll roll"),
        (("algorithm=ppo", "algorithm.group_size=1", "env.train.auto_reset=true"), "roll"),
    ],
    ids=str,
)
def test_a_run_is_the_same(
    tmp_path: Path, resets: list[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: str
) -> None:
    videos = f"env.train.video_cfg.video_base_dir={tmp_path}"
    stages = () if any("stage" in option for option in options) else ("rollout.pipeline_stage_num=1",)
    options = (*SERIAL, "runner.max_steps=3", "runner.save_interval=3", *options, *stages, videos)
    ahead = tiny_run(tmp_path / "ahead", *options)
    run(ahead)
    assert " ".join(resets) == expected
    steps = accounted(only_run(ahead))
    assert [step["time/reset_ahead"] > 0 for step in steps] == [False, *_prepared(expected)]
    monkeypatch.setattr(EmbodiedRunner, "run_ahead", TrainingLoop.run_ahead)
    resets.clear()
    before = tiny_run(tmp_path / "before", *options)
    run(before)
    assert "prepare" not in resets
    assert metrics_of(only_run(ahead)) == metrics_of(only_run(before))
    assert_equal(*(saved_tensors(only_run(c) / "checkpoints/global_step_3") for c in (ahead, before)))


def _prepared(expected: str) -> Sequence[bool]:
    """Of the steps after the first, by the number of preparations, each of as many stages as begin the first."""
    count = expected.split().count("prepare")
    return {0: (False, False), 1: (True, False), 2: (True, True), 4: (True, True)}[count]


def test_what_is_ready_for_another_step_is_not_taken() -> None:
    found: list[list[Trajectory]] = []
    for prepared in (True, False):
        with Job(small()) as job:
            workers: list[EnvWorker] = job._workers(job._env)
            for step, ready_for in ((3, 7), (4, 4), (4, None)):
                if prepared and ready_for is not None:
                    for worker in workers:
                        worker.prepare(step=ready_for)
                found.append(job.roll(step=step)[0])
                assert all(stage.ready is None for worker in workers for stage in worker._train), "taken once"
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        for one, another in zip(ours, theirs, strict=True):
            assert_equal(dataclasses.asdict(one), dataclasses.asdict(another))


class DiesInReset(DummyEnv):
    """Once, in a worker's third reset of its one env: while the actor updates for the second time."""

    _resets = 0

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        cls = type(self)
        cls._resets += 1
        marker = Path(os.environ["MARKER"])
        if cls._resets == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().reset(slots, reset_state_ids)


def test_a_worker_that_is_lost_meanwhile_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (f"env.env_type={__name__}:DiesInReset", "runner.max_steps=3", "runner.save_interval=-1")
    options += ("rollout.pipeline_stage_num=1", "runner.eval_at_end=false")
    found = []
    for marker in ("disturbed", "disturbed"):  # the second time it is there
        monkeypatch.setenv("MARKER", str(tmp_path / marker))
        config = tiny_run(tmp_path / str(len(found)), "cluster=process", *options)
        run(config)
        found.append([{k: v for k, v in line.items() if k != "env/restarts"} for line in metrics_of(only_run(config))])
    assert "EnvGroup" in capsys.readouterr().out
    assert (tmp_path / "disturbed").exists() and found[0] == found[1]
