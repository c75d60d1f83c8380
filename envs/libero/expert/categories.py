"""What geometry alone does not tell about LIBERO's objects: how to take hold of each category."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How an object of a category is grasped."""

    grasp: Literal["span", "rim", "knob"] = "span"
    """``span``: the fingers take the whole object between them. ``rim``: they take a wall of a vessel, one inside.
    ``knob``: they take the topmost part, such as a lid's knob."""
    depth: float = 0.022
    """Metres from the top (of the rim) down to the grip site; the palm hits the object beyond 0.026."""


_VESSEL = Facts(grasp="rim")
_FACTS: dict[str, Facts] = {
    "moka_pot": Facts(grasp="knob", depth=0.004),
    "akita_black_bowl": _VESSEL,
    "white_bowl": _VESSEL,
    "porcelain_mug": _VESSEL,
    "red_coffee_mug": _VESSEL,
    "white_yellow_mug": _VESSEL,
}
_DEFAULT = Facts()


def facts(category: str) -> Facts:
    """Of boxes, cans, bottles and cartons the geometry tells all."""
    return _FACTS.get(category, _DEFAULT)
