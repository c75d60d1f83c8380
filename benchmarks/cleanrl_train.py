"""CleanRL's side of :mod:`benchmarks.sb3_race`: ``python -m benchmarks.cleanrl_train INPUT OUTPUT``.

CleanRL's PPO is a script, not a package to import, so it is run as it is. What it writes to TensorBoard after each
update tells when the greedy policy may play. INPUT is the JSON of ``sb3_race.cleanrl_input``; OUTPUT gets a line for
each evaluation (``race_record.Record``).
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch.utils import tensorboard

from benchmarks.race_record import Record, made, play

AFTER_UPDATE = "charts/SPS"
"""The last number that a script writes of an update."""
ENV = "Race-v0"
LIMIT = 10.0
"""Normalised observations are cut off there, as in the script."""


def main() -> None:
    source, target = (Path(name).resolve() for name in sys.argv[1:])
    given: dict[str, Any] = json.loads(source.read_text())
    record = Record(target)
    envs = [made(given, given["eval_wrappers"]) for _ in given["eval_seeds"]]
    due = given["eval_every"]

    class Writer(tensorboard.SummaryWriter):
        def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None, *args: Any, **kwargs: Any):  # type: ignore[override]
            nonlocal due
            super().add_scalar(tag, scalar_value, global_step, *args, **kwargs)
            script = sys._getframe(1).f_globals
            if tag != AFTER_UPDATE or global_step is None:
                return
            if global_step >= due or script["iteration"] == script["args"].num_iterations:
                due += given["eval_every"] * max(1, -(-(global_step - due + 1) // given["eval_every"]))
                record.trained(global_step)
                greedy = greedy_policy(script["agent"], script["envs"])
                record.evaluated(float(play(envs, given["eval_seeds"], greedy).mean()))

    class Envs(gymnasium.vector.SyncVectorEnv):
        def reset(self, *args: Any, **kwargs: Any):
            record.started()
            return super().reset(*args, **kwargs)

    tensorboard.SummaryWriter = Writer  # type: ignore[misc]
    gymnasium.vector.SyncVectorEnv = Envs  # type: ignore[misc]
    torch.set_num_threads(1)
    os.chdir(target.parent)  # it writes to runs/
    # The script knows envs by their ids alone.
    gymnasium.register(ENV, entry_point=lambda **_: made(given, given["wrappers"]))
    sys.argv = [given["script"], f"--env-id={ENV}", *given["flags"]]
    runpy.run_path(given["script"], run_name="__main__")


def greedy_policy(agent: Any, envs: Any) -> Any:
    """States [n,S] -> actions [n,*A], with the first env's statistics where observations are normalised."""
    space = envs.single_action_space

    @torch.no_grad()
    def act(states: Any) -> Any:
        if not hasattr(agent, "actor_mean"):
            return agent.actor(torch.as_tensor(states, dtype=torch.float32)).argmax(-1).numpy()
        seen = envs.envs[0].get_wrapper_attr("obs_rms")
        states = np.clip((states - seen.mean) / np.sqrt(seen.var + 1e-8), -LIMIT, LIMIT)
        actions = agent.actor_mean(torch.as_tensor(states, dtype=torch.float32)).numpy()
        return np.clip(actions, space.low, space.high)

    return act


if __name__ == "__main__":
    main()
