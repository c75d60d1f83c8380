"""Our presets of PPO and SAC beside Stable-Baselines3's: the same env (PushT: the same states and rewards, stepped
faster, :mod:`embodied_rl.envs.fast_pusht`), env steps, held-out episodes and machine.

    python -m benchmarks.sb3_race [--env cartpole ...] [--seeds 3] [--output DIR] [--cleanrl CLONE] [--same-env]

SB3 has the hyper-parameters of RL Baselines3 Zoo, where that has the env; ours are those of the preset. Seed by seed,
one trains after the other in a process of its own with one thread, so that all meet the same load of the machine.
Every so many env steps the greedy policy plays the same 20 episodes, which training never starts from. Times are CPU
seconds of the process and its children, which other work on the machine changes little, and wall seconds; both from
the start of the command on, and without evaluations.

CleanRL's PPO is a third side where it is at hand, with SB3's hyper-parameters as far as it has them; in MuJoCo's envs,
whose numbers in the Zoo depend on ones that it lacks, with its own. It needs Gymnasium before 1.0, where MuJoCo's
envs are version 4, with the same physics and rewards::

    git clone https://github.com/vwxyzjn/cleanrl CLONE
    python -m pip install --no-deps --target CLONE/site gymnasium==0.29.1
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks.race_record import RECORD_FILE
from embodied_rl.seeding import derived_seed

ROOT = Path(__file__).parents[1]
OURS, SB3, CLEANRL = "embodied_rl", "SB3", "CleanRL"
EPISODES = 20
LINE = 0.7
"""Of SB3's time, at most."""
WIDTH = 160
"""Columns that the table takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One env."""

    id: str
    """What SB3 trains in, and evaluates in."""
    our_id: str | None = None
    """Our preset's ``env.init_params.id``, where that is another env of the same states and rewards; None: ``id``."""
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
    discrete: bool = False
    """Actions are choices."""
    reward_coef: float = 1.0
    """What our preset multiplies rewards of evaluations with."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[str | Mapping[str, Mapping[str, Any]]] = ()
    """Both as the preset's ``env.init_params``: what both sides train in."""
    cleanrl_id: str | None = None
    """``id`` in Gymnasium before 1.0; None: the same."""
    cleanrl_settings: Mapping[str, Any] | None = None
    """What CleanRL has instead of ``settings``; where it says nothing, its script's own."""
    eval_wrappers: Sequence[str] | None = None
    """As the preset's ``eval_env.init_params``: what both sides are evaluated in; None: what they train in."""


