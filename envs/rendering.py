"""MuJoCo's pictures for robosuite and LIBERO, and one message for whatever a simulator lacks."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from embodied_rl.errors import UserError
from embodied_rl.extras import install_command

_APT_PACKAGES = {"egl": "libegl1 libgl1 libglib2.0-0", "osmesa": "libosmesa6 libgl1 libglib2.0-0"}
"""Debian packages for each value of MUJOCO_GL."""
_RENDERERS = {"egl": ("libEGL.so.1",), "osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")}
"""Libraries for each value of MUJOCO_GL, one of which it needs."""
_IMPORTED = (("libGL.so.1",), ("libglib-2.0.so.0",))
"""Libraries that OpenCV, which robosuite imports, usually needs."""


class SimulatorMissingError(UserError, ImportError):
    """A simulator, or a graphics library that it needs, is not installed."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what a simulator prints and warns of."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def importing_robosuite(simulator: str) -> Iterator[None]:
    """Import robosuite, or ``simulator`` that builds on it: ``MUJOCO_GL`` is "egl" where it is unset (Linux)."""
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # robosuite would read it as a list of numbers and fail.
            os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", "0")
    # It greets every import with three warnings about a file of private settings that nobody needs.
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    # Once imported it has compared EGL's number with CUDA's visible ones, which are counted in another order.
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None) if "MUJOCO_EGL_DEVICE_ID" in os.environ else None
    try:
        with explain_missing(simulator), quiet():
            yield
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def render_context(simulator: str, sim: Any, height: int, width: int) -> Any:
    """A rendering context of robosuite's simulation ``sim``, for pictures of at most this size."""
    buffer = sim.model._model.vis.global_
    buffer.offheight, buffer.offwidth = height, width
    with explain_missing(simulator), quiet():
        from robosuite.utils.binding_utils import MjRenderContextOffscreen

        context = MjRenderContextOffscreen(sim, device_id=-1, max_width=width, max_height=height)
    context.vopt.geomgroup[0], context.vopt.geomgroup[1] = 0, 1  # Visual meshes, no collision shapes.
    return context


def missing_package(simulator: str, error: ModuleNotFoundError) -> SimulatorMissingError:
    """The error that names the package and the command that installs it.

    Args:
        simulator: its name; in lower case that of its extra and ``env_type``.
    """
    name = simulator.lower()
    if (error.name or "").partition(".")[0].replace("_", "") == name:
        needed = f"env_type {name!r} needs the simulator {simulator}"
    else:
        needed = f"{simulator} needs the Python package {error.name!r}"
    return SimulatorMissingError(f"{needed}, which is not installed: {install_command(name)}")


@contextlib.contextmanager
def explain_missing(simulator: str) -> Iterator[None]:
    """Turn an import error, or what a missing graphics library causes, into one message with the command that helps."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_package(simulator, error) from error
    except Exception as error:
        # OpenCV reports a missing library as an ImportError, PyOpenGL as an AttributeError of None: look for ourselves.
        no_device = "EGL device display" in str(error)
        missing = _missing_libraries((_RENDERERS.get(_backend(), ()), *_IMPORTED))
        if missing or no_device:
            raise _cannot_render(simulator, missing) from error
        raise


def prefer_egl() -> None:
    """Set ``MUJOCO_GL`` to "egl" where it is unset and EGL is there (Linux): MuJoCo's own choice needs a screen."""
    if sys.platform == "linux" and not _missing_libraries((_RENDERERS["egl"],)):
        os.environ.setdefault("MUJOCO_GL", "egl")


def require_renderer(simulator: str) -> None:
    """Raise SimulatorMissingError where nothing can be rendered, before a scene is built for nothing."""
    missing = _missing_libraries((_RENDERERS.get(_backend(), ()),))
    if missing:
        raise _cannot_render(simulator, missing)


def _backend() -> str:
    return os.environ.get("MUJOCO_GL", "").lower()


def _missing_libraries(needed: Iterable[tuple[str, ...]]) -> list[str]:
    """The first of each tuple of alternatives none of which can be loaded."""
    return [names[0] for names in needed if names and not any(_loadable(name) for name in names)]


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _cannot_render(simulator: str, missing: list[str]) -> SimulatorMissingError:
    reason = f"cannot load {', '.join(missing)}" if missing else "EGL finds no device to render on"
    return SimulatorMissingError(
        f"{simulator} cannot render with MUJOCO_GL={_backend()}: {reason}. On Debian or Ubuntu: "
        f"apt-get install -y --no-install-recommends {_APT_PACKAGES.get(_backend(), _APT_PACKAGES['egl'])}"
    )
