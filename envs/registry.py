"""Simulator names. A new simulator adds one line to :data:`ADAPTERS`."""

from __future__ import annotations

from typing import Final

from embodied_rl.envs.base import SimEnv
from embodied_rl.registry import Registry

ADAPTERS: Final = Registry(
    "env.env_type",
    {
        "dummy": "embodied_rl.envs.dummy:DummyEnv",
        "libero": "embodied_rl.envs.libero.adapter:LiberoEnv",
        "maniskill": "embodied_rl.envs.maniskill:ManiSkillEnv",
        "robosuite": "embodied_rl.envs.robosuite:RobosuiteEnv",
    },
    group="embodied_rl.envs",
    needs_params=True,
)
"""``env_type`` -> "module:Class"."""


def adapter_class(env_type: str) -> type[SimEnv]:
    """The adapter that ``env_type`` names, built-in or from outside (:mod:`embodied_rl.registry`).

    Importing an adapter needs neither torch nor its simulator; constructing it needs the simulator.

    Raises:
        UserError: no such name, module or class, or one without ``Params``.
    """
    return ADAPTERS.load(env_type)
