"""Experts, which write demonstrations for policies that see only pictures: the protocol, and a table of them.

A new expert adds one line to :data:`EXPERTS`. Importing this needs no torch and no simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.base import SimEnv
from embodied_rl.errors import UserError, suggestion
from embodied_rl.params import parse_params
from embodied_rl.registry import Registry

EXPERTS: Final = Registry(
    "collect.expert",
    {
        "dummy": "embodied_rl.envs.dummy:DummyExpert",
        "libero": "embodied_rl.envs.libero.expert:LiberoExpert",
        "metaworld": "embodied_rl.envs.metaworld:MetaworldExpert",
    },
    group="embodied_rl.experts",
)
"""``env_type`` -> "module:Class"."""


class Expert(Protocol):
    """Chooses actions from privileged state, one env slot at a time.

    Construct as ``SomeExpert(env)`` where ``env`` is the simulator adapter that it looks into; the expert never steps
    or resets it. Slots are independent and may take turns in any order::

        expert = expert_class("libero")(env)
        env.reset([slot], [reset_state_id])
        expert.reset(slot)
        while not done:
            action = expert.act(slot, generator)
            outcome = env.step([slot], action[None])
    """

    def __init__(self, env: SimEnv) -> None: ...

    def reset(self, slot: int) -> None:
        """A new episode begins in this env slot. Call it after the env's own reset."""
        ...

    def act(self, slot: int, generator: np.random.Generator | None) -> NDArray[np.float32]:
        """The action for the slot's present state: [A] in [-1, 1], in the env's convention.

        Call it once for every control step: it also moves the slot's plan on. The action is the one to execute *and*
        to record.

        Args:
            slot: an env slot that was reset.
            generator: source of the noise, which makes demonstrations diverse and shows the way back from small
                errors. None: no noise. With equal states of the generator episodes are equal.

        Raises:
            RuntimeError: the slot was never reset.
        """
        ...


def expert_class(env_type: str, name: str | None = None) -> type[Expert]:
    """The expert for the envs of ``env_type``.

    Args:
        name: of another one, built-in or from outside (:mod:`embodied_rl.registry`).

    Raises:
        UserError: this env has no expert, or there is none of this name.
    """
    if name is None and env_type not in (known := EXPERTS.names()):
        raise UserError(
            f"no scripted expert plays env_type {env_type!r}, so it gives no demonstrations; there is one for "
            f"{', '.join(known)}, and collect.expert takes one of your own.{suggestion(env_type, known)}"
        )
    return EXPERTS.load(name or env_type)


def expert_options(expert: type[Expert], params: Mapping[str, Any]) -> tuple[Any, ...]:
    """The expert's constructor's arguments after the env: its ``Params``, where it has some.

    Raises:
        UserError: options that the expert does not have.
    """
    schema = getattr(expert, "Params", None)
    if schema is not None:
        return (parse_params(schema, params, "collect.expert_params"),)
    if params:
        raise UserError(
            f"collect.expert_params: got {', '.join(params)}, but the class {expert.__name__} has no dataclass Params, "
            "so it has no options"
        )
    return ()


def make_expert(env: SimEnv, env_type: str, name: str | None, params: Mapping[str, Any]) -> Expert:
    """Construct the expert of :func:`expert_class` for ``env``, with its options."""
    expert: Any = expert_class(env_type, name)
    return expert(env, *expert_options(expert, params))
