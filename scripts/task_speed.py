"""How fast each task of ManiSkill and robosuite plays on one core, and why some do not: docs/simulator_tasks.csv.

Usage: python scripts/task_speed.py [TASK ...]      (all, which takes some minutes; or only those named)

Each task plays in a process of its own, from states, with random actions. Then ``python scripts/reference_pages.py``
makes docs/simulator_tasks.md of the file.
"""

from __future__ import annotations

import csv
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "docs/simulator_tasks.csv"
COLUMNS: Sequence[str] = ("simulator", "task", "settings", "actions", "states", "steps_per_s", "reset_ms", "reason")
CONTROL_MODES = ("pd_ee_delta_pos", "pd_joint_delta_pos", "pd_joint_delta_pos_arm", "pd_joint_pos")
REWARD_MODES = ("normalized_dense", "sparse")
STEPS, RESETS, LIMIT = 100, 5, 240
"""Steps and resets that are timed, after as many that are not; seconds that a task may take."""


def known_tasks() -> list[tuple[str, str]]:
    """(simulator, task) of all that the installed packages have."""
    from embodied_rl.envs.maniskill import import_maniskill
    from embodied_rl.envs.robosuite import INSTRUCTIONS, import_robosuite

    import_maniskill()
    import_robosuite()
    from mani_skill.utils.registration import REGISTERED_ENVS
    from robosuite.environments import base

    # LIBERO registers its own there, too.
    others = sorted(name for name, kind in base.REGISTERED_ENVS.items() if kind.__module__.startswith("robosuite."))
    tasks = dict.fromkeys([*INSTRUCTIONS, *others])
    return [("maniskill", task) for task in sorted(REGISTERED_ENVS)] + [("robosuite", task) for task in tasks]


def candidates(simulator: str, task: str) -> Iterator[dict[str, str]]:
    """``env.init_params`` beyond the task, those of the preset first."""
    if simulator == "robosuite":
        yield {}
        return
    for control, reward in product(CONTROL_MODES, REWARD_MODES):
        changed = {"control_mode": control, "reward_mode": reward}
        yield {key: value for key, value in changed.items() if value not in (CONTROL_MODES[0], REWARD_MODES[0])}


def measure(simulator: str, task: str) -> dict[str, Any]:
    """A row of the file; ``reason`` where the task does not play."""
    from embodied_rl.envs.robosuite import UNPLAYED
    from embodied_rl.errors import UserError, first_line

    if simulator == "robosuite" and task in UNPLAYED:
        return {"reason": UNPLAYED[task]}
    reason = ""
    for settings in candidates(simulator, task):
        try:
            return timed(simulator, task, settings)
        except Exception as error:  # Whatever a simulator raises is what the table has to say.
            reason = first_line(error)
            if not isinstance(error, UserError) or not any(word in reason for word in ("control_mode", "reward mode")):
                break
    return {"reason": shortened(task, reason)}


def shortened(task: str, reason: str) -> str:
    """What a task needs, without this machine's folders."""
    if found := re.search(r"download_asset (?!--)([\w-]+)", reason):
        return "the download of its own name" if found[1] == task else f"the download `{found[1]}`"
    if "No such file" in reason:
        return "the download of a scene (`--list scene`)"
    if "needs the renderer" in reason:
        return "a graphics driver, even for states"
    if "robots" in reason:
        return "a policy for several robots"
    if "reward mode" in reason:
        return "a reward: the task has none"
    if "not installed" in reason:
        return "the package svgpathtools"
    return re.sub(r"^.*?(needs something that is not here: |ManiSkill says: )|\. Its downloads.*", "", reason)


def timed(simulator: str, task: str, settings: dict[str, str]) -> dict[str, Any]:
    import numpy as np
    import torch

    from embodied_rl.envs.base import adapter_class
    from embodied_rl.params import parse_params

    torch.set_num_threads(1)
    build: Any = adapter_class(simulator)
    name = "env_id" if simulator == "maniskill" else "task"
    sim = build(1, parse_params(build.Params, {name: task, **settings}, "env.init_params"), 0)
    actions = np.random.default_rng(0).uniform(-1, 1, (2 * STEPS, 1, sim.action_dim)).astype(np.float32)
    sim.reset([0], [0])
    for action in actions[:STEPS]:
        sim.step([0], action)
    begun = time.process_time()
    for state in range(RESETS):
        sim.reset([0], [state])
    between = time.process_time()
    for action in actions[STEPS:]:
        sim.step([0], action)
    ended = time.process_time()
    return {
        "settings": " ".join(f"{key}={value}" for key, value in settings.items()),
        "actions": sim.action_dim,
        "states": sim.state_dim,
        "steps_per_s": round(STEPS / (ended - between)),
        "reset_ms": round(1000 * (between - begun) / RESETS),
    }


def apart(simulator: str, task: str) -> dict[str, Any]:
    """:func:`measure` in a process of its own: a simulator may crash or hang."""
    context = multiprocessing.get_context("fork")  # What takes long to import is imported.
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(measure(simulator, task)))
    child.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(LIMIT) else {"reason": f"does not finish {2 * STEPS} steps in {LIMIT} s"}
    except EOFError:
        child.join()
        found = {"reason": f"its process ends with exit status {child.exitcode}"}
    child.kill()
    child.join()
    return {"simulator": simulator, "task": task, **found}


def main(arguments: Sequence[str]) -> None:
    known = known_tasks()
    old = {(row["simulator"], row["task"]): row for row in csv.DictReader(FILE.open())} if FILE.exists() else {}
    for key in known:
        if key not in old or not arguments or key[1] in arguments:
            old[key] = apart(*key)
            print(old[key], flush=True)
        rows = [old[each] for each in known if each in old]
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
