"""Writes docs/configuration.md from the schema's docstrings and the defaults in config/.

Run it after a change of either: ``python scripts/configuration_page.py``.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from embodied_rl import schema
from embodied_rl.cli import CONFIG_MODULE

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Every key, with its type and its default for `python train.py task=embodied env=libero_10`. Made by
`python scripts/configuration_page.py` from `embodied_rl/schema.py` and `config/`; a test keeps it current.

Set any key on the command line (`actor.optim.lr=3e-4`), choose groups the same way (`algorithm=ppo`), put what belongs
together into `config/experiment/<name>.yaml` and run it with `experiment=<name>`. `--cfg job` prints what a command
line would run, `--help` lists the groups. A run's `config.yaml` is the resolved configuration.

All mistakes are reported together, before any worker starts: unknown keys with the nearest that exists, wrong types,
combinations that cannot be, and keys that the run would not read.
"""


def documentation(section: type) -> dict[str, tuple[str, str]]:
    """Field -> (type, docstring) of a schema dataclass."""
    [definition] = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            name = node.target.id
            found[name] = (ast.unparse(node.annotation), "")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = (found[name][0], " ".join(str(node.value.value).split()))
    return found


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


def page() -> str:
    """The whole page."""
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        defaults = OmegaConf.to_container(compose("train", overrides=["task=embodied", "env=libero_10"]), resolve=True)
    assert isinstance(defaults, dict)
    parts = [HEAD]
    for name, (kind, _) in documentation(schema.Config).items():
        parts.append(f"\n## {name}\n\n| key | type | default | |\n|---|---|---|---|")
        parts += rows(getattr(schema, kind), f"{name}.", defaults[name])
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
