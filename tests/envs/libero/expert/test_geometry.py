from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from embodied_rl.envs.libero.expert.geometry import (
    Boxes,
    Vector,
    about,
    nearest_half_turn,
    pointing_down,
    rotation_vector,
    tilt_of,
    turn_between,
    yaw_of,
)

Z = np.array([0.0, 0.0, 1.0])
angles = st.floats(-np.pi, np.pi)


def boxes(*items: tuple[tuple[float, float, float], tuple[float, float, float]], yaw: float = 0.0) -> Boxes:
    """Boxes of (centre, half sizes), all turned by ``yaw``."""
    return Boxes(
        centers=np.array([center for center, _ in items]).reshape(-1, 3),
        rotations=np.repeat(about(Z, yaw)[None], len(items), axis=0),
        half_sizes=np.array([half for _, half in items]).reshape(-1, 3),
    )


@given(arrays(np.float64, 3, elements=st.floats(-1, 1)), st.floats(0.0, 3.14))
def test_a_rotation_vector_is_axis_times_angle(axis: Vector, angle: float) -> None:
    if np.linalg.norm(axis) < 0.1:
        return
    found = rotation_vector(about(axis, angle))
    assert np.allclose(found, axis / np.linalg.norm(axis) * angle, atol=1e-5)


def test_half_a_turn_has_an_angle_of_pi() -> None:
    assert np.allclose(rotation_vector(np.diag([-1.0, -1.0, 1.0])), [0, 0, np.pi])


@given(angles)
def test_pointing_down(yaw: float) -> None:
    rotation = pointing_down(yaw)
    assert np.allclose(rotation @ rotation.T, np.eye(3)) and np.isclose(np.linalg.det(rotation), 1)
    assert rotation[:, 2].tolist() == [0, 0, -1]
    assert np.isclose(np.cos(yaw_of(rotation) - yaw), 1)


@given(angles, angles)
def test_the_gripper_never_turns_more_than_a_quarter(yaw: float, now: float) -> None:
    reached = nearest_half_turn(pointing_down(yaw), pointing_down(now))
    assert turn_between(reached, pointing_down(now)) <= np.pi / 2 + 1e-6
    assert np.isclose(abs(np.cos(yaw_of(reached) - yaw)), 1)  # the fingers open along the same line


@given(st.floats(-0.45, 0.45), angles)
def test_the_tilt_of_a_leaning_frame(angle: float, yaw: float) -> None:
    lean = about(np.array([1.0, 0.0, 0.0]), angle)
    assert np.allclose(tilt_of(lean @ about(Z, yaw)), lean, atol=1e-6)


def test_what_lies_on_its_side_is_not_tilted() -> None:
    assert np.array_equal(tilt_of(about(np.array([1.0, 0.0, 0.0]), 0.7)), np.eye(3))


def test_bounds_of_a_turned_box() -> None:
    turned = boxes(((1.0, 2.0, 3.0), (0.2, 0.1, 0.3)), yaw=np.pi / 2)
    assert np.allclose(turned.low, [0.9, 1.8, 2.7]) and np.allclose(turned.high, [1.1, 2.2, 3.3])


def test_boxes_move_and_join() -> None:
    one, other = boxes(((0, 0, 0), (0.1, 0.2, 0.3)), yaw=np.pi / 2), boxes(((1, 1, 1), (0.1, 0.1, 0.1)))
    both = one.moved(np.array([0.5, 0.0, -1.0])) | other
    np.testing.assert_allclose(both.low, [0.3, -0.1, -1.3], atol=1e-9)
    np.testing.assert_allclose(both.high, [1.1, 1.1, 1.1], atol=1e-9)
    assert len(both.centers) == 2 and np.abs(one.centers).max() == 0


def test_clearance_is_the_distance_to_the_nearest_box() -> None:
    two = boxes(((0.0, 0.0, 0.0), (0.1, 0.2, 0.3)), ((1.0, 0.0, 0.0), (0.1, 0.1, 0.1)))
    points = np.array([[0.15, 0.0, 0.0], [0.0, 0.17, 0.0], [0.85, 0.0, 0.0], [0.0, 0.0, 0.4]])
    assert np.allclose(two.clearance(points), [0.05, -0.03, 0.05, 0.1])
    assert boxes().clearance(points).tolist() == [np.inf] * 4


def test_the_highest_box_along_a_way() -> None:
    low, high = ((0.0, 0.0, 0.1), (0.1, 0.1, 0.1)), ((0.5, 0.3, 0.4), (0.1, 0.1, 0.4))
    scene = boxes(low, high)
    west, east = np.array([-0.5, 0.0]), np.array([0.5, 0.0])
    assert np.isclose(scene.top_along(west, east, 0.05), 0.2)
    assert np.isclose(scene.top_along(west, east, 0.25), 0.8)  # the high one is 0.2 aside
    assert scene.top_along(west, west, 0.3) == -np.inf
    assert boxes().top_along(west, east, 1.0) == -np.inf


@pytest.mark.parametrize(("height", "expected"), [(0.30, [0.0, 0.08]), (0.60, [0.0, 0.0]), (0.05, [0.0, 0.0])])
def test_the_way_out_from_under_a_shelf(height: float, expected: list[float]) -> None:
    # A shelf over y < 0.03; what is held is 0.1 wide, 0.2 high and stands at the origin.
    shelf = boxes(((0.0, -0.97, height), (1.0, 1.0, 0.01)))
    aside = shelf.overhang(np.array([-0.05, -0.05, 0.0]), np.array([0.05, 0.05, 0.2]), 0.15)
    assert np.allclose(aside, expected)
