"""Picking and placing: where the gripper can take hold of an object, and where the object goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from embodied_rl.envs.libero.expert.geometry import (
    FINGERTIP,
    GRIPPER_OUTLINE,
    HOLDING_OUTLINE,
    SPEED,
    WAY_DOWN,
    Boxes,
    Vector,
    about,
    leaning_left,
    nearest_half_turn,
    pointing_down,
    steps_to,
    tilt_of,
    turn_between,
    yaw_of,
)
from embodied_rl.envs.libero.expert.world import Goal, Region, World, share_of_target

_ANGLES = 48
_MAX_WIDTH = 0.074
"""Metres between the open fingers, less a little."""
_BLOCKED = 25.0
"""Steps that a way round is worth, for each point of the gripper's outline inside something."""
_CLOSE = 2.0
"""The same for points that pass something by less than :data:`_CLEARANCE`."""
_TURNED = 10.0
"""The same for a radian that the hand turns: millimetres must not decide among places about as near, since a policy
that imitates the expert cannot see them."""
_SIDE = 4.0
"""The same for the left side of a vessel instead of the right one."""
_TOUCH = 0.001
_CLEARANCE = 0.008
"""Metres; the hand comes down within a centimetre of where it should."""
_DROP = 200.0
"""Steps that a metre of free fall is worth."""
_CLOSER_LOOK = 32
"""So many candidates are followed up to where the object goes."""
_DEPTHS = ((1.0, 0.0), (0.7, 8.0), (0.45, 25.0))
"""Shares of the usual depth at which a rim can be taken where the palm has no room, and their penalties in steps."""
_ALONG = ((0.0, 0.0), (-0.5, 3.0), (0.5, 3.0), (-0.9, 6.0), (0.9, 6.0))
"""Shares of an object's half length at which it can be taken beside its middle, and their penalties in steps."""
_FINGER_HALF_WIDTH = 0.011
_HANDLE_ASIDE = 0.5
"""Radians to either side of where a wall is taken that must be free of a handle, ..."""
_HANDLE_BELOW = 0.04
"""... metres below the rim that the outer finger reaches, and ..."""
_HANDLE_OUT = 0.008
"""... metres by which a handle stands out."""
_GROUND = 0.002
"""Metres between the fingertips and what the object stands on."""
_SPARE = 0.002
"""Metres between two objects side by side, or an object and a wall."""
_AMPLE = 0.02
"""Metres of room that an object had better have in a compartment."""
_FLAT = 0.025
"""Metres below which something wide has no edge that the fingers could hold."""
_LEVEL = 0.9
"""Cosine of the angle from the vertical below which a region is no floor."""
_EDGE = 0.8
"""Share of a region's half size that origins keep to."""
_TURNS = np.radians([0, *(sign * angle for angle in np.arange(7.5, 91, 7.5) for sign in (1, -1))])
_LIFTS = np.arange(0.0, 0.31, 0.01)
_VERTICAL = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The way to grasp objects of a category."""

    grasp: Literal["span", "rim", "knob"] = "span"
    """``span``: the fingers take the whole object between them. ``rim``: they take a wall of a vessel, one inside.
    ``knob``: they take the topmost part, such as a lid's knob."""
    depth: float = 0.022
    """Metres from the top (of the rim) down to the grip site; the palm hits the object beyond 0.026."""


_VESSEL = Facts(grasp="rim")
_FACTS: dict[str, Facts] = {
    "moka_pot": Facts(grasp="knob", depth=0.004),
    "chefmate8_frypan": Facts(grasp="knob", depth=0.012),
    "akita_black_bowl": _VESSEL,
    "white_bowl": _VESSEL,
    "porcelain_mug": _VESSEL,
    "red_coffee_mug": _VESSEL,
    "white_yellow_mug": _VESSEL,
}
"""Categories of which geometry alone does not tell how to take hold; it does of boxes, cans, bottles and cartons."""


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
        """The hand's pose when the object is there: position [3], rotation [3,3], and how many metres the object
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
        outline, near = at + HOLDING_OUTLINE @ turned.T, obstacles.near(at, 0.35)
        for lift in _LIFTS:
            if near.clearance(outline + lift * _VERTICAL).min() > 0.003:
                break
        return at + lift * _VERTICAL, turned, float(lift)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grasp:
    """The grip site's pose when the fingers close."""

    position: Vector
    """[3]."""
    rotation: Vector
    """[3,3]."""
    cost: float
    """Control steps to get there and on, with a penalty for obstacles."""
    free: bool = True
    """The hand meets nothing, there and on the last way down."""


