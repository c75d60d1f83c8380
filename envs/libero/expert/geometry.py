"""Boxes, rotations, the gripper's outline, and the OSC_POSE actions that move it: functions of poses, no simulator.

Lengths in metres, angles in radians.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=np.float64)
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
_LEANING = 0.2
"""Radians by which turns to the left are favoured: what imitates cannot see which of two is a degree less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """n boxes in the world."""

    centers: Vector
    """[n,3]."""
    rotations: Vector
    """[n,3,3], columns are a box's axes."""
    half_sizes: Vector
    """[n,3]."""

    @property
    def corners(self) -> Vector:
        """[8n,3]."""
        offsets = np.einsum("nij,nkj->nki", self.rotations, _SIGNS * self.half_sizes[:, None])
        return (self.centers[:, None] + offsets).reshape(-1, 3)

    @property
    def low(self) -> Vector:
        """[3], the least coordinates."""
        return self.corners.min(axis=0)

    @property
    def high(self) -> Vector:
        """[3]."""
        return self.corners.max(axis=0)

    def near(self, point: Vector, radius: float) -> Boxes:
        """The boxes whose bounding spheres come within ``radius`` of a point."""
        reach = np.linalg.norm(self.half_sizes, axis=1) + radius
        return self.only(np.linalg.norm(self.centers - point, axis=1) < reach)

    def only(self, chosen: NDArray[np.bool_]) -> Boxes:
        return Boxes(centers=self.centers[chosen], rotations=self.rotations[chosen], half_sizes=self.half_sizes[chosen])

    def moved(self, way: Vector) -> Boxes:
        """The same boxes, ``way`` [3] farther."""
        return Boxes(centers=self.centers + way, rotations=self.rotations, half_sizes=self.half_sizes)

    def __or__(self, other: Boxes) -> Boxes:
        """These boxes and those."""
        return Boxes(
            centers=np.concatenate([self.centers, other.centers]),
            rotations=np.concatenate([self.rotations, other.rotations]),
            half_sizes=np.concatenate([self.half_sizes, other.half_sizes]),
        )

    def clearance(self, points: Vector) -> Vector:
        """[m], how far each of ``points`` [m,3] is from the nearest box, along that box's axes; negative inside,
        infinite without any boxes."""
        if len(self.centers) == 0:
            return np.full(len(points), np.inf)
        local = np.abs(self.rotations.transpose(0, 2, 1) @ (points.T - self.centers[:, :, None]))  # [n,3,m]
        return (local - self.half_sizes[:, :, None]).max(axis=1).min(axis=0)

    def overhang(self, low: Vector, high: Vector, reach: float) -> Vector:
        """[2], the least way aside after which nothing hangs over the space from ``low`` to ``high`` [3], up to
        ``reach`` above it; zeros if nothing does."""
        middle, radius = (low + high) / 2, float((high - low)[:2].max()) / 2
        aside = np.zeros(2)
        for center, rotation, half in zip(self.centers, self.rotations, self.half_sizes, strict=True):
            extent = np.abs(rotation) @ half
            apart = (np.abs(middle - center) >= extent + radius)[:2].any()
            if apart or not high[2] - 0.005 < center[2] - extent[2] < high[2] + reach:
                continue
            flat = [axis for axis in range(3) if abs(rotation[2, axis]) < 0.5]
            local = (middle - center) @ rotation
            exits = [(half[axis] + radius - abs(local[axis]), axis) for axis in flat]
            way, axis = min(exits)
            if way > 0 and way > np.linalg.norm(aside):
                aside = way * np.sign(local[axis]) * rotation[:2, axis]
        return aside

    def top_along(self, start: Vector, end: Vector, radius: float) -> float:
        """The height of the highest box that comes, seen from above, within ``radius`` of the way from ``start`` to
        ``end``; minus infinity without any. Boxes count by their bounding rectangles, so it errs to the safe side."""
        if len(self.centers) == 0:
            return -np.inf
        corners = self.corners.reshape(-1, 8, 3)
        low, high = corners[..., :2].min(axis=1), corners[..., :2].max(axis=1)
        steps = max(int(np.ceil(np.linalg.norm((end - start)[:2]) / 0.02)), 1)
        way = start[:2] + np.linspace(0, 1, steps + 1)[:, None] * (end - start)[:2]
        gap = np.maximum(np.maximum(low[:, None] - way, way - high[:, None]), 0.0)
        hit = (np.linalg.norm(gap, axis=2) < radius).any(axis=1)
        return float(corners[hit, :, 2].max()) if hit.any() else -np.inf


def pointing_down(yaw: float) -> Vector:
    """[3,3]: the gripper straight down, its fingers opening along the direction ``yaw`` in the horizontal plane."""
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[c, s, 0.0], [s, -c, 0.0], [0.0, 0.0, -1.0]])


def yaw_of(rotation: Vector) -> float:
    """The direction of a frame's x axis in the horizontal plane."""
    return float(np.arctan2(rotation[1, 0], rotation[0, 0]))


