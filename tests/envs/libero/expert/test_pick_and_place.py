from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.envs.libero.expert.geometry import about
from embodied_rl.envs.libero.expert.pick_and_place import _fitting_turn

BOOK = np.array([[x, y, 0.0] for x in (-0.05, 0.05) for y in (-0.015, 0.015)])
"""Corners [4,3] of a book of 10 by 3 cm."""


@pytest.mark.parametrize(
    ("lies_at", "half", "turn"),
    [
        pytest.param(22.5, (0.0615, 0.0615), 7.5, id="10.4 of 12.3 cm as it lies, 10.2 after a turn"),
        pytest.param(0.0, (0.0615, 0.0615), 0.0, id="it lies well"),
        pytest.param(0.0, (0.02, 0.06), 90.0, id="only a turn lets it in"),
        pytest.param(0.0, (0.02, 0.02), 0.0, id="it never fits"),
    ],
)
def test_a_compartment_leaves_room_where_it_can(lies_at: float, half: tuple[float, float], turn: float) -> None:
    corners = BOOK @ about(np.array([0.0, 0.0, 1.0]), np.radians(lies_at)).T
    assert np.degrees(_fitting_turn(corners, np.array(half))) == pytest.approx(turn)
