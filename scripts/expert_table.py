"""Success and episode lengths of a scripted expert, task by task. See docs/experts.md.

Usage: python scripts/expert_table.py ENV [--episodes 50] [--tasks 0,3] [--noise SEED] [--steps N] [--out FILE]
           [--markdown]

ENV is a file of config/env, for example libero_spatial. Nothing is rendered. With --out each episode is a line of FILE,
and those that FILE has already are not played again: an interrupted table goes on. Delete FILE when the expert
changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import rich
from rich.console import Console

from embodied_rl.cli import config_of
from embodied_rl.contracts import EpisodeRecord
from embodied_rl.demonstrations.expert import expert_class
from embodied_rl.demonstrations.play import play_expert, spread_states
from embodied_rl.envs.base import adapter_class
from embodied_rl.errors import UserError
from embodied_rl.evaluation.success import SuccessReport, SuccessTable, success_table
from embodied_rl.monitoring.progress import Progress
from embodied_rl.params import parse_params
from embodied_rl.schema import CollectConfig

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Control steps of published evaluations."""

ENVS = sorted(file.stem for file in (Path(__file__).parents[1] / "config/env").glob("*.yaml"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", choices=ENVS, metavar="ENV", help=", ".join(ENVS))
    parser.add_argument("--episodes", type=int, default=50, help="initial states a task")
    parser.add_argument("--tasks", type=lambda text: [int(t) for t in text.split(",")], help="default: all")
    parser.add_argument("--noise", type=int, metavar="SEED", help="noise as in demonstrations; default: none")
    parser.add_argument("--steps", type=int, help="horizon; default: the suite's published one")
    parser.add_argument("--out", type=Path, help="file of lines of JSON, one an episode")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    arguments = parser.parse_args()
    try:
        records = play(arguments)
    except (UserError, ValueError) as error:
        parser.error(str(error))
    table = success_table(records)
    if arguments.markdown:
        print(markdown(table))
    else:
        rich.print(SuccessReport(table, title=f"{arguments.env}, scripted expert"))


def markdown(table: SuccessTable) -> str:
    """Success, 95 % Wilson interval and mean steps of each task and of all."""
    lines = ["| task | instruction | success | 95 % interval | steps |", "|---|---|---|---|---|"]
    for row in (*table.tasks, table.overall):
        task = "all" if row.task_id is None else row.task_id
        low, high = (100 * end for end in row.interval)
        lines.append(
            f"| {task} | {row.instruction} | {row.successes}/{row.episodes} | {low:.1f} – {high:.1f} % "
            f"| {row.mean_length:.0f} |"
        )
    return "\n".join(lines)


def play(arguments: argparse.Namespace) -> list[EpisodeRecord]:
    found = config_of("task=collect", f"env={arguments.env}")
    assert isinstance(found, CollectConfig)
    config = found.env
    steps = arguments.steps or HORIZONS.get(arguments.env)
    if steps is None:
        raise UserError(f"--steps: {arguments.env} has no published horizon; say after how many steps an episode fails")
    expert_type, env_type = expert_class(config.env_type), adapter_class(config.env_type)
    stateless = {"cameras": []} if "cameras" in {field.name for field in dataclasses.fields(env_type.Params)} else {}
    params = parse_params(env_type.Params, config.init_params | stateless, "env.init_params")
    env = env_type(1, params, config.seed)  # type: ignore[call-arg]  # every adapter's signature
    kind = {"env": arguments.env, "max_episode_steps": steps, "noise_seed": arguments.noise}
    out: Path | None = arguments.out
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    records = _read(out, kind)
    states = spread_states(env, arguments.tasks, arguments.episodes)
    expert = expert_type(env)
    # The console of standard error, so that the table alone can be redirected.
    with Progress(len(states), console=Console(stderr=True)) as progress:
        for state in states:
            if state not in records:
                record = play_expert(env, expert, state, max_steps=steps, noise_seed=arguments.noise)
                records[state] = record
                if out is not None:
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(kind | dataclasses.asdict(record)) + "\n")
            won = sum(records[other].success for other in states if other in records)
            progress.describe(f"of task {env.task(state).task_id}, {won} succeeded")
            progress.advance()
    env.close()
    return [records[state] for state in states]


def _read(path: Path | None, kind: dict[str, Any]) -> dict[int, EpisodeRecord]:
    """Reset state -> its episode in the file."""
    records = {}
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            played = {name: entry.pop(name) for name in kind}
            if played != kind:
                raise UserError(f"--out: {path} has episodes of {played}, expected {kind}; name another file")
            records[entry["reset_state_id"]] = EpisodeRecord(**entry)
    return records


if __name__ == "__main__":
    main()
