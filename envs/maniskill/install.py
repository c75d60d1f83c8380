"""Importing ManiSkill quietly, running it where nothing can render, and saying clearly what is missing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from embodied_rl.envs.libero.install import SimulatorMissingError
from embodied_rl.errors import UserError, suggestion
from embodied_rl.extras import install_command

CANNOT_RENDER = (
    "ManiSkill cannot render: no usable Vulkan driver. With a GPU install its Vulkan driver, without one Mesa's "
    "lavapipe, release 24 or newer (Ubuntu: apt-get install libvulkan1 mesa-vulkan-drivers; Debian 12: see "
    "docs/maniskill.md). "
    "States alone need none: env.init_params.obs_mode=state env.eval.video_cfg.save_video=false"
)


@functools.cache
def import_maniskill() -> None:
    """Import ManiSkill; where no device can render, with stand-ins for the renderer. Safe to call often.

    Raises:
        SimulatorMissingError: with the command that installs what is missing.
    """
    os.environ.setdefault("MS_RENDERER_LOG_LEVEL", "error")
    try:
        with quiet():
            importlib.import_module("mani_skill.envs")
    except ModuleNotFoundError as error:
        raise SimulatorMissingError(
            f"env_type 'maniskill' needs the Python package {error.name!r}, which is not installed: "
            f"{install_command('maniskill')}"
        ) from error
    logging.getLogger("mani_skill ").setLevel(logging.ERROR)  # The space is ManiSkill's.
    if not can_render():
        _replace_renderer()


@functools.cache
def can_render() -> bool:
    """Whether SAPIEN finds a Vulkan device that it can render on. Asked once a process."""
    import sapien.render

    sapien.render.set_log_level("off")  # Every ManiSkill env sets it again.
    try:
        sapien.render.RenderMaterial()  # Every object of a scene has one, rendered or not.
    except RuntimeError:
        return False
    return True


def find_task(env_id: str) -> Any:
    """ManiSkill's ``EnvSpec`` of a task whose assets are all here.

    Raises:
        UserError: no such task, or one that needs a download: ManiSkill itself would ask for it on standard input.
    """
    from mani_skill.utils import assets
    from mani_skill.utils.registration import REGISTERED_ENVS

    if env_id not in REGISTERED_ENVS:
        raise UserError(
            f"env.init_params.env_id: ManiSkill has no task {env_id!r}." + suggestion(env_id, REGISTERED_ENVS)
        )
    spec = REGISTERED_ENVS[env_id]
    missing = []
    for asset in spec.asset_download_ids or []:
        parts = (
            assets.expand_data_group_into_individual_data_source_ids(asset) if asset in assets.DATA_GROUPS else [asset]
        )
        missing += [part for part in parts if not assets.is_data_source_downloaded(part)]
    if missing:
        raise _assets_missing(env_id, missing)
    return spec


@contextlib.contextmanager
def explain_build(env_id: str) -> Iterator[None]:
    """While a task is built: no questions on standard input, no chatter, and one message for what cannot be built."""
    from mani_skill.utils import download_asset

    def refuse(message: str) -> bool:
        robot = message.split(" has assets")[0].removeprefix("Robot ")
        raise _assets_missing(robot, [robot])

    ask = download_asset.prompt_yes_no
    download_asset.prompt_yes_no = refuse
    try:
        with quiet():
            yield
    except (UserError, MemoryError):
        raise
    except AssertionError as error:
        if "not in supported modes" not in str(error):
            raise
        wrong, _, modes = str(error).partition(" not in supported modes: ")
        raise UserError(f"env.init_params.control_mode: {env_id} has no {wrong!r}, only {modes}") from error
    except NotImplementedError as error:
        raise UserError(f"{env_id}: ManiSkill says: {error}") from error
    except Exception as error:
        if can_render():
            raise
        raise UserError(f"{env_id} needs the renderer even for states ({error}). {CANNOT_RENDER}") from error
    finally:
        download_asset.prompt_yes_no = ask


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what ManiSkill and SAPIEN print and warn of."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _assets_missing(name: str, missing: list[str]) -> UserError:
    return UserError(
        f"ManiSkill's {name} needs assets that are not here "
        f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}); "
        f"get them with: python -m mani_skill.utils.download_asset {name}"
    )


def _replace_renderer() -> None:
    """Let tasks be built without a renderer.

    Tasks make materials and visual shapes while they build their scene, whether or not anything is rendered, and
    SAPIEN's constructors ask for a Vulkan device. Physics takes only the collision shapes, so here materials become
    objects that swallow everything, and no entity gets a visual shape. States are those of an env with a renderer.
    """
    import sapien.render
    from sapien.wrapper.actor_builder import ActorBuilder

    os.environ["MS_RENDERER_LOG_LEVEL"] = "off"
    material = sapien.render.RenderMaterial
    for name, module in list(sys.modules.items()):
        if name.startswith(("sapien", "mani_skill")) and vars(module).get("RenderMaterial") is material:
            vars(module)["RenderMaterial"] = _Swallow
    builder: Any = ActorBuilder
    builder.build_render_component = lambda self: None


class _Swallow:
    """Any attribute is a function that takes everything and gives another one of these."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> _Swallow:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Swallow()

    def __call__(self, *args: object, **kwargs: object) -> _Swallow:
        return _Swallow()
