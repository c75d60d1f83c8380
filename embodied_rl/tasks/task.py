"""The declaration of a task. Imports no torch: a mistake is answered before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from embodied_rl.channel.base import RESERVED
from embodied_rl.plan import Arithmetic
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything the rest of the project asks of a task. Each ``tasks/<name>/rules.py`` has one, ``TASK``."""

    config: type[Config]
    """Its configuration: a subclass with its sections."""
    components: tuple[str, ...]
    """Its worker groups, as ``cluster.component_placement`` names them."""
    rules: Callable[[Any, Placement | None], Iterator[str]]
    """(configuration, placement) -> each problem across fields: what was got, why it cannot be, what to do. The
    placement is None where it could not be read, which was said already."""
    arithmetic: Callable[[Any, Placement], Arithmetic] | None
    """(configuration, placement) -> the numbers of a training step; None: nothing is trained."""
    wiring: str
    """``module:Class`` of its :class:`~embodied_rl.tasks.wiring.Wiring`, imported when it runs."""
    language: bool = False
    """Its policy is a language model."""
    imitates: bool = False
    """It trains on demonstrations, which no policy made."""


def trajectory_capacity(*, senders: int, rollout_epochs: int = 1, ahead: int) -> int:
    """Messages that each actor rank's lane of trajectories must hold: the next of each sender, or where rollouts run
    ahead all there may be.

    Whoever runs ahead must be able to hand over all that it has: weights come to it only when it is done, and the actor
    gives them before it takes the next trajectories.

    Args:
        rollout_epochs: messages of each sender in a training step.
        ahead: training steps, at most.
    """
    # With places that are kept for senders who have nothing to send, and one for the mark that there will be no others.
    return senders * (rollout_epochs * (1 + ahead) + RESERVED) + 1 if ahead else senders
