"""Draw what runs look like in terminals: docs/images/terminal_<run>_<columns>x<lines>.svg. Needs tmux.

    PYTHONPATH=. .venv/bin/python scripts/terminal_pictures.py [RUN ...]

Each run is started in terminals of several sizes, and drawn in its middle and at its end.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

SIZES: Final = ((80, 24), (120, 40), (200, 50))
IMAGES: Final = Path("docs/images")
LIBERO: Final = "env=libero_spatial model=libero_spatial_vla env.task_ids=[0,8] env.train.total_num_envs=16"
RUNS: Final = {
    "dummy": ("experiment=dummy_grpo runner.max_steps=20 runner.val_before_train=true", r"step 1[2-6]/20"),
    "math": ("task=math runner.max_steps=10 data.rollout_batch_size=8 data.eval_size=32", r"\n +6 .*%"),
    "libero": (f"{LIBERO} runner.max_steps=3 runner.val_before_train=true", r"\n +1 .*%"),
    "eval": (f"{LIBERO} runner.only_eval=true env.eval.episodes_per_task=4", r"episode [2-6]/8"),
}
"""Name -> (overrides, what stands on the screen in its middle)."""
END: Final = r"finished: .*(\n.*)*\n\$$"
LIMIT_S: Final = 240
_FONT: Final = re.compile(r"@font-face \{[^}]*\}\s*", re.DOTALL)
"""The pictures are drawn with the reader's own fonts: nothing comes from the network."""


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", "-L", "pictures", *arguments], check=True, capture_output=True, text=True).stdout


def wait_for(pattern: str) -> None:
    """Wait until the pattern stands on the screen."""
    deadline = time.monotonic() + LIMIT_S
    while not re.search(pattern, tmux("capture-pane", "-p", "-t", "run").rstrip("\n")):
        if time.monotonic() > deadline:
            sys.exit(f"{pattern!r} did not appear:\n{tmux('capture-pane', '-p', '-t', 'run')}")
        time.sleep(0.1)


def draw(path: Path, columns: int) -> None:
    screen = tmux("capture-pane", "-e", "-p", "-t", "run").rstrip("\n")
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen), soft_wrap=True)
    picture = console.export_svg(title=path.stem.replace("_", " "), theme=MONOKAI, unique_id=path.stem)
    path.write_text(_FONT.sub("", picture).replace("Fira Code", "ui-monospace, monospace"), encoding="utf-8")
    print(path)


def play(name: str, columns: int, lines: int) -> None:
    overrides, middle = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        where = f"runner.output_dir={folder}/results"
        videos = "" if name == "math" else f" env.eval.video_cfg.video_base_dir={folder}/videos"
        python = f"{Path.cwd()}/.venv/bin/python {Path.cwd()}/train.py"
        tmux("new-session", "-d", "-s", "run", "-x", str(columns), "-y", str(lines), "env PS1='$ ' bash --norc")
        try:
            tmux("send-keys", "-t", "run", f"clear; {python} {overrides} {where}{videos}", "Enter")
            wait_for(middle)
            time.sleep(0.4)
            draw(IMAGES / f"terminal_{name}_{columns}x{lines}.svg", columns)
            wait_for(END)
            if columns == 120:
                draw(IMAGES / f"terminal_{name}_end.svg", columns)
        finally:
            tmux("kill-server")


def main() -> None:
    for name in sys.argv[1:] or RUNS:
        for columns, lines in SIZES:
            play(name, columns, lines)


if __name__ == "__main__":
    main()
