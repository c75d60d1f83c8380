"""Stable-Baselines3's side of :mod:`benchmarks.sb3_race`: ``python -m benchmarks.sb3_train INPUT OUTPUT``.

INPUT is the JSON of ``sb3_race.sb3_input``; OUTPUT gets a line for each evaluation (``race_record.Record``).
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.race_record import Record, made, play


class Evaluations(BaseCallback):
    """The greedy policy in episodes of given seeds, after updates."""

    def __init__(self, given: dict[str, Any], output: Path) -> None:
        super().__init__()
        self._every, self._steps, self._seeds = given["eval_every"], given["steps"], given["eval_seeds"]
        self._envs = [made(given, given["eval_wrappers"]) for _ in self._seeds]
        self._record = Record(output)
        self._due = self._every

    def _on_training_start(self) -> None:
        self._record.started()

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self._due and self.num_timesteps < self._steps:
            while self._due <= self.num_timesteps:  # a rollout may be longer
                self._due += self._every
            self._evaluate()

    def _on_training_end(self) -> None:
        self._evaluate()

    def _on_step(self) -> bool:
        return True

    def _evaluate(self) -> None:
        self._record.trained(self.num_timesteps)
        normalizer = self.model.get_vec_normalize_env()

        def act(states: Any) -> Any:
            states = states if normalizer is None else normalizer.normalize_obs(states)
            return self.model.predict(states, deterministic=True)[0]  # type: ignore[arg-type]  # no dict

        self._record.evaluated(float(play(self._envs, self._seeds, act).mean()))


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    given = json.loads(source.read_text())
    torch.set_num_threads(1)
    settings = dict(given["settings"])
    for name in ("learning_rate", "clip_range"):
        if isinstance(settings.get(name), list):  # linear, to 0
            (start,) = settings[name]
            settings[name] = lambda remaining, start=start: remaining * start
    if "policy_kwargs" in settings and "activation_fn" in settings["policy_kwargs"]:
        activation = getattr(torch.nn, settings["policy_kwargs"]["activation_fn"])
        settings["policy_kwargs"] = {**settings["policy_kwargs"], "activation_fn": activation}
    envs = make_vec_env(partial(made, given, given["wrappers"]), given["n_envs"], seed=given["seed"])
    if given["normalize"]:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    model = {"PPO": PPO, "SAC": SAC}[given["algorithm"]](
        "MlpPolicy", envs, seed=given["seed"], device="cpu", **settings
    )
    model.learn(given["steps"], callback=Evaluations(given, target))


if __name__ == "__main__":
    main()
