"""Where an object goes to make its goal true, and how the hand gets it there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied_rl.envs.libero.expert.geometry import PALM_OUTLINE, Boxes, Vector, about
from embodied_rl.envs.libero.expert.goals import Goal, share_of_target
from embodied_rl.envs.libero.expert.world import Region, World

_SPARE = 0.002
"""Metres between two objects side by side, or an object and a wall."""
_EDGE = 0.8
"""Share of a region's half size that origins keep to."""
_TURNS = np.radians([0, *(sign * angle for angle in np.arange(7.5, 91, 7.5) for sign in (1, -1))])
_LIFTS = np.arange(0.0, 0.31, 0.01)
_VERTICAL = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The aim of a carried object."""

    spot: Vector
    """[2], for its origin."""
    turn: float
    """Radians about the vertical."""
    support: float
    """Height of what it will stand on."""

    def hand_above(
        self, position: Vector, rotation: Vector, origin: Vector, low: float, obstacles: Boxes
    ) -> tuple[Vector, Vector, float]:
        """Where the hand is when the object is there: position [3], rotation [3,3], and how many metres the object
        has to fall since the palm has no room further down.

        Args:
            position: [3], of the hand that holds the object.
            rotation: [3,3], of the hand.
            origin: [3], of the object.
            low: height of the object's lowest point.
            obstacles: without the object.
        """
        turn = about(_VERTICAL, self.turn)
        turned = turn @ rotation
        at = turn @ (position - origin) + [*self.spot, self.support + origin[2] - low]
        outline, near = at + PALM_OUTLINE @ turned.T, obstacles.near(at, 0.35)
        for lift in _LIFTS:
            if near.clearance(outline + lift * _VERTICAL).min() > 0.003:
                break
        return at + lift * _VERTICAL, turned, float(lift)


def find_placement(world: World, goal: Goal) -> Placement:
    """Where ``goal.subject`` should go, given how it is turned now."""
    assert goal.target is not None
    obstacles = world.surroundings(goal.subject)
    if not world.is_region(goal.target):
        spot = world.frame(goal.target).position[:2]
        return Placement(spot=spot, turn=0.0, support=obstacles.top_along(spot, spot, 0.01))
    region, origin = world.region(goal.target), world.frame(goal.subject).position
    offsets = world.shape(goal.subject).corners - origin
    half = np.abs(region.frame.rotation @ region.half_size)[:2]
    turn = _fitting_turn(offsets, half) if goal.predicate == "in" else 0.0
    offsets = offsets @ about(_VERTICAL, turn).T
    low, high = offsets[:, :2].min(axis=0), offsets[:, :2].max(axis=0)
    # An object's middle belongs into the middle of a compartment, but a pot's handle may stand out.
    spot = region.frame.position[:2] - ((low + high) / 2 if goal.predicate == "in" else 0.0)
    which, count = share_of_target(world.goals, goal)
    if count > 1:
        axis = int(np.argmin((high - low) / 2 - half))
        aside = min((high - low)[axis] / 2 + _SPARE, _EDGE * half[axis])
        spot[axis] += aside * (2 * which / (count - 1) - 1)
    if goal.predicate == "on":
        return Placement(spot=spot, turn=turn, support=obstacles.top_along(spot, spot, 0.01))
    spot = _below_open_sky(spot, region, half, float((high - low).max()) / 2 + _SPARE, obstacles)
    bottom = region.frame.position[2] - np.abs(region.frame.rotation @ region.half_size)[2]
    return Placement(spot=spot, turn=turn, support=float(bottom))


def _fitting_turn(offsets: Vector, half: Vector) -> float:
    """The least turn after which an object's outline fits into a compartment; none if it never does."""
    for turn in _TURNS:
        if (np.ptp((offsets @ about(_VERTICAL, turn).T)[:, :2], axis=0) <= 2 * half + _SPARE).all():
            return float(turn)
    return 0.0


def _below_open_sky(spot: Vector, region: Region, half: Vector, radius: float, obstacles: Boxes) -> Vector:
    """The place in the region nearest to ``spot`` that nothing overhangs, such as the handles of the drawers above;
    ``spot`` itself if there is none."""
    top = region.frame.position[2] + np.abs(region.frame.rotation @ region.half_size)[2]
    above = obstacles.only(obstacles.corners.reshape(-1, 8, 3)[..., 2].max(axis=1) > top + 0.01)
    steps = np.linspace(-_EDGE, _EDGE, 17)
    grid = region.frame.position[:2] + np.array([[x, y] for x in steps for y in steps]) * half
    candidates = [spot, *sorted(grid, key=lambda xy: float(np.linalg.norm(xy - spot)))]
    return next((xy for xy in candidates if above.top_along(xy, xy, radius) == -np.inf), spot)
