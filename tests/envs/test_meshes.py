from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.envs.meshes import coarsen_meshes

mujoco: Any = pytest.importorskip("mujoco")

ROWS, COLUMNS = 60, 80


def ball() -> Any:
    """An ellipsoid of 9,440 triangles over a floor, and a small box."""
    polar, around = np.meshgrid(
        np.linspace(0, np.pi, ROWS), np.linspace(0, 2 * np.pi, COLUMNS, endpoint=False), indexing="ij"
    )
    vertices = np.stack(
        (0.1 * np.sin(polar) * np.cos(around), 0.08 * np.sin(polar) * np.sin(around), 0.12 * np.cos(polar)), -1
    )
    row, column = np.meshgrid(np.arange(ROWS - 1), np.arange(COLUMNS), indexing="ij")
    here, beside = row * COLUMNS + column, row * COLUMNS + (column + 1) % COLUMNS
    upper = np.stack((here, here + COLUMNS, beside), -1)[1:]
    lower = np.stack((beside, here + COLUMNS, beside + COLUMNS), -1)[:-1]
    faces = np.concatenate((upper.reshape(-1, 3), lower.reshape(-1, 3)))

    def text(values: np.ndarray) -> str:
        return " ".join(f"{value:.9g}" for value in values.ravel())

    corners = np.array(np.meshgrid([0, 1], [0, 1], [0, 1])).reshape(3, -1).T * 0.05
    return mujoco.MjModel.from_xml_string(
        f"""<mujoco><asset><mesh name="ball" vertex="{text(vertices)}" face="{text(faces)}"/>
        <mesh name="box" vertex="{text(corners)}"/></asset><worldbody><geom type="plane" size="1 1 1"/>
        <body pos="0 0 .3" euler="20 30 0"><freejoint/><geom type="mesh" mesh="ball"/></body>
        <body pos=".3 0 .3"><freejoint/><geom type="mesh" mesh="box"/></body></worldbody></mujoco>"""
    )


def faces_of(model: Any, mesh: int) -> np.ndarray:
    first, start = model.mesh_faceadr[mesh], model.mesh_vertadr[mesh]
    return model.mesh_vert[start:][model.mesh_face[first : first + model.mesh_facenum[mesh]]]


def areas(corners: np.ndarray) -> np.ndarray:
    return 0.5 * np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1)


def test_a_fine_mesh_keeps_its_shape_with_fewer_triangles() -> None:
    model = ball()
    before = faces_of(model, 0).copy()
    coarsen_meshes(model)
    after = faces_of(model, 0)
    assert len(before) == 2 * COLUMNS * (ROWS - 2)
    assert 500 < len(after) < 0.6 * len(before)
    assert (areas(after) > 0).all()
    assert areas(after).sum() == pytest.approx(areas(before).sum(), rel=0.05)
    np.testing.assert_allclose(np.ptp(after.reshape(-1, 3), axis=0), np.ptp(before.reshape(-1, 3), axis=0), rtol=0.04)


def test_a_mesh_of_few_triangles_stays() -> None:
    model = ball()
    before = faces_of(model, 1).copy()
    coarsen_meshes(model)
    np.testing.assert_array_equal(faces_of(model, 1), before)


def test_contacts_stay() -> None:
    ends = []
    for coarse in (False, True):
        model = ball()
        if coarse:
            coarsen_meshes(model)
        data = mujoco.MjData(model)
        mujoco.mj_step(model, data, 400)
        assert data.ncon > 0
        ends.append(data.qpos.copy())
    np.testing.assert_array_equal(ends[0], ends[1])
