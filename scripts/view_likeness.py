"""How alike the pictures are with which episodes of envs begin: docs/evaluation.md, "What the policy sees".

    python scripts/view_likeness.py libero_spatial libero_10 metaworld_mt10

Of ten of each env's tasks, spread over all, a policy would have learned from the first initial state, and sees the
sixth: of its own env as it is, turned by 180 degrees and upside down; of another env of the same simulator as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from embodied_rl.composition import env_of
from embodied_rl.envs.base import adapter_class
from embodied_rl.envs.reset_states import task_ranges
from embodied_rl.evaluation.views import Views, compare, spread
from embodied_rl.params import parse_params

TASKS, LEARNED, SEEN = 10, 0, 5
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "libero": {"draft": True, "max_cached_scenes": 1},
    "metaworld": {"cameras": ["corner2", "corner", "topview", "gripperPOV"]},
}
"""Simulator -> its options."""


def views_of(preset: str) -> dict[int, Views]:
    """What is seen in initial state number :data:`LEARNED` of the tasks, and in :data:`SEEN`."""
    env = env_of(preset, OPTIONS.get(str(env_of(preset, {}).env_type), {}))
    adapter = adapter_class(env.env_type)
    sim = adapter(1, parse_params(adapter.Params, env.init_params, "env.init_params"), env.seed)  # type: ignore[call-arg]
    tasks = list(task_ranges(sim).values())
    found: dict[int, list[Views]] = {LEARNED: [], SEEN: []}
    for number in spread(np.arange(len(tasks)), TASKS):
        for state, parts in found.items():
            sim.reset([0], [tasks[number][state]])
            parts.append(Views.of(sim.observe([0]).images))
    sim.close()
    return {state: whole for state, parts in found.items() if (whole := Views.merged(parts)) is not None}


def changed(views: Views, step: int) -> Views:
    """Upside down; with ``step`` -1 mirrored, too: turned."""
    return replace(views, cameras={name: pictures[:, ::-1, ::step] for name, pictures in views.cameras.items()})


def main() -> None:
    presets = sys.argv[1:]
    found = {preset: views_of(preset) for preset in presets}
    table = Table("learned from", "sees", "how", "likeness by camera", "taken for", width=200)
    for learned, theirs in found.items():
        for seen, ours in found.items():
            ways = {"as it is": ours[SEEN]}
            if learned == seen:
                ways |= {"turned": changed(ours[SEEN], -1), "upside down": changed(ours[SEEN], 1)}
            for how, views in ways.items():
                if compared := compare(theirs[LEARNED], views):
                    shown = ", ".join(f"{camera} {one.likeness:.2f}" for camera, one in compared.items())
                    taken = {
                        one.explanation or ("something else" if one.differs else "the same")
                        for one in compared.values()
                    }
                    table.add_row(learned, seen, how, shown, ", ".join(sorted(taken)))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
