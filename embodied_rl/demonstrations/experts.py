"""Which env has an expert. A new expert adds one line to :data:`EXPERTS`. Importing this needs no simulator."""

from __future__ import annotations

from typing import cast

from embodied_rl.demonstrations.expert import Expert
from embodied_rl.errors import UserError, suggestion
from embodied_rl.registry import load_class

EXPERTS: dict[str, str] = {
    "dummy": "embodied_rl.envs.dummy:DummyExpert",
    "libero": "embodied_rl.envs.libero.expert.expert:LiberoExpert",
}
"""``env_type`` -> "module:Class"."""


def expert_class(env_type: str) -> type[Expert]:
    """The expert for the envs of ``env_type``.

    Raises:
        UserError: this env has no expert.
    """
    if env_type not in EXPERTS:
        raise UserError(
            f"no scripted expert plays env_type {env_type!r}, so it gives no demonstrations; there is one for "
            f"{', '.join(sorted(EXPERTS))}.{suggestion(env_type, EXPERTS)}"
        )
    return cast(type[Expert], load_class("env.env_type", EXPERTS, env_type))
