"""Walk through docs/tutorial.md, or another page, as a new user does: write its files, run its commands.

    PYTHONPATH=. .venv/bin/python scripts/new_user_walk.py [FOLDER [PAGE]]

They are its blocks under ``<!-- walk -->``, in their order, done in an empty folder (default: a temporary one) that has
nothing of the checkout but ``train.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs/tutorial.md"
_BLOCK: Final = re.compile(r"^<!-- walk -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def walk(folder: Path, page: Path = PAGE) -> None:
    """Do everything of ``page`` in ``folder``.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    (folder / "train.py").symlink_to(ROOT / "train.py")
    for language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            print(text.strip(), flush=True)
            python = f'python() {{ command "{sys.executable}" "$@"; }}\nembodied-rl() {{ python train.py "$@"; }}\n'
            subprocess.run(["bash", "-euo", "pipefail", "-c", python + text], cwd=folder, check=True)
            continue
        name, content = text.removeprefix("# ").split("\n", 1)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def main() -> None:
    if sys.argv[1:]:
        walk(*(Path(argument).resolve() for argument in sys.argv[1:]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            walk(Path(folder))


if __name__ == "__main__":
    main()
