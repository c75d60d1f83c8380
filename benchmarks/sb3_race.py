"""Our presets of PPO and SAC beside Stable-Baselines3's: the same env, env steps, held-out episodes and machine.

    python -m benchmarks.sb3_race [--env cartpole ...] [--seeds 3] [--output DIR]

SB3 has the hyper-parameters of RL Baselines3 Zoo, where that has the env; ours are those of the preset. Seed by seed,
one trains after the other in a process of its own with one thread, so that both meet the same load of the machine.
Every so many env steps the greedy policy plays the same 20 episodes, which training never starts from. Times are wall
seconds from the start of the command on, and without evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from embodied_rl.monitoring.builtin import METRICS_FILE
from embodied_rl.seeding import derived_seed

ROOT = Path(__file__).parents[1]
OURS, SB3 = "embodied_rl", "SB3"
EPISODES = 20
POLL_S = 0.02
LINE = 0.7
"""Of SB3's time, at most."""
WIDTH = 110
"""Columns that the table takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One env."""

    id: str
    """As in ``env.init_params.id``."""
    experiment: str
    steps: int
    """Training steps of ours."""
    rollout: int
    """Env steps of each."""
    every: int
    """Training steps of ours between evaluations."""
    threshold: float | None
    """Return to reach; None: SB3's mean return at the end."""
    settings: Mapping[str, Any]
    """SB3's arguments; a list of one number falls linearly to 0."""
    algorithm: Literal["PPO", "SAC"] = "PPO"
    n_envs: int
    normalize: bool = False
    reward_coef: float = 1.0
    """What our preset multiplies rewards with."""


