"""Leaving out of pictures what changes no pixel: geoms outside a camera's view, textures of what is never drawn.

A software renderer's time goes by triangles. MuJoCo draws every geom, and OpenGL drops triangles outside the view one
by one, after each of their corners has been moved, lit and textured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARGIN = 1e-3
"""Metres that a box must be out of view by: OpenGL computes in single precision."""
_HIDDEN = 5
"""A geom group that no picture shows."""


@contextlib.contextmanager
def drawn_textures(model: Any) -> Iterator[None]:
    """A rendering context that is created here gets no textures of hidden collision shapes (geom group 0). LIBERO's
    tables have several, two of them on all six sides of a cube: half of the time and 250 MB."""
    import mujoco

    skybox = mujoco.mjtTexture.mjTEXTURE_SKYBOX  # type: ignore[attr-defined]
    materials = np.concatenate([model.geom_matid[model.geom_group != 0], model.site_matid])
    drawn = np.isin(np.arange(model.ntex), model.mat_texid[materials[materials >= 0]])
    unused = ~drawn & (model.tex_type != skybox)
    sizes = (model.tex_width, model.tex_height)
    whole = [size.copy() for size in sizes]
    try:
        for size in sizes:
            size[unused] = 1
        yield
    finally:
        for size, kept in zip(sizes, whole, strict=True):
            size[:] = kept


class Culling:
    """Hides geoms of ``model`` that a camera cannot see, whole.

    Args:
        model, data: MuJoCo's.
        shown: which geom groups pictures show, [6].
    """

    def __init__(self, model: Any, data: Any, shown: NDArray[np.integer]) -> None:
        import mujoco

        kinds: Any = mujoco.mjtGeom  # type: ignore[attr-defined]
        self._model, self._data = model, data
        self._groups = model.geom_group.copy()
        drawn = np.asarray(shown, dtype=bool)[self._groups]
        plane, box = kinds.mjGEOM_PLANE, kinds.mjGEOM_BOX
        flat = np.isin(model.geom_type, (plane, box)) & (model.geom_matid >= 0) & drawn
        mirrors = model.nmat > 0 and bool((model.mat_reflectance[model.geom_matid[flat]] > 0).any())
        # What is out of view can stand in a mirror and throw a shadow; a plane has no end.
        alone = not mirrors and not model.light_castshadow.any()
        self._geoms = np.flatnonzero(drawn & (model.geom_type != plane)) if alone else np.empty(0, dtype=np.int64)
        self._middles, self._halves = model.geom_aabb[self._geoms, :3, None], model.geom_aabb[self._geoms, None, 3:]

    def hide(self, camera: int, aspect: float) -> None:
        """Until :meth:`show_all`: hide what ``camera`` does not see in a picture that is ``aspect`` times as wide as
        high. Poses must be up to date."""
        model, data = self._model, self._data
        if model.cam_sensorsize[camera].any() or model.cam_projection[camera] != 0:
            return  # Not the kind whose view these planes bound.
        height = np.tan(0.5 * np.radians(model.cam_fovy[camera]))
        width = height * aspect
        inwards = np.array([[-1, 0, -width], [1, 0, -width], [0, -1, -height], [0, 1, -height], [0, 0, -1]])
        inwards /= np.linalg.norm(inwards, axis=1, keepdims=True)
        planes = inwards @ data.cam_xmat[camera].reshape(3, 3).T
        axes = data.geom_xmat[self._geoms].reshape(-1, 3, 3)
        centres = data.geom_xpos[self._geoms] + (axes @ self._middles)[..., 0]
        distances = (centres - data.cam_xpos[camera]) @ planes.T
        reaches = (np.abs(planes @ axes) * self._halves).sum(-1)
        model.geom_group[self._geoms[(distances < -reaches - _MARGIN).any(1)]] = _HIDDEN

    def show_all(self) -> None:
        self._model.geom_group[:] = self._groups
