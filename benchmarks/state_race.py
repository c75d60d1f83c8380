"""Env steps a second on state envs, beside Sample Factory, PufferLib and Gymnasium's AsyncVectorEnv.

    python -m benchmarks.state_race [--quick] [--json FILE]

All have 64 envs and all cores. ``training`` is PPO on HalfCheetah (MuJoCo) with the numbers of Sample Factory's
example: rollouts of 64 steps, two epochs of four mini-batches of 1,024, two layers of 64 units, normalised
observations; learning rate and terms of the loss are each side's own. Rates are without the start, and stand beside the
return of the last episodes of training. ``stepping`` is random actions
alone, on CartPole, where next to nothing is simulated: ours is the adapter of an env worker, once a core, without the
messages that a policy's turns take. Sides take turns in each round; the table shows medians.

Sample Factory needs Gymnasium before 1.0, where HalfCheetah is version 4, with the same physics and rewards. PufferLib
3 builds with files that it downloads, and version 1 has no continuous actions. They take part from an environment of
their own::

    python -m venv .venv-state
    .venv-state/bin/python -m pip install sample-factory==2.1.1 "gymnasium[mujoco]==0.29.1" mujoco==3.17.0
    .venv-state/bin/python -m pip install --no-deps pufferlib==1.0.1 gym==0.26.2 gym_notices
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.puffer_steps import steps_per_second
from embodied_rl.envs.gymnasium import GymnasiumEnv, GymnasiumParams

ROOT: Final = Path(__file__).parents[1]
THEIRS: Final = ROOT / ".venv-state" / "bin" / "python"
OURS: Final = "embodied_rl"
ENVS: Final = 64
ROLLOUT: Final = 4096
"""Env steps of a training step."""
REWARD_COEF: Final = 0.1
"""What our preset multiplies rewards with."""
ENV: Final = "CartPole-v1"
"""Where steps alone are measured."""

Found: TypeAlias = tuple[float, float | None]
"""Env steps a second, and the return of training's last episodes."""


def ours_training(steps: int, layout: tuple[str, ...]) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "train.py", "experiment=halfcheetah_ppo", f"env.train.total_num_envs={ENVS}",
            "algorithm.update_epoch=2", "algorithm.n_minibatches=4", "algorithm.gamma=0.99",
            "algorithm.gae_lambda=0.95", "model.params.hidden_size=64",
            f"runner.max_steps={steps // ROLLOUT}", f"runner.output_dir={folder}", "runner.report=false",
            "runner.save_interval=-1", "runner.val_check_interval=-1", "runner.val_before_train=false",
            "runner.eval_at_end=false", *layout,
        ]  # fmt: skip
        run(command)
        (record,) = Path(folder).rglob("metrics.jsonl")
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    timed = [line for line in lines if "time/step" in line][1:]
    returns = [line["env/return"] for line in lines if "env/return" in line]
    seconds = sum(line["time/step"] for line in timed)
    return sum(line["env/steps"] for line in timed) / seconds, returns[-1] / REWARD_COEF if returns else None


_REPORT = re.compile(r"\[(?P<time>[\d-]+ [\d:,]+)\].*Total num frames: (?P<steps>\d+)")
_RETURN = re.compile(r"Avg episode reward: \[\(0, '(-?[\d.]+)'\)\]")


