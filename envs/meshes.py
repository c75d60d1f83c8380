"""Coarser meshes for drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_CELLS = 30
"""Along a mesh's longest side: what falls into one cell becomes one vertex."""
_FEW_FACES = 500
"""A mesh with fewer is left as it is."""


def coarsen_meshes(model: Any) -> None:
    """Drop small triangles from a MuJoCo model's meshes, in place, before a rendering context copies them: a software
    renderer's time goes by triangles rather than by pixels.

    Vertices are clustered in a grid (Rossignac and Borrel 1993, "Multi-resolution 3D approximations for rendering
    complex scenes"); each cell keeps its first, and triangles with two corners in a cell vanish. Vertices themselves
    stay, and so do convex hulls: contacts are what they were. Rays (``mj_ray``) meet the coarser mesh.
    """
    for mesh in range(model.nmesh):
        first, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
        if count < _FEW_FACES:
            continue
        start = int(model.mesh_vertadr[mesh])
        vertices = model.mesh_vert[start : start + int(model.mesh_vertnum[mesh])]
        kept, corners = _clustered(vertices, model.mesh_face[first : first + count])
        for faces, values in (
            (model.mesh_face, corners),
            (model.mesh_facenormal, model.mesh_facenormal[first : first + count][kept]),
            (model.mesh_facetexcoord, model.mesh_facetexcoord[first : first + count][kept]),
        ):
            faces[first : first + len(kept)] = values
        model.mesh_facenum[mesh] = len(kept)


def _clustered(vertices: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices [K] of the faces [F,3] that are left, and their corners [K,3]."""
    cells = np.floor(vertices * (_CELLS / np.ptp(vertices, axis=0).max())).astype(np.int64)
    _, representatives, cell = np.unique(_numbered(cells), return_index=True, return_inverse=True)
    corners = representatives[cell][faces]
    sorted_corners = np.sort(corners, axis=1)
    whole = np.flatnonzero((np.diff(sorted_corners, axis=1) > 0).all(axis=1))
    _, once = np.unique(_numbered(sorted_corners[whole]), return_index=True)
    kept = whole[np.sort(once)]
    return kept, corners[kept]


def _numbered(rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """[N,3] whole numbers -> [N], equal where rows are, which sort faster. No column may span 2^21."""
    first, second, third = (rows - rows.min(axis=0, initial=0)).astype(np.int64).T
    return (first << 42) | (second << 21) | third
