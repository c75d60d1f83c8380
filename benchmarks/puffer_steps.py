"""PufferLib's side of :mod:`benchmarks.state_race`: ``python -m benchmarks.puffer_steps ENVS SECONDS``.

It imports none of the project, since it runs in an environment of PufferLib's.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np


def steps_per_second(envs: Any, count: int, seconds: float) -> float:
    """Env steps a second of a vector env with two actions, drawn at random; episodes begin again by themselves."""
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (1000, count))
    started, taken = time.perf_counter(), 0
    while (now := time.perf_counter()) - started < seconds:
        envs.step(actions[taken % len(actions)])
        taken += 1
    return taken * count / (now - started)


def make() -> Any:
    import pufferlib.emulation  # pyright: ignore[reportMissingImports]

    return pufferlib.emulation.GymnasiumPufferEnv(gymnasium.make("CartPole-v1"))


def main() -> None:
    import pufferlib.vector  # pyright: ignore[reportMissingImports]

    count, seconds = int(sys.argv[1]), float(sys.argv[2])
    envs = pufferlib.vector.make(
        make, backend=pufferlib.vector.Multiprocessing, num_envs=count, num_workers=os.cpu_count()
    )
    print(f"steps/s: {steps_per_second(envs, count, seconds)}", flush=True)
    envs.close()


if __name__ == "__main__":
    main()
