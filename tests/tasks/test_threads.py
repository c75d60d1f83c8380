"""Threads of the actor where it may have the cores of those that wait for it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from embodied_rl.launch import run
from embodied_rl.schema import Config
from embodied_rl.tasks import planning
from embodied_rl.tasks.planning import placement_of, threads_of
from embodied_rl.workers.actor import ActorWorker, UpdateReport
from tests.configs import embodied_sft, small_math, tiny_run

AUTO = ("cluster.num_threads.actor=auto", "cluster=process")


def place(env: str, rollout: str, actor: str) -> str:
    return f"cluster.component_placement={{env: {env}, rollout: {rollout}, actor: {actor}}}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((place("0-3", "0", "0"),), 8),
        ((place("0-3", "0", "0-2"),), 2),
        ((place("0-3", "0", "0"), "rollout.max_staleness=1"), 3),
        ((place("0-3", "0-3", "0-1"), "rollout.max_staleness=1"), 1),
    ],
)
def test_cores_of_workers_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: int
) -> None:
    monkeypatch.setattr(planning, "usable_cores", lambda: 8.5)
    monkeypatch.setattr(planning, "count_accelerators", lambda: 0)
    config = tiny_run(tmp_path, *AUTO, "env.train.total_num_envs=48", "algorithm.group_size=2", *options)
    threads = threads_of(config, placement_of(config))
    assert threads == {"actor": expected, "rollout": 1, "env": 1}


def test_readers_and_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "usable_cores", lambda: 8.0)
    demonstrations = functools.partial(embodied_sft, tmp_path, *AUTO)
    found: dict[str, Config] = {
        "reads ahead": demonstrations("data.prefetch=1"),
        "reads when asked": demonstrations("data.prefetch=0"),
        "generates": small_math(*AUTO[:1]),
    }
    placements = {name: placement_of(config) for name, config in found.items()}
    actor = {name: threads_of(config, placements[name])["actor"] for name, config in found.items()}
    readers = placements["reads ahead"].world_size("rollout")
    assert actor == {"reads ahead": 8 - readers, "reads when asked": 8, "generates": 8}


def test_the_actor_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "usable_cores", lambda: 3.0)
    seen: list[int] = []
    update = ActorWorker.update

    @functools.wraps(update)
    def noting(self: ActorWorker, *, step: int) -> UpdateReport:
        seen.append(torch.get_num_threads())
        return update(self, step=step)

    monkeypatch.setattr(ActorWorker, "update", noting)
    run(tiny_run(tmp_path, AUTO[0], "cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false"))
    assert seen == [3]