def nearest_half_turn(rotation: Vector, reference: Vector) -> Vector:
    """``rotation`` or the same after half a turn about its z axis, what is nearer to ``reference``: the gripper looks
    the same."""
    turned = rotation * [-1, -1, 1]
    return turned if np.trace(turned @ reference.T) > np.trace(rotation @ reference.T) else rotation


def leaning_left(rotation: Vector) -> Vector:
    """[3,3], from where turns count, so that of two as wide the left one is less."""
    return about(np.array([0.0, 0.0, 1.0]), _LEANING) @ rotation


def turn_between(rotation: Vector, reference: Vector) -> float:
    """The angle of the turn from one to the other."""
    return float(np.linalg.norm(rotation_vector(rotation @ reference.T)))


def tilt_of(frame: Vector, limit: float = 0.5) -> Vector:
    """[3,3], the least rotation that takes the vertical to that axis of ``frame`` which is nearest to it; the identity
    for an angle above ``limit``."""
    axis = int(np.argmax(np.abs(frame[2])))
    up = frame[:, axis] * np.sign(frame[2, axis])
    angle = float(np.arccos(np.clip(up[2], -1.0, 1.0)))
    return np.eye(3) if angle < 1e-6 or angle > limit else about(np.cross([0.0, 0.0, 1.0], up), angle)


def rotation_vector(rotation: Vector) -> Vector:
    """[3], axis times angle of a rotation matrix."""
    cosine = np.clip((np.trace(rotation) - 1) / 2, -1.0, 1.0)
    angle = np.arccos(cosine)
    axis = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    norm = np.linalg.norm(axis)
    if norm < 1e-9:  # No turn at all, or half a turn about an axis of which the diagonal tells the size.
        return np.sqrt(np.maximum(np.diag(rotation) + 1, 0) / 2) * angle if angle > 1 else np.zeros(3)
    return axis / norm * angle


def about(axis: Vector, angle: float) -> Vector:
    """[3,3], the rotation by ``angle`` about ``axis`` (Rodrigues)."""
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def _grid(low: tuple[float, float, float], high: tuple[float, float, float], counts: tuple[int, int, int]) -> Vector:
    axes = [np.linspace(a, b, n) for a, b, n in zip(low, high, counts, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)


_LEFT_FINGER = _grid((-0.068, -0.011, -0.1), (-0.038, 0.011, 0.0125), (4, 3, 19))
_RIGHT_FINGER = _LEFT_FINGER * [-1, 1, 1]
PALM_OUTLINE = _grid((-0.102, -0.030, -0.11), (0.102, 0.030, -0.03), (15, 3, 3))
"""[m,3], points of the hand above the fingers, in the grip site's frame."""
HOLDING_OUTLINE = np.concatenate([PALM_OUTLINE, _grid((-0.027, -0.011, -0.1), (0.027, 0.011, 0.0), (7, 3, 11))])
"""[m,3], points of the hand with its fingers about something thin, but for their tips."""
GRIPPER_OUTLINE = np.concatenate([_LEFT_FINGER, _RIGHT_FINGER, PALM_OUTLINE])
"""[m,3], points of the open Panda gripper in the grip site's frame, the fingers drawn up by 5 cm to cover their way
down."""
WAY_DOWN = np.concatenate(
    [
        _grid((-0.102, -0.030, -0.27), (0.102, 0.030, -0.03), (15, 5, 9)),
        _grid((-0.055, -0.055, -0.27), (0.055, 0.055, -0.11), (5, 5, 6)),
    ]
)
"""[m,3], where the palm comes through in the last 16 cm of a descent, and where the wrist is at its end."""
FINGERTIP = 0.0125
"""Metres from the grip site to the ends of the fingers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The pose and grip that the hand should have."""

    position: Vector
    """[3], of the grip site."""
    rotation: Vector
    """[3,3], of the grip site."""
    gripper: float
    """:data:`OPEN` or :data:`CLOSE`."""
    slack: float = 0.0
    """Share of the noise that the motion stands: 1 in free space, 0 in contact."""


def action_toward(command: Command, position: Vector, rotation: Vector, velocity: Vector) -> Vector:
    """[7] in [-1, 1].

    Args:
        position: [3], of the grip site.
        rotation: [3,3], of the grip site.
        velocity: [3], metres that it moved in the last control step.
    """
    move = (_GAIN * (command.position - position) - _DAMPING * velocity) / _TRANSLATION
    turn = _ROTATION_GAIN * rotation_vector(command.rotation @ rotation.T) / _ROTATION
    return np.concatenate([np.clip(move, -1.0, 1.0), np.clip(turn, -1.0, 1.0), [command.gripper]])


def steps_to(move: Vector, turn: float) -> float:
    """Control steps that a motion takes at full speed."""
    return max(float(np.abs(move).max()) / SPEED, abs(turn) / TURN_SPEED)