def sample_factory(steps: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        workers = os.cpu_count() or 1
        command = [
            str(THEIRS), "-m", "sf_examples.mujoco.train_mujoco", "--env=mujoco_halfcheetah", "--experiment=race",
            f"--train_dir={folder}", f"--num_workers={workers}", f"--num_envs_per_worker={ENVS // workers}",
            "--device=cpu", f"--train_for_env_steps={steps}", "--with_wandb=False", "--seed=0",
        ]  # fmt: skip
        return reported(run(command))


def reported(log: str) -> Found:
    """What Sample Factory's log says, from its first report of env steps to its last."""
    reports = [
        (datetime.strptime(found["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp(), int(found["steps"]))
        for found in _REPORT.finditer(log)
    ]
    if len(reports) < 2:
        sys.exit(f"got {len(reports)} reports of Sample Factory, expected two or more: allow more steps\n{log[-2000:]}")
    (began, first), (ended, last) = reports[0], reports[-1]
    returns = _RETURN.findall(log)
    return (last - first) / (ended - began), float(returns[-1]) if returns else None


def run(command: list[str]) -> str:
    """Run it on threads of one core each; what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def one_core(seconds: float, envs: int) -> float:
    """The adapter of ``env=gymnasium``, stepped as an env worker does it."""
    env = GymnasiumEnv(envs, GymnasiumParams(id=ENV), seed=0)
    slots, rng = list(range(envs)), np.random.default_rng(0)
    env.reset(slots, slots)
    actions = rng.integers(0, 2, (1000, envs, 1)).astype(np.float32)
    started, taken = time.perf_counter(), 0
    while (now := time.perf_counter()) - started < seconds:
        ended = env.step(slots, actions[taken % len(actions)]).terminated
        env.observe(slots)
        if ended is not None and ended.any():
            over = np.flatnonzero(ended).tolist()
            env.reset(over, over)
        taken += 1
    env.close()
    return taken * envs / (now - started)


def ours_stepping(seconds: float) -> Found:
    cores = os.cpu_count() or 1
    with mp.get_context("spawn").Pool(cores) as pool:
        return sum(pool.starmap(one_core, [(seconds, ENVS // cores)] * cores)), None


def async_vector_env(seconds: float) -> Found:
    envs = gymnasium.make_vec(ENV, ENVS, vectorization_mode="async", vector_kwargs={"shared_memory": True})
    try:
        return steps_per_second(envs, ENVS, seconds), None
    finally:
        envs.close()


def puffer(seconds: float) -> Found:
    said = run([str(THEIRS), "-m", "benchmarks.puffer_steps", str(ENVS), str(seconds)])
    return float(re.findall(r"^steps/s: (.*)$", said, re.MULTILINE)[-1]), None


def has(module: str) -> bool:
    return THEIRS.exists() and not subprocess.run([str(THEIRS), "-c", f"import {module}"], check=False).returncode


def sides(steps: int, seconds: float) -> dict[str, Callable[[], Found]]:
    serial = ("cluster=serial",)
    workers = ("cluster=process", f"cluster.component_placement.env=0-{(os.cpu_count() or 1) - 1}")
    found: dict[str, Callable[[], Found]] = {
        f"training: {OURS}, one process": lambda: ours_training(steps, serial),
        f"training: {OURS}, env workers": lambda: ours_training(steps, workers),
        f"stepping: {OURS}": lambda: ours_stepping(seconds),
        "stepping: AsyncVectorEnv, shared memory": lambda: async_vector_env(seconds),
    }
    if has("sample_factory"):
        found["training: Sample Factory"] = lambda: sample_factory(steps)
    if has("pufferlib"):
        found["stepping: PufferLib"] = lambda: puffer(seconds)
    return found


def compared(rates: dict[str, list[float]]) -> dict[str, float]:
    best: dict[str, float] = {}
    for side, rounds in rates.items():
        kind, _, who = side.partition(": ")
        if who.startswith(OURS):
            best[kind] = max(best.get(kind, 0.0), median(rounds))
    return {
        f"{kind}, by {who}": best[kind] / median(rounds)
        for side, rounds in rates.items()
        for kind, _, who in [side.partition(": ")]
        if not who.startswith(OURS)
    }


def show(found: Mapping[str, list[Found]]) -> Table:
    table = Table("", "env steps/s", "range", "return at the end", title=f"{ENVS} envs, all cores")
    for side, rounds in sorted(found.items(), reverse=True):
        rates, returns = [rate for rate, _ in rounds], [value for _, value in rounds if value is not None]
        table.add_row(
            side,
            f"{median(rates):,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
            f"{median(returns):,.0f}" if returns else "",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_race", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's numbers there")
    options = parser.parse_args()
    rounds, steps, seconds = (1, 25 * ROLLOUT, 3.0) if options.quick else (3, 75 * ROLLOUT, 10.0)
    taking_part = sides(steps, seconds)
    found: dict[str, list[Found]] = {side: [] for side in taking_part}
    for _ in range(rounds):
        for side, measure in taking_part.items():
            found[side].append(measure())
            print(f"{side}: {found[side][-1][0]:,.0f} env steps/s", file=sys.stderr)
    Console().print(show(found))
    if options.json:
        answer: dict[str, Any] = {side: [rate for rate, _ in rounds] for side, rounds in found.items()}
        options.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