_MUJOCO = {"log_std_init": -2, "ortho_init": False, "activation_fn": "ReLU", "net_arch": [256, 256]}
RACES: Mapping[str, Race] = {
    "cartpole": Race(
        id="CartPole-v1",
        experiment="cartpole_ppo",
        steps=100,
        rollout=1024,
        every=4,
        threshold=475,
        n_envs=8,
        settings={
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": [1e-3],
            "clip_range": [0.2],
        },
    ),
    "pendulum": Race(
        id="Pendulum-v1",
        experiment="pendulum_ppo",
        steps=40,
        rollout=3200,
        every=2,
        threshold=-250,
        n_envs=4,
        reward_coef=0.1,
        settings={
            "n_steps": 1024,
            "gae_lambda": 0.95,
            "gamma": 0.9,
            "n_epochs": 10,
            "ent_coef": 0.0,
            "learning_rate": 1e-3,
            "clip_range": 0.2,
            "use_sde": True,
            "sde_sample_freq": 4,
        },
    ),
    "halfcheetah": Race(
        id="HalfCheetah-v5",
        experiment="halfcheetah_ppo",
        steps=196,
        rollout=2048,
        every=14,
        threshold=None,
        n_envs=1,
        normalize=True,
        reward_coef=0.1,
        settings={
            "batch_size": 64,
            "n_steps": 512,
            "gamma": 0.98,
            "learning_rate": 2.0633e-05,
            "ent_coef": 0.000401762,
            "clip_range": 0.1,
            "n_epochs": 20,
            "gae_lambda": 0.92,
            "max_grad_norm": 0.8,
            "vf_coef": 0.58096,
            "policy_kwargs": _MUJOCO,
        },
    ),
    "pendulum_sac": Race(
        id="Pendulum-v1",
        experiment="pendulum_sac",
        steps=200,
        rollout=40,
        every=25,
        threshold=-250,
        n_envs=1,
        algorithm="SAC",
        settings={"learning_rate": 1e-3, "policy_kwargs": {"net_arch": [128, 128]}},
    ),
    "inverted_pendulum_sac": Race(
        id="InvertedPendulum-v5",
        experiment="inverted_pendulum_sac",
        steps=125,
        rollout=40,
        every=25,
        threshold=950,
        n_envs=1,
        algorithm="SAC",
        settings={
            "learning_rate": 1e-3,
            "batch_size": 128,
            "tau": 0.02,
            "policy_kwargs": {"net_arch": [64, 64]},
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A run's evaluations."""

    env_steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Wall time until then, without evaluations, with the start."""
    returns: list[float] = field(default_factory=list)
    start: float
    """Seconds until the first env step."""

    def reached(self, threshold: float) -> tuple[int, float] | None:
        """(env steps, seconds) of the first evaluation there."""
        found = zip(self.env_steps, self.seconds, self.returns, strict=True)
        return next(((steps, seconds) for steps, seconds, value in found if value >= threshold), None)


def trained(lines: Sequence[Mapping[str, float]], walls: Sequence[float], reward_coef: float) -> Trained:
    """Of the lines of a metrics file and the wall seconds after which each was there."""
    run = Trained(start=walls[0] - lines[0].get("eval/seconds", 0.0) - lines[0]["time/step"])
    evaluating = 0.0
    for line, wall in zip(lines, walls, strict=True):
        evaluating += line.get("eval/seconds", 0.0)
        if "eval/return" in line:
            run.env_steps.append(int(line["env/steps_total"]))
            run.seconds.append(wall - evaluating)
            run.returns.append(line["eval/return"] / reward_coef)
    return run


def watched(command: Sequence[str], metrics: Path, reward_coef: float) -> Trained:
    """Run ``command``, which writes the metrics file that ``metrics`` matches, a pattern in its last folders."""
    began, walls = time.perf_counter(), list[float]()
    folder, pattern = metrics.parent, metrics.name
    log = folder / "log.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def text() -> str:
        path = next(folder.glob(pattern), None) or next(folder.glob(f"*/*/{pattern}"), None)
        return "" if path is None else path.read_text()

    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            walls += [time.perf_counter() - began] * (text().count("\n") - len(walls))
            time.sleep(POLL_S)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    lines = [json.loads(line) for line in text().splitlines()]
    walls += [time.perf_counter() - began] * (len(lines) - len(walls))
    return trained(lines, walls, reward_coef)


def run_ours(race: Race, seed: int, folder: Path) -> Trained:
    command = [
        sys.executable, "train.py", f"experiment={race.experiment}", f"actor.seed={seed}", f"env.seed={seed}",
        f"runner.output_dir={folder}", f"runner.max_steps={race.steps}", f"runner.val_check_interval={race.every}",
        f"env.eval.episodes_per_task={EPISODES}", f"env.eval.total_num_envs={EPISODES}", "runner.stop_at=null",
        "runner.save_interval=-1", "runner.report=false", "runner.logger.logger_backends=[jsonl]",
    ]  # fmt: skip
    return watched(command, folder / METRICS_FILE, race.reward_coef)


def run_sb3(race: Race, seed: int, folder: Path) -> Trained:
    source = folder / "input.json"
    source.write_text(json.dumps(sb3_input(race, seed)))
    command = [sys.executable, "-m", "benchmarks.sb3_train", str(source), str(folder / METRICS_FILE)]
    return watched(command, folder / METRICS_FILE, 1.0)


def sb3_input(race: Race, seed: int) -> dict[str, Any]:
    """What SB3's side has to know; its held-out episodes are those of our evaluation."""
    return {
        "id": race.id,
        "seed": seed,
        "n_envs": race.n_envs,
        "normalize": race.normalize,
        "algorithm": race.algorithm,
        "settings": dict(race.settings),
        "steps": race.steps * race.rollout,
        "eval_every": race.every * race.rollout,
        "eval_seeds": [derived_seed(seed, number, bits=31) for number in range(EPISODES)],
    }


def rows(name: str, race: Race, runs: Mapping[str, Sequence[Trained]]) -> list[list[str]]:
    """The table's, one a side."""
    threshold = goal(race, runs)
    table = []
    for side, seeds in runs.items():
        reached = [run.reached(threshold) for run in seeds]
        times = [found[1] for found in reached if found is not None]
        steps = [f"{found[0]:,}" if found else "never" for found in reached]
        final = [run.returns[-1] for run in seeds]
        table.append(
            [
                f"{name}, {threshold:.0f}",
                side,
                ", ".join(steps),
                ", ".join(f"{found[1]:.0f}" if found else "never" for found in reached),
                f"{statistics.mean(times):.0f}" if len(times) == len(seeds) else "–",
                f"{statistics.mean(run.start for run in seeds):.1f}",
                f"{statistics.mean(run.seconds[-1] for run in seeds):.0f}",
                ", ".join(f"{value:.0f}" for value in final),
            ]
        )
    return table


HEAD = (
    "env, threshold",
    "trained by",
    "env steps to it",
    "seconds to it",
    "mean",
    "of these start",
    "seconds for all",
    "return at the end",
)


def goal(race: Race, runs: Mapping[str, Sequence[Trained]]) -> float:
    """The return to reach."""
    if race.threshold is not None:
        return race.threshold
    return statistics.mean(run.returns[-1] for run in runs[SB3])


def draw(path: Path, found: Mapping[str, Mapping[str, Sequence[Trained]]]) -> None:
    """A row an env: returns against env steps and against wall time, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(found), 2, figsize=(10, 3 * len(found)), squeeze=False, layout="constrained")
    for row, (name, runs) in zip(panels, found.items(), strict=True):
        for number, (side, seeds) in enumerate(runs.items()):
            for run in seeds:
                style = {"color": f"C{number}", "linewidth": 1.2, "label": side if run is seeds[0] else None}
                row[0].plot([steps / 1000 for steps in run.env_steps], run.returns, **style)
                row[1].plot(run.seconds, run.returns, **style)
        for panel, label in zip(row, ("thousand env steps", "wall seconds, without evaluations"), strict=True):
            panel.axhline(goal(RACES[name], runs), color="gray", linestyle="--", linewidth=1)
            panel.set_xlabel(label)
            panel.set_xlim(left=0)
            panel.grid(alpha=0.3)
        row[0].set_ylabel("return, 20 held-out episodes")
        row[0].set_title(RACES[name].id, loc="left")
        row[1].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sb3_race", description=__doc__)
    parser.add_argument("--env", nargs="+", choices=list(RACES), default=list(RACES), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ... (default 3)")
    parser.add_argument("--output", type=Path, default=ROOT / ".benchmarks" / "sb3_race", help="table, picture, runs")
    options = parser.parse_args()
    console = Console()
    console.width = max(console.width, WIDTH)  # where it is no terminal
    found: dict[str, dict[str, list[Trained]]] = {}
    table = Table(*HEAD)
    for name in options.env:
        race, runs = RACES[name], {OURS: list[Trained](), SB3: list[Trained]()}
        for seed in range(options.seeds):
            for side, start in ((OURS, run_ours), (SB3, run_sb3)):
                folder = options.output / name / f"{side}_{seed}_{time.time_ns()}"
                folder.mkdir(parents=True)
                run = start(race, seed, folder)
                runs[side].append(run)
                console.print(f"{name}, seed {seed}, {side}: {run.returns[-1]:.0f} after {run.seconds[-1]:.0f} s")
        found[name] = runs
        for row in rows(name, race, runs):
            table.add_row(*row)
        draw(options.output / "sb3_race.png", found)
        answer = {
            env: {side: [asdict(run) for run in seeds] for side, seeds in runs.items()} for env, runs in found.items()
        }
        (options.output / "sb3_race.json").write_text(json.dumps(answer, indent=1) + "\n")
    console.print(table)
    console.print(f"The line is {LINE} of SB3's seconds to the threshold, and a return at the end that is not lower")


if __name__ == "__main__":
    main()
