"""From where the hand should be to OSC_POSE actions. Pure functions of poses: no simulator here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied_rl.envs.libero.expert.geometry import Vector, rotation_vector

OPEN, CLOSE = -1.0, 1.0
_TRANSLATION = 0.05
"""Metres that an action of 1 means."""
_ROTATION = 0.5
"""Radians that an action of 1 means."""
_GAIN = 3.0
_DAMPING = 4.0
"""In steps. OSC_POSE moves its goal with the hand, so a command of the remaining distance alone overshoots by 8 mm;
these two reach 3 mm within 5 steps of arrival (measured on free motions of 10 to 15 cm)."""
_ROTATION_GAIN = 2.0

SPEED = 0.0105
"""Metres that the hand makes in a control step along one axis at full action."""
TURN_SPEED = 0.065
"""Radians that it turns in a control step at full action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Where the hand should go."""

    position: Vector
    """[3], of the grip site."""
    rotation: Vector
    """[3,3], of the grip site."""
    gripper: float
    """:data:`OPEN` or :data:`CLOSE`."""
    slack: float = 0.0
    """How much noise the motion stands, in [0, 1]: 1 in free space, 0 in contact."""


def action_toward(command: Command, position: Vector, rotation: Vector, velocity: Vector) -> Vector:
    """[7] in [-1, 1].

    Args:
        position: [3], where the grip site is.
        rotation: [3,3], how it is turned.
        velocity: [3], metres that it moved in the last control step.
    """
    move = (_GAIN * (command.position - position) - _DAMPING * velocity) / _TRANSLATION
    turn = _ROTATION_GAIN * rotation_vector(command.rotation @ rotation.T) / _ROTATION
    return np.concatenate([np.clip(move, -1.0, 1.0), np.clip(turn, -1.0, 1.0), [command.gripper]])


def steps_to(move: Vector, turn: float) -> float:
    """Control steps that a motion takes at full speed."""
    return max(float(np.abs(move).max()) / SPEED, abs(turn) / TURN_SPEED)