def too_flat(world: World, name: str) -> bool:
    """The fingers find no hold on it: a plate."""
    shape = world.shape(name)
    size = shape.high - shape.low
    return bool(size[2] < _FLAT and size[:2].min() > _MAX_WIDTH)


def find_grasps(
    world: World, goal: Goal, besides: Boxes | None = None, way: tuple[float, float] = (0.0, 0.0)
) -> list[Grasp]:
    """Candidates for taking hold of ``goal.subject``, best first.

    Args:
        besides: obstacles that are not there yet.
        way: metres in x and y that the object is supposed to be farther than it is.
    """
    farther = np.array([*way, 0.0])
    shape, frame, hand = world.shape(goal.subject).moved(farther), world.frame(goal.subject), world.hand
    frame = replace(frame, position=frame.position + farther)
    facts = _FACTS.get(world.category(goal.subject), Facts())
    placement, others = find_placement(world, goal), world.surroundings(goal.subject)
    if besides is not None:
        others |= besides
    styles = {"rim": _rim, "span": _span, "knob": _knob}
    around = others.near((shape.low + shape.high) / 2, 0.3)
    onward = steps_to(np.array([*placement.spot, frame.position[2]]) - frame.position, placement.turn)
    favoured = leaning_left(hand.rotation)
    grasps = []
    for at, turned, detour in styles[facts.grasp](shape, frame.rotation, facts):
        reached = nearest_half_turn(turned, favoured)
        outline = at + GRIPPER_OUTLINE @ reached.T
        apart = around.near(at, 0.15).clearance(outline)
        blocked = np.sum(np.minimum(apart, shape.clearance(outline)) < _TOUCH)
        close = np.sum((apart >= _TOUCH) & (apart < _CLEARANCE))  # to the object itself the fingers are to be close
        move = at - hand.position
        turn = turn_between(reached, hand.rotation)
        cost = steps_to(move, turn) + _TURNED * turn_between(reached, favoured)
        # The plain distance decides among grasps that take as many steps: the way round is the longer one.
        cost += onward + 0.5 * float(np.abs(move)[:2].sum()) / SPEED
        cost += detour + float(_BLOCKED * blocked + _CLOSE * close)
        grasps.append(Grasp(position=at, rotation=reached, cost=cost, free=not blocked))
    closer = []
    for grasp in sorted(grasps, key=_cost)[:_CLOSER_LOOK]:
        # Where the palm finds no room at the end, the object must fall.
        upright = pointing_down(yaw_of(grasp.rotation))
        *_, drop = placement.hand_above(grasp.position, upright, frame.position, float(shape.low[2]), others)
        on_the_way = np.sum(around.clearance(grasp.position + WAY_DOWN @ grasp.rotation.T) < _CLEARANCE)
        cost = grasp.cost + _DROP * drop + float(_BLOCKED * on_the_way)
        closer.append(replace(grasp, cost=cost, free=grasp.free and not on_the_way))
    return sorted(closer, key=_cost)


def _cost(grasp: Grasp) -> float:
    return grasp.cost


_Candidate = tuple[Vector, Vector, float]
"""Position [3] and rotation [3,3] of the grip site, and a penalty in steps."""


