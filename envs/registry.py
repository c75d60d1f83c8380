"""Simulator names. A new simulator adds one line to :data:`ADAPTERS`."""

from __future__ import annotations

from embodied_rl.envs.base import SimEnv
from embodied_rl.registry import load_configurable

ADAPTERS: dict[str, str] = {
    "dummy": "embodied_rl.envs.dummy:DummyEnv",
    "libero": "embodied_rl.envs.libero.adapter:LiberoEnv",
    "maniskill": "embodied_rl.envs.maniskill:ManiSkillEnv",
    "robosuite": "embodied_rl.envs.robosuite:RobosuiteEnv",
}
"""``env_type`` -> "module:Class"."""


def adapter_class(env_type: str) -> type[SimEnv]:
    """The adapter that ``env_type`` names: a key of :data:`ADAPTERS`, or "some.module:Class" for one of your own.

    Importing an adapter needs neither torch nor its simulator; constructing it needs the simulator.

    Raises:
        UserError: no such name, module or class, or one without ``Params``.
    """
    return load_configurable("env.env_type", ADAPTERS, env_type)
