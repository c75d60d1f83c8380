"""The expert protocol: what writes demonstrations for policies that see only pictures."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.base import SimEnv


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
            generator: where the noise comes from, which makes demonstrations diverse and shows the way back from small
                errors. None: no noise. With equal states of the generator episodes are equal.

        Raises:
            RuntimeError: the slot was never reset.
        """
        ...
