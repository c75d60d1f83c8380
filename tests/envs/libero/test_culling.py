from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.envs.libero.culling import Culling, drawn_textures

mujoco: Any = pytest.importorskip("mujoco")
SHOWN = np.array([0, 1, 1, 0, 0, 0])


def world(extra: str = "", light: str = "") -> tuple[Any, Any]:
    """A camera at the origin that looks along -z, 90 degrees high, and boxes of 0.2 m around it."""
    places = {"ahead": "0 0 -2", "behind": "0 0 2", "left": "-3 0 -2", "edge": "2.1 0 -2", "above": "0 2.2 -1"}
    boxes = "".join(
        f'<geom name="{name}" type="box" size=".1 .1 .1" pos="{place}" group="1"/>' for name, place in places.items()
    )
    model = mujoco.MjModel.from_xml_string(
        f"""<mujoco><asset><texture name="seen" type="2d" builtin="flat" width="8" height="8"/>
        <texture name="unseen" type="cube" builtin="flat" width="8" height="48"/>
        <texture name="sky" type="skybox" builtin="flat" width="8" height="48"/>
        <material name="seen" texture="seen"/><material name="mirror" reflectance=".5"/>
        <material name="unseen" texture="unseen"/></asset>
        <worldbody><light castshadow="{light or "false"}" pos="0 0 1"/><camera name="eye" fovy="90"/>{boxes}
        <geom name="floor" type="plane" size="9 9 9" pos="0 0 9" group="1" material="seen"/>
        <geom name="shape" type="sphere" size="1" pos="0 0 9" group="0" material="unseen"/>{extra}
        </worldbody></mujoco>"""
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def hidden(model: Any, data: Any, aspect: float = 1.0) -> set[str]:
    before = model.geom_group.copy()
    culling = Culling(model, data, SHOWN)
    culling.hide(model.camera("eye").id, aspect)
    names = {model.geom(int(geom)).name for geom in np.flatnonzero(model.geom_group == 5)}
    culling.show_all()
    np.testing.assert_array_equal(model.geom_group, before)
    return names


def test_what_is_wholly_out_of_view_is_hidden() -> None:
    # The box at x 2.1 reaches from 2.0, on the view's edge at that depth, and nearer parts of it are outside.
    assert hidden(*world()) == {"behind", "left", "above"}
    assert hidden(*world(), aspect=2.0) == {"behind", "above"}
    assert hidden(*world(), aspect=0.5) == {"behind", "left", "above", "edge"}


def test_a_turned_camera_sees_what_it_turns_to() -> None:
    model, data = world()
    data.cam_xmat[0] = np.diag([-1.0, 1.0, -1.0]).reshape(-1)
    assert hidden(model, data) == {"ahead", "left", "edge", "above"}


def test_a_large_thing_around_the_camera_is_drawn() -> None:
    assert "hall" not in hidden(*world('<geom name="hall" type="box" size="5 5 5" group="1"/>'))


@pytest.mark.parametrize(
    "drawn",
    [
        world('<geom type="box" size="1 1 1" pos="0 0 -9" group="1" material="mirror"/>'),
        world(light="true"),
    ],
    ids=["mirror", "shadow"],
)
def test_mirrors_and_shadows_show_what_is_out_of_view(drawn: tuple[Any, Any]) -> None:
    assert hidden(*drawn) == set()


def test_a_mirror_that_is_not_drawn_shows_nothing() -> None:
    extra = '<geom type="box" size="1 1 1" pos="0 0 -9" group="0" material="mirror"/>'
    assert hidden(*world(extra)) == {"behind", "left", "above"}


def test_only_drawn_textures_are_uploaded() -> None:
    model, _ = world()
    sizes = model.tex_width.copy(), model.tex_height.copy()
    with drawn_textures(model):
        assert {model.tex(i).name: int(model.tex_width[i]) for i in range(3)} == {"seen": 8, "unseen": 1, "sky": 8}
    np.testing.assert_array_equal(model.tex_width, sizes[0])
    np.testing.assert_array_equal(model.tex_height, sizes[1])
