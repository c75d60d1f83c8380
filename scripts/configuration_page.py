"""Writes docs/configuration.md from the schema's docstrings and the defaults in config/.

Run it after a change of either: ``python scripts/configuration_page.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from embodied_rl import schema
from embodied_rl.cli import CONFIG_MODULE
from embodied_rl.explain.own import documentation

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Every key, with its type and its default: first those of `python train.py task=embodied env=libero_10`, then, for each
other task, what differs from those before: sections of its own and other defaults. Made by
`python scripts/configuration_page.py` from `embodied_rl/schema` and `config/`; a test keeps it current.

Set any key on the command line (`actor.optim.lr=3e-4`), choose groups the same way (`algorithm=ppo`), put what belongs
together into `config/experiment/<name>.yaml` and run it with `experiment=<name>`. `--cfg job` prints what a command
line would run, `--help` lists the groups. A run's `config.yaml` is the resolved configuration.

All mistakes are reported together, before any worker starts: unknown keys with the nearest that exists, wrong types,
combinations that cannot be, and keys that the run would not read.
"""

TABLE = "| key | type | default | |\n|---|---|---|---|"


def rows(section: type, prefix: str, defaults: Any) -> list[str]:
    """Table rows of a section and those below it."""
    lines = []
    for name, (kind, text) in documentation(section).items():
        below = getattr(schema, kind, None)
        value = defaults[name]
        if isinstance(below, type):
            lines += rows(below, f"{prefix}{name}.", value)
        else:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            cells = (f"`{prefix}{name}`", f"`{kind}`", f"`{shown}`", text.replace("``", "`"))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def defaults_of(*overrides: str) -> dict[str, Any]:
    """What ``python train.py <overrides>`` would run, interpolations left as they are written."""
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        found = OmegaConf.to_container(compose("train", overrides=list(overrides)), resolve=False)
    assert isinstance(found, dict)
    return {str(name): section for name, section in found.items()}


def sections(task: str, defaults: dict[str, Any]) -> dict[str, list[str]]:
    """Section -> its table's rows."""
    return {
        name: rows(getattr(schema, kind), f"{name}.", defaults[name])
        for name, (kind, _) in documentation(schema.TASKS[task]).items()
    }


def page() -> str:
    """The whole page."""
    first = sections("embodied", defaults_of("task=embodied", "env=libero_10"))
    parts = [HEAD]
    for name, lines in first.items():
        parts += [f"\n## {name}\n\n{TABLE}", *lines]
    shown = {line for lines in first.values() for line in lines}
    for task in [name for name in schema.TASKS if name != "embodied"]:
        for name, lines in sections(task, defaults_of(f"task={task}")).items():
            own = [line for line in lines if line not in shown]
            shown.update(own)
            if own:
                parts += [f"\n## task={task}: {name}\n\n{TABLE}", *own]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
