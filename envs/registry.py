"""Simulator names. A new simulator adds one line to :data:`ADAPTERS`."""

from __future__ import annotations

import difflib
import importlib

from embodied_rl.envs.base import SimEnv

ADAPTERS: dict[str, str] = {
    "dummy": "embodied_rl.envs.dummy:DummyEnv",
    "libero": "embodied_rl.envs.libero:LiberoEnv",
}
"""``env_type`` -> "module:Class". Imported on first use, so that a name costs nothing until it is chosen."""


def adapter_class(env_type: str) -> type[SimEnv]:
    """The adapter that ``env_type`` names: a key of :data:`ADAPTERS`, or "some.module:Class" for one of your own.

    Importing an adapter needs neither torch nor its simulator; constructing it needs the simulator.

    Raises:
        ValueError: no such name, or the module has no such class.
        ImportError: the module cannot be imported.
    """
    target = ADAPTERS.get(env_type, env_type)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        close = difflib.get_close_matches(env_type, ADAPTERS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown env_type {env_type!r}.{hint} Known: {', '.join(sorted(ADAPTERS))}; "
            'or name an adapter class of your own as "some.module:Class".'
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(f"env_type {env_type!r}: cannot import module {module_name!r}: {error}") from error
    adapter = getattr(module, class_name, None)
    if not isinstance(adapter, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        close = difflib.get_close_matches(class_name, classes, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"env_type {env_type!r}: module {module_name!r} has no class {class_name!r}.{hint}")
    return adapter
