"""Scenes of env workers that share a process."""

from __future__ import annotations

from collections import Counter

import pytest

from embodied_rl.envs import neighbours
from embodied_rl.envs.libero import adapter
from embodied_rl.envs.libero.scene import Scene, SceneSpec
from tests.configs import embodied
from tests.workers.job import Job


def test_an_evaluation_in_one_process_builds_each_scene_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, each with room for two scenes, play two tasks each."""
    built: Counter[str] = Counter()

    def build(spec: SceneSpec) -> Scene:
        built[spec.bddl_file] += 1
        return Scene(spec)

    monkeypatch.setattr(adapter, "Scene", build)
    config = embodied(
        "cluster=serial",
        "env=libero_goal",
        "model=mlp",
        "env.init_params.cameras=[]",
        "env.init_params.max_cached_scenes=2",
        "env.task_ids=[0,1,2,3]",
        "env.eval.total_num_envs=8",
        "env.eval.max_episode_steps=16",
        "env.eval.episodes_per_task=4",
    )
    with Job(config) as job:
        assert neighbours.workers() == 2
        assert len(job.evaluate()) == 16
        assert set(built.values()) == {1} and len(built) == 4
    assert neighbours.workers() == 1