_MUJOCO = {"log_std_init": -2, "ortho_init": False, "activation_fn": "ReLU", "net_arch": [256, 256]}
RACES: Mapping[str, Race] = {
    "cartpole": Race(
        id="CartPole-v1",
        experiment="cartpole_ppo",
        steps=100,
        rollout=1024,
        every=1,
        threshold=475,
        n_envs=8,
        discrete=True,
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
        steps=24,
        rollout=1024,
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
        cleanrl_id="HalfCheetah-v4",
        cleanrl_settings={},
        experiment="halfcheetah_ppo",
        steps=64,
        rollout=1024,
        every=16,
        threshold=1500,
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
    "hopper": Race(
        id="Hopper-v5",
        cleanrl_id="Hopper-v4",
        cleanrl_settings={},
        experiment="hopper_ppo",
        steps=96,
        rollout=1024,
        every=16,
        threshold=1000,
        n_envs=1,
        normalize=True,
        reward_coef=0.1,
        settings={
            "batch_size": 32,
            "n_steps": 512,
            "gamma": 0.999,
            "learning_rate": 9.80828e-05,
            "ent_coef": 0.00229519,
            "clip_range": 0.2,
            "n_epochs": 5,
            "gae_lambda": 0.99,
            "max_grad_norm": 0.7,
            "vf_coef": 0.835671,
            "policy_kwargs": _MUJOCO,
        },
    ),
    "pusht": Race(
        id="gym_pusht:gym_pusht/PushT-v0",
        our_id="embodied_rl.envs.fast_pusht:FastPushT-v0",
        kwargs={"obs_type": "environment_state_agent_pos"},
        wrappers=({"embodied_rl.envs.pusht:FromAgent": {"progress": 100.0, "approach": 50.0}},),
        eval_wrappers=("embodied_rl.envs.pusht:FromAgent",),
        experiment="pusht_ppo",
        steps=100,
        rollout=4096,
        every=5,
        threshold=100,
        n_envs=32,
        normalize=True,
        # The zoo has no PushT: our numbers.
        settings={
            "n_steps": 128,
            "batch_size": 512,
            "gamma": 0.97,
            "gae_lambda": 0.95,
            "n_epochs": 10,
            "learning_rate": [1e-3],
            "clip_range": 0.2,
            "ent_coef": 0.001,
            "policy_kwargs": {"log_std_init": 0.0, "net_arch": [128, 128]},
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
    """A run's evaluations, in seconds from the start of the process, without evaluations."""

    env_steps: list[int] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    start_wall: float
    """Until the first env step."""
    start_cpu: float

    def reached(self, threshold: float) -> int | None:
        """Number of the first evaluation there."""
        return next((number for number, value in enumerate(self.returns) if value >= threshold), None)


def trained(lines: Sequence[Mapping[str, float]], reward_coef: float) -> Trained:
    """Of the lines of a ``race_record.Record``."""
    run = Trained(start_wall=lines[0]["start_wall"], start_cpu=lines[0]["start_cpu"])
    for line in lines:
        run.env_steps.append(int(line["env_steps"]))
        run.wall.append(line["wall"])
        run.cpu.append(line["cpu"])
        run.returns.append(line["return"] / reward_coef)
    return run


def run_command(command: Sequence[str], folder: Path, reward_coef: float, **environment: str) -> Trained:
    """Run what writes a record somewhere below ``folder``."""
    log = folder / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    (record,) = folder.rglob(RECORD_FILE)
    return trained([json.loads(line) for line in record.read_text().splitlines()], reward_coef)


def run_ours(race: Race, seed: int, folder: Path) -> Trained:
    evaluated = "env" if race.eval_wrappers is None else "eval_env"
    command = [
        sys.executable, "train.py", f"experiment={race.experiment}", f"actor.seed={seed}", f"env.seed={seed}",
        f"{evaluated}.seed={seed}", f"{evaluated}.eval.episodes_per_task={EPISODES}",
        f"runner.output_dir={folder}", f"runner.max_steps={race.steps}", f"runner.val_check_interval={race.every}",
        f"{evaluated}.eval.total_num_envs={EPISODES}", "runner.stop_at=null",
        "runner.save_interval=-1", "runner.report=false",
        "runner.logger.logger_backends=[jsonl,benchmarks.race_record:RaceLogger]",
    ]  # fmt: skip
    return run_command(command, folder, race.reward_coef)


def run_sb3(race: Race, seed: int, folder: Path) -> Trained:
    source = folder / "input.json"
    source.write_text(json.dumps(sb3_input(race, seed)))
    command = [sys.executable, "-m", "benchmarks.sb3_train", str(source), str(folder / RECORD_FILE)]
    return run_command(command, folder, 1.0)


def run_cleanrl(clone: Path, race: Race, seed: int, folder: Path) -> Trained:
    source = folder / "input.json"
    source.write_text(json.dumps(cleanrl_input(clone, race, seed)))
    command = [sys.executable, "-m", "benchmarks.cleanrl_train", str(source), str(folder / RECORD_FILE)]
    return run_command(command, folder, 1.0, PYTHONPATH=str(clone / "site"))


def in_our_env(race: Race) -> Race:
    """The race in which SB3, too, has the env of our preset."""
    return replace(race, id=race.our_id or race.id)


def sb3_input(race: Race, seed: int) -> dict[str, Any]:
    """What SB3's side has to know; its held-out episodes are those of our evaluation."""
    return {
        "id": race.id,
        "kwargs": dict(race.kwargs),
        "wrappers": list(race.wrappers),
        "eval_wrappers": list(race.wrappers if race.eval_wrappers is None else race.eval_wrappers),
        "seed": seed,
        "n_envs": race.n_envs,
        "normalize": race.normalize,
        "algorithm": race.algorithm,
        "settings": dict(race.settings),
        "steps": race.steps * race.rollout,
        "eval_every": race.every * race.rollout,
        "eval_seeds": [derived_seed(seed, number, bits=31) for number in range(EPISODES)],
    }


_FLAGS = {
    "n_steps": "num-steps",
    "gamma": "gamma",
    "gae_lambda": "gae-lambda",
    "n_epochs": "update-epochs",
    "ent_coef": "ent-coef",
    "learning_rate": "learning-rate",
    "clip_range": "clip-coef",
    "max_grad_norm": "max-grad-norm",
    "vf_coef": "vf-coef",
}
"""SB3's argument -> CleanRL's."""


def cleanrl_input(clone: Path, race: Race, seed: int) -> dict[str, Any]:
    """What CleanRL's side has to know."""
    race = replace(race, id=race.cleanrl_id or race.id)
    given = sb3_input(race, seed)
    settings = race.settings if race.cleanrl_settings is None else race.cleanrl_settings
    numbers = {flag: settings[name] for name, flag in _FLAGS.items() if name in settings}
    numbers = {flag: value[0] if isinstance(value, list) else value for flag, value in numbers.items()}
    constant_rate = not isinstance(settings.get("learning_rate", []), list)
    if settings:
        samples = race.n_envs * settings["n_steps"]
        numbers["num-minibatches"] = samples // settings.get("batch_size", 64)
    numbers |= {"seed": seed, "num-envs": race.n_envs, "total-timesteps": given["steps"]}
    script = "ppo.py" if race.discrete else "ppo_continuous_action.py"
    return given | {
        "script": str(clone.resolve() / "cleanrl" / script),
        "flags": [
            *(f"--{flag}={value}" for flag, value in numbers.items()),
            "--no-anneal-lr" if constant_rate else "--anneal-lr",
            "--no-cuda",
        ],
    }


HEAD = (
    "env, threshold",
    "trained by",
    "env steps to it",
    "CPU s to it",
    "mean",
    "of SB3's",
    "of these start",
    "without it, of SB3's",
    "wall s to it",
    "CPU s for all",
    "return at the end",
)


def rows(name: str, race: Race, runs: Mapping[str, Sequence[Trained]]) -> list[list[str]]:
    """The table's, one a side."""
    threshold, table = goal(race, runs), []
    theirs = _mean_cpu(runs[SB3], threshold)
    for side, seeds in runs.items():
        at = [(run, run.reached(threshold)) for run in seeds]
        mean, start = _mean_cpu(seeds, threshold), _start(seeds)
        table.append(
            [
                f"{name}, {threshold:.0f}",
                side,
                ", ".join("never" if i is None else f"{run.env_steps[i]:,}" for run, i in at),
                ", ".join("never" if i is None else f"{run.cpu[i]:.1f}" for run, i in at),
                "–" if mean is None else f"{mean:.1f}",
                "–" if mean is None or theirs is None else f"{mean / theirs:.2f}",
                f"{start:.1f}",
                "–" if mean is None or theirs is None else f"{(mean - start) / (theirs - _start(runs[SB3])):.2f}",
                ", ".join("never" if i is None else f"{run.wall[i]:.0f}" for run, i in at),
                f"{statistics.mean(run.cpu[-1] for run in seeds):.0f}",
                ", ".join(f"{run.returns[-1]:.0f}" for run in seeds),
            ]
        )
    return table


def _mean_cpu(seeds: Sequence[Trained], threshold: float) -> float | None:
    """CPU seconds to the threshold; None where a seed never got there."""
    found = [None if (i := run.reached(threshold)) is None else run.cpu[i] for run in seeds]
    return None if None in found else statistics.mean(seconds for seconds in found if seconds is not None)


def _start(seeds: Sequence[Trained]) -> float:
    return statistics.mean(run.start_cpu for run in seeds)


def goal(race: Race, runs: Mapping[str, Sequence[Trained]]) -> float:
    """The return to reach."""
    if race.threshold is not None:
        return race.threshold
    return statistics.mean(run.returns[-1] for run in runs[SB3])


def draw(path: Path, found: Mapping[str, Mapping[str, Sequence[Trained]]]) -> None:
    """A row an env: returns against env steps and against CPU seconds, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(found), 2, figsize=(10, 3 * len(found)), squeeze=False, layout="constrained")
    for row, (name, runs) in zip(panels, found.items(), strict=True):
        for number, (side, seeds) in enumerate(runs.items()):
            for run in seeds:
                style = {"color": f"C{number}", "linewidth": 1.2, "label": side if run is seeds[0] else None}
                row[0].plot([steps / 1000 for steps in run.env_steps], run.returns, **style)
                row[1].plot(run.cpu, run.returns, **style)
        for panel, label in zip(row, ("thousand env steps", "CPU seconds with the start"), strict=True):
            panel.axhline(goal(RACES[name], runs), color="gray", linestyle="--", linewidth=1)
            panel.set_xlabel(label)
            panel.set_xlim(left=0)
            panel.grid(alpha=0.3)
        row[0].set_ylabel("return, 20 held-out episodes")
        row[0].set_title(RACES[name].id, loc="left")
        row[1].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


Sides: TypeAlias = dict[str, Callable[[Race, int, Path], Trained]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sb3_race", description=__doc__)
    parser.add_argument("--env", nargs="+", choices=list(RACES), default=list(RACES), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ... (default 3)")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once, which wall seconds show (default 1)")
    parser.add_argument("--cleanrl", type=Path, metavar="CLONE", help="CleanRL's repository, for PPO: a third side")
    parser.add_argument("--same-env", action="store_true", help="SB3 steps our PushT, too, not the published one")
    parser.add_argument("--output", type=Path, default=ROOT / ".benchmarks" / "sb3_race", help="table, picture, runs")
    options = parser.parse_args()
    console = Console()
    console.width = max(console.width, WIDTH)  # where it is no terminal
    for package in ("embodied_rl", "envs", "models", "benchmarks"):  # as installed packages, SB3 among them, are
        compileall.compile_dir(ROOT / package, quiet=1)
    found: dict[str, dict[str, list[Trained]]] = {}
    table = Table(*HEAD)
    for name in options.env:
        race = in_our_env(RACES[name]) if options.same_env else RACES[name]
        sides: Sides = {OURS: run_ours, SB3: run_sb3}
        if options.cleanrl and race.algorithm == "PPO":
            sides[CLEANRL] = partial(run_cleanrl, options.cleanrl)

        def run_seed(seed: int, name: str = name, race: Race = race, sides: Sides = sides) -> dict[str, Trained]:
            done = {}
            for side, start in sides.items():
                folder = (options.output / name / f"{side}_{seed}_{time.time_ns()}").resolve()
                folder.mkdir(parents=True)
                done[side] = run = start(race, seed, folder)
                console.print(f"{name}, seed {seed}, {side}: {run.returns[-1]:.0f} after {run.cpu[-1]:.0f} CPU s")
            return done

        with ThreadPoolExecutor(options.jobs) as pool:
            seeds = list(pool.map(run_seed, range(options.seeds)))
        found[name] = runs = {side: [seed[side] for seed in seeds] for side in sides}
        for row in rows(name, race, runs):
            table.add_row(*row)
        draw(options.output / "sb3_race.png", found)
        answer = {
            env: {side: [asdict(run) for run in seeds] for side, seeds in runs.items()} for env, runs in found.items()
        }
        (options.output / "sb3_race.json").write_text(json.dumps(answer, indent=1) + "\n")
    console.print(table)
    console.print(
        f"The line is {LINE} of SB3's CPU seconds to the threshold, and a return at the end that is not lower"
    )


if __name__ == "__main__":
    main()
