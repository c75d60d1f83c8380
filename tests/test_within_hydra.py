"""The project from Python within somebody's own Hydra program, and from several threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase

from embodied_rl.composition import config_of, env_of
from embodied_rl.explain.own import task_keys

ROOT = Path(__file__).parents[1]

PROGRAM = """
import gymnasium, hydra
from hydra.core.hydra_config import HydraConfig
import embodied_rl as er
import embodied_rl.gymnasium_envs

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    env = gymnasium.make("embodied_rl/dummy-v0")
    print("plays", env.reset(seed=0)[1]["task_id"] in range(4))
    try:
        er.train("env=dummy", "runner.max_stepz=2", quiet=True)
    except er.ConfigError as error:
        print("says", "runner.max_steps" in str(error))
    print("job", HydraConfig.get().job.name, cfg.number)

main()
"""


def test_each_job_of_a_sweep_may_use_it(tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(PROGRAM)
    command = [sys.executable, "sweep.py", "--multirun", "+number=1,2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(("plays", "says", "job"))]
    assert said == ["plays True", "says True", "job sweep 1", "plays True", "says True", "job sweep 2"], done.stderr


def test_hydras_own_state_is_as_it_was() -> None:
    with initialize_config_module("embodied_rl.config", job_name="mine", version_base="1.2"):
        outer = GlobalHydra.instance()
        hydra = outer.hydra
        env_of("dummy", {})
        config_of("env=dummy")
        task_keys.__wrapped__("sft")  # not of the cache
        assert (GlobalHydra.instance(), GlobalHydra.instance().hydra) == (outer, hydra)
        assert JobRuntime.instance().get("name") == "mine"
        assert str(VersionBase.instance().getbase()) == "1.2"
        assert compose("train", overrides=["task=sft"]).runner.task_type == "sft"


def test_threads_take_turns() -> None:
    count = 4
    together = Barrier(count, timeout=60)

    def composed(number: int) -> int:
        together.wait()
        return env_of("dummy", {"image_size": 2 * number}).init_params["image_size"]

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(composed, range(count))) == [0, 2, 4, 6]
