"""Evaluation on LIBERO, beside lerobot's own loop (``lerobot-eval``) on the same episodes.

    python -m benchmarks.lerobot_race [--quick] [--json FILE]

Both play four episodes of a task from the same initial states, in two envs at once, each in a process of its own, and
look through two cameras of 256 pixels. The policy plays a fixed script of small motions and costs next to nothing, so
what is measured is the loop around it, with the simulator and the pictures. Counted is from the policy's first look to
its last, without the start, with one reset of each env: as many as there are in episodes of twice that length, the 280
steps of lerobot's horizon. Videos are off. Where the hand was at the end of each episode must agree.

lerobot takes pictures at every step, whether the policy looks or not. Ours takes them where it looks: at every step, or
where a chunk of 8 actions ends. ``draft`` is for policies of one's own; all others have LIBERO's own pictures. CPU time
is that of all processes, and steadier than wall time. Sides take turns in each round; the table shows medians.

lerobot is in ``.venv-lerobot`` (``scripts/lerobot_env.sh``, Python 3.12), with the LIBERO that ours has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.lerobot_eval import CHUNK, ENVS, PIXELS, SUITE, TASK

ROOT: Final = Path(__file__).parents[1]
PYTHON: Final = ROOT / ".venv-lerobot" / "bin" / "python"
HOW_TO_MAKE: Final = "no .venv-lerobot here: PYTHON=python3.12 scripts/lerobot_env.sh makes it (7.4 GB)"
THEIRS: Final = "lerobot"
EPISODES: Final = 2 * ENVS
SAME: Final = 1e-3
"""Metres and radians by which states of the same episode may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What :class:`benchmarks.lerobot_eval.Script` writes."""

    steps_per_second: float
    steps_per_cpu_second: float
    states: list[list[float]]
    """Of each episode, what the policy saw ``CHUNK`` steps before its end."""


Rounds: TypeAlias = Mapping[str, list[Found]]
"""Side -> what each round gave."""


def theirs(steps: int) -> Found:
    return measured(
        lambda file, _: [str(PYTHON), "-m", "benchmarks.lerobot_eval", str(file), str(EPISODES), str(steps)]
    )


def ours(steps: int, chunk: int, *, draft: bool) -> Found:
    return measured(lambda file, folder: [sys.executable, "train.py", *overrides(steps, chunk, draft, file, folder)])


def overrides(steps: int, chunk: int, draft: bool, file: Path, folder: Path) -> list[str]:
    return [
        f"env={SUITE}", f"env.task_ids=[{TASK}]", f"env.eval.total_num_envs={ENVS}",
        f"env.eval.episodes_per_task={EPISODES}", f"env.eval.max_episode_steps={steps}",
        "env.eval.video_cfg.save_video=false", f"env.init_params.camera_heights={PIXELS}",
        f"env.init_params.camera_widths={PIXELS}", f"env.init_params.draft={str(draft).lower()}",
        "model=mlp", "model.model_type=benchmarks.scripted_policy:Scripted", f"model.num_action_chunks={chunk}",
        f"model.params={{file: '{file}', episodes: {EPISODES}, steps: {steps}}}",
        f"cluster.component_placement.env=0-{ENVS - 1}", "rollout.pipeline_stage_num=1",
        "runner.only_eval=true", f"runner.output_dir={folder}", "runner.report=false",
    ]  # fmt: skip


def measured(command: Callable[[Path, Path], list[str]]) -> Found:
    """What the command, of a file to write to and a folder for all else, writes. Its processes are a session."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment.setdefault("MUJOCO_GL", "egl")
        done = subprocess.run(
            (words := command(file, Path(folder, "run"))),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        if done.returncode or not file.exists():
            sys.exit(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return Found(**json.loads(file.read_text()))


def sides(steps: int) -> dict[str, Callable[[], Found]]:
    found: dict[str, Callable[[], Found]] = {
        "a look a step": lambda: ours(steps, 1, draft=False),
        f"a look every {CHUNK} steps": lambda: ours(steps, CHUNK, draft=False),
        f"a look every {CHUNK} steps, draft": lambda: ours(steps, CHUNK, draft=True),
    }
    return {THEIRS: lambda: theirs(steps), **found} if PYTHON.exists() else found


def apart(one: Found, other: Found) -> float:
    """The largest difference of their episodes' states."""
    return float(np.abs(np.array(sorted(one.states)) - np.array(sorted(other.states))).max())


def compared(answer: Mapping[str, list[dict[str, Any]]]) -> dict[str, float]:
    if THEIRS not in answer:
        return {}
    kinds = {"steps/s": "steps_per_second", "steps of a CPU second": "steps_per_cpu_second"}
    return {
        f"{side}: {what} by lerobot's": median(a[key] / b[key] for a, b in zip(rounds, answer[THEIRS], strict=True))
        for side, rounds in answer.items()
        for what, key in kinds.items()
        if side != THEIRS
    }


def show(found: Rounds, steps: int) -> Table:
    what = f"{SUITE} task {TASK}, {EPISODES} episodes of {steps} steps, {ENVS} envs, two cameras of {PIXELS}"
    table = Table("", title=what)
    for column in ("env steps/s", "of a CPU second"):
        table.add_column(column, justify="right")
    for side, rounds in found.items():
        rates = [[row.steps_per_second for row in rounds], [row.steps_per_cpu_second for row in rounds]]
        cells = [f"{median(some):.1f} ({min(some):.1f} to {max(some):.1f})" for some in rates]
        table.add_row(side if side == THEIRS else f"embodied_rl, {side}", *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lerobot_race", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, shorter episodes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's numbers there")
    options = parser.parse_args()
    rounds, steps = (1, 40) if options.quick else (3, 144)
    taking_part = sides(steps)
    found: dict[str, list[Found]] = {side: [] for side in taking_part}
    for _ in range(rounds):
        for side, measure in taking_part.items():
            found[side].append(measure())
            print(f"{side}: {found[side][-1].steps_per_second:.1f} env steps/s", file=sys.stderr)
            first = next(iter(found.values()))[0]
            if (difference := apart(found[side][-1], first)) > SAME:
                sys.exit(f"{side}: its episodes went elsewhere than those of {next(iter(found))}, by {difference:.3g}")
    Console().print(show(found, steps))
    if THEIRS not in found:
        print(f"lerobot's loop is not timed: {HOW_TO_MAKE}")
    if options.json:
        answer = {side: [asdict(row) for row in rows] for side, rows in found.items()}
        options.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