def _span(shape: Boxes, _: Vector, facts: Facts) -> list[_Candidate]:
    corners, low, high = shape.corners, shape.low, shape.high
    found, widths = [], []
    for angle in np.arange(_ANGLES // 2) * 2 * np.pi / _ANGLES:
        across = np.array([np.cos(angle), np.sin(angle)])
        along = np.array([-across[1], across[0]])
        u, v = corners[:, :2] @ across, corners[:, :2] @ along
        height = max((low[2] + high[2]) / 2, high[2] - facts.depth, low[2] + FINGERTIP + _GROUND)
        for share, detour in _ALONG:
            aside = share * max(np.ptp(v) / 2 - _FINGER_HALF_WIDTH, 0.0)
            xy = across * (u.min() + u.max()) / 2 + along * ((v.min() + v.max()) / 2 + aside)
            found.append((np.array([*xy, height]), pointing_down(float(angle)), detour))
            widths.append(np.ptp(u))
    # Only near the narrowest does the object turn into the fingers rather than out of them.
    limit = min(max(_MAX_WIDTH, min(widths) + 0.001), min(widths) + 0.012)
    return [candidate for candidate, width in zip(found, widths, strict=True) if width <= limit]


def _knob(shape: Boxes, frame: Vector, facts: Facts) -> list[_Candidate]:
    tops = shape.corners.reshape(-1, 8, 3)[..., 2].max(axis=1)
    return _span(shape.only(tops > tops.max() - 0.005), frame, facts)


def _rim(shape: Boxes, frame: Vector, facts: Facts) -> list[_Candidate]:
    tilt = tilt_of(frame)
    center = (shape.low + shape.high) / 2
    corners = (shape.corners - center) @ tilt  # Seen from the vessel, whose rim is level there.
    direction = np.arctan2(corners[:, 1], corners[:, 0])
    found = []
    for angle in np.arange(_ANGLES) * 2 * np.pi / _ANGLES:
        sector = corners[np.abs((direction - angle + np.pi) % (2 * np.pi) - np.pi) < 0.25]
        if len(sector) == 0:
            continue
        top = sector[:, 2].max()
        radii = np.linalg.norm(sector[sector[:, 2] > top - 0.01, :2], axis=1)
        radius = (radii.min() + radii.max()) / 2
        beside_handle = _is_beside_handle(corners, direction - angle, top, float(radii.max()))
        aside = _SIDE * (1 + float(np.sin(angle))) / 2 + _BLOCKED * beside_handle
        for share, detour in _DEPTHS:
            local = np.array([radius * np.cos(angle), radius * np.sin(angle), top - share * facts.depth])
            found.append((center + tilt @ local, tilt @ pointing_down(float(angle)), detour + aside))
    return found


def _is_beside_handle(corners: Vector, direction: Vector, top: float, radius: float) -> bool:
    """Something stands out where the outer finger comes to when it closes.

    Args:
        corners: [n,3], of the vessel, from its middle.
        direction: [n] radians, from where the wall is taken.
        top: height of the rim there.
        radius: of the rim there, from the middle.
    """
    near = (np.abs((direction + np.pi) % (2 * np.pi) - np.pi) < _HANDLE_ASIDE) & (corners[:, 2] > top - _HANDLE_BELOW)
    return bool(np.linalg.norm(corners[near, :2], axis=1).max() > radius + _HANDLE_OUT)


def find_placement(world: World, goal: Goal) -> Placement:
    """The aim of ``goal.subject``, given how it is turned now."""
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
        level = abs(region.frame.rotation[2, 2]) > _LEVEL
        # A rack's places lean; what stands on the lower edge of one is on it.
        support = obstacles.top_along(spot, spot, 0.01) if level else region.frame.position[2] + _GROUND
        return Placement(spot=spot, turn=turn, support=float(support))
    spot = _below_open_sky(spot, region, half, float((high - low).max()) / 2 + _SPARE, obstacles)
    bottom = region.frame.position[2] - np.abs(region.frame.rotation @ region.half_size)[2]
    return Placement(spot=spot, turn=turn, support=float(bottom))


def _fitting_turn(offsets: Vector, half: Vector) -> float:
    """The least turn after which an object's outline fits into a compartment, with ample room if that can be; none if
    it never does."""
    sizes = np.array([np.ptp((offsets @ about(_VERTICAL, turn).T)[:, :2], axis=0) for turn in _TURNS])
    for spare in (-_AMPLE, _SPARE):
        fits = (sizes <= 2 * half + spare).all(axis=1)
        if fits.any():
            return float(_TURNS[np.argmax(fits)])
    return 0.0


def _below_open_sky(spot: Vector, region: Region, half: Vector, radius: float, obstacles: Boxes) -> Vector:
    """The spot in the region nearest to ``spot`` that nothing overhangs, such as the handles of the drawers above;
    ``spot`` itself if there is none."""
    top = region.frame.position[2] + np.abs(region.frame.rotation @ region.half_size)[2]
    above = obstacles.only(obstacles.corners.reshape(-1, 8, 3)[..., 2].max(axis=1) > top + 0.01)
    steps = np.linspace(-_EDGE, _EDGE, 17)
    grid = region.frame.position[:2] + np.array([[x, y] for x in steps for y in steps]) * half
    candidates = [spot, *sorted(grid, key=lambda xy: float(np.linalg.norm(xy - spot)))]
    return next((xy for xy in candidates if above.top_along(xy, xy, radius) == -np.inf), spot)
