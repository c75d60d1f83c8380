"""Envs in the shape of lerobot's EnvHub, used as its ``lerobot_eval.rollout`` does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from embodied_rl.envhub import vectors
from tests.test_gymnasium_envs import make, straight


def suite(**options: Any) -> Any:
    return vectors("dummy", 3, task_ids=(1, 2), image_size=16, **options)


@pytest.mark.parametrize("use_async_envs", [False, True])
def test_a_rollout(use_async_envs: bool) -> None:
    multiprocessing.set_forkserver_preload(["embodied_rl.envhub"])  # one import of torch instead of six
    found = suite(use_async_envs=use_async_envs)
    assert list(found) == ["dummy"]
    assert list(found["dummy"]) == [1, 2]
    envs = found["dummy"][1]
    assert isinstance(envs, AsyncVectorEnv if use_async_envs else SyncVectorEnv)
    assert envs.call("_max_episode_steps") == (32,) * 3
    obs, _ = envs.reset(seed=[5, 6, 7])
    for description in (*envs.call("task_description"), *envs.call("task")):
        assert "upper left" in description
    single, _ = make(task_id=1, image_size=16).reset(seed=6)
    assert np.array_equal(obs["agent_pos"][1], single["state"])
    assert np.array_equal(obs["pixels"]["agentview"][1], single["agentview"])
    assert (obs["pixels"]["agentview"].shape, obs["pixels"]["agentview"].dtype) == ((3, 16, 16, 3), np.uint8)
    done = np.zeros(3, dtype=bool)
    for step in range(32):
        assert envs.observation_space.contains(obs)
        actions = straight(obs["agent_pos"]).astype(np.float32)
        actions[0] = 0
        obs, _, terminated, truncated, info = envs.step(actions)
        ended = terminated | truncated
        assert ("final_info" in info) == ended.any()
        for i in np.flatnonzero(ended & ~done):
            assert info["final_info"]["is_success"][i] == (i > 0), f"step {step}"
        done |= ended
    assert done.all()
    assert np.stack(envs.call("render")).shape == (3, 128, 128, 3)
    for each in found["dummy"].values():
        each.close()


@pytest.mark.parametrize("given", [{}, {"cfg": object()}])  # lerobot passes its EnvConfig only where it has one
def test_the_documented_file_is_called_as_lerobot_calls_it(given: dict[str, Any]) -> None:
    text = (Path(__file__).parents[1] / "docs/gymnasium.md").read_text()
    (block,) = re.findall(r"```python\n(# env\.py\n.*?)```", text, re.DOTALL)
    file: dict[str, Any] = {}
    exec(block, file)
    file["vectors"] = lambda _, *sizes, **__: vectors("dummy", *sizes)  # ten scenes of LIBERO would take a while
    envs = file["make_env"](n_envs=2, use_async_envs=False, **given)
    assert envs["dummy"][0].num_envs == 2
    envs["dummy"][0].close()


def test_without_cameras_there_are_no_pixels() -> None:
    envs = vectors("dummy")["dummy"][0]
    obs, _ = envs.reset(seed=0)
    assert set(obs) == {"agent_pos"}
    envs.close()


def test_the_length_of_an_episode_reaches_lerobots_loop() -> None:
    """It asks each env for ``_max_episode_steps``."""
    for steps, length in ((None, 32), (40, 40)):
        envs: Any = vectors("dummy", episode_steps=steps)["dummy"][0]
        assert [env._max_episode_steps for env in envs.envs] == [length]
        envs.close()


RENDERED = """
from embodied_rl.envhub import vectors

def envs(**options):
    return vectors("metaworld", task="reach", camera_height=16, camera_width=16, **options)["metaworld"][0]

envs().reset(seed=[1])
there = envs(use_async_envs=True)
there.reset(seed=[1])
there.close()
print("reset")
"""


@pytest.mark.xdist_group("simulator")
def test_processes_of_a_process_that_has_rendered() -> None:
    pytest.importorskip("metaworld", reason="the metaworld extra is not installed")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", RENDERED],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, errors = child.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail("the envs in processes of their own gave no first observation")
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started, too
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert said == "reset\n", errors
