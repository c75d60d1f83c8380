"""What a policy's cameras show as episodes begin, small: whoever plays it must see what it learned from.

A policy that sees another camera, or the right one upside down, fails like one that learned nothing. So checkpoints and
folders of weights carry thumbnails (:data:`FILE`), and a run that begins with them compares its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from embodied_rl.errors import CheckpointError, listed
from embodied_rl.files import write_json

FILE: Final = "views.safetensors"
COMPARISON: Final = "views.json"
"""In the run directory: each camera's :class:`Comparison`."""
PICTURE: Final = "views.png"
"""In the run directory, where a camera differs: what the policy learned from above what it sees."""
SIZE: Final = 16
"""Height and width of a thumbnail: places of tables and arms are left of a scene, objects hardly."""
MOST: Final = 48
"""Thumbnails that are kept of a camera."""
FAMILIAR: Final = 0.7
"""Pictures that are less alike than this share of the likeness among those learned from show something else
(docs/evaluation.md has what LIBERO's and Meta-World's have)."""
CLOSE: Final = 0.95
"""Pictures that are more alike than this share of it show the same, and no change is looked for."""
EXPLAINED: Final = 0.8
"""Likeness that a change must bring to be the explanation, and at least half of what is missing to 1."""
_FLAT: Final = 4.0
"""Standard deviation, of 255, below which a thumbnail shows nothing to compare."""
_SHOWN: Final = 8
"""Thumbnails of a camera in :data:`PICTURE`."""
_SCALE: Final = 6

T = TypeVar("T", bound=np.generic)
Thumbnails = NDArray[np.uint8]
"""[n,SIZE,SIZE,3]."""
_CHANGES: Final[Mapping[str, Callable[[Thumbnails], Thumbnails]]] = {
    "turned by 180 degrees": lambda x: x[:, ::-1, ::-1],
    "upside down": lambda x: x[:, ::-1],
    "mirrored": lambda x: x[:, :, ::-1],
    "with red and blue exchanged": lambda x: x[..., ::-1],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A camera's pictures against those that a policy learned from. Likeness is a mean correlation, 1 for equal."""

    likeness: float
    among: float | None
    """Likeness of the pictures learned from to each other; None: there is only one."""
    explanation: str | None = None
    """What would make them alike, in words."""
    explained: float | None = None
    """Likeness with that."""

    @property
    def differs(self) -> bool:
        return self.explanation is not None or (self.among is not None and self.likeness < FAMILIAR * self.among)

    def describe(self, camera: str) -> str:
        """A sentence, and what to do."""
        among = "" if self.among is None else f", among those {self.among:.2f}"
        seen = (
            f"camera {camera}: its pictures are unlike those that the policy learned from (likeness "
            f"{self.likeness:.2f}{among})"
        )
        if self.explanation is not None:
            why = f"they would be like them ({self.explained:.2f}) {self.explanation}"
        else:
            why = "another camera, or scenes that it never saw"
        return f"{seen}: {why}; show it what it knows (env, env.init_params), or train it on these"


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """Thumbnails of the pictures with which episodes began."""

    cameras: Mapping[str, Thumbnails]

    @classmethod
    def of(cls, images: Mapping[str, NDArray[np.uint8]]) -> Self:
        """Of pictures [n,H,W,3] by camera; at most :data:`MOST` of them, and of equal ones, as of a group's, one."""
        return cls(cameras={camera: spread(_distinct(_thumbnails(pictures))) for camera, pictures in images.items()})

    @classmethod
    def merged(cls, parts: Iterable[Self]) -> Self | None:
        """All cameras of all parts; None where there is no picture."""
        found: dict[str, list[Thumbnails]] = {}
        for part in parts:
            for camera, thumbnails in part.cameras.items():
                found.setdefault(camera, []).append(thumbnails)
        cameras = {camera: spread(_distinct(np.concatenate(parts))) for camera, parts in found.items()}
        return cls(cameras=cameras) if any(map(len, cameras.values())) else None

    def write(self, directory: Path) -> None:
        """Write :data:`FILE`."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_bytes(
            save({camera: np.ascontiguousarray(kept) for camera, kept in self.cameras.items()})
        )

    @classmethod
    def read(cls, directory: Path | None) -> Self | None:
        """Read that of a checkpoint or a folder of weights; None where it has none.

        Raises:
            CheckpointError: it is damaged.
        """
        if directory is None or not (path := directory / FILE).is_file():
            return None
        try:
            cameras = load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); copy it again, or remove it") from error
        for camera, thumbnails in cameras.items():
            if thumbnails.dtype != np.uint8 or thumbnails.shape[1:] != (SIZE, SIZE, 3):
                raise CheckpointError(
                    f"{path}: {camera} is {thumbnails.dtype} {thumbnails.shape}, expected uint8 (n, {SIZE}, {SIZE}, "
                    "3); copy it again, or remove it"
                )
        return cls(cameras=cameras)


def compare(learned: Views, seen: Views) -> dict[str, Comparison]:
    """By camera, of those that both have and that show something."""
    found = {}
    for camera, thumbnails in seen.cameras.items():
        known = learned.cameras.get(camera)
        if known is None or _flat(known) or _flat(thumbnails):
            continue
        likeness = _likeness(thumbnails, known)
        among = _likeness(known, known, others=True) if len(known) > 1 else None
        others = {how: _likeness(change(thumbnails), known) for how, change in _CHANGES.items()}
        others |= {
            f"as pictures of its camera {name}": _likeness(thumbnails, other)
            for name, other in learned.cameras.items()
            if name != camera and not _flat(other)
        }
        how, best = max(others.items(), key=lambda item: item[1])
        explains = (
            likeness < CLOSE * (1.0 if among is None else among)
            and best >= EXPLAINED
            and 1 - best <= (1 - likeness) / 2
        )
        found[camera] = Comparison(
            likeness=likeness,
            among=among,
            explanation=how if explains else None,
            explained=best if explains else None,
        )
    return found


def record(run_dir: Path, learned: Views, seen: Views) -> list[str]:
    """Compare, write that into a run directory, and say in words which cameras differ."""
    found = compare(learned, seen)
    write_json(run_dir / COMPARISON, {camera: asdict(one) for camera, one in found.items()})
    differing = {camera: one for camera, one in found.items() if one.differs}
    if not differing:
        return []
    _draw(run_dir / PICTURE, [row for camera in differing for row in (learned.cameras[camera], seen.cameras[camera])])
    texts = [one.describe(camera) for camera, one in differing.items()]
    return [*texts, f"{run_dir / PICTURE}: what it learned from, and below it what {listed(list(differing))} show"]


def differing(run_dir: Path) -> dict[str, Comparison]:
    """The cameras that :func:`record` found to differ in a run."""
    path = run_dir / COMPARISON
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {camera: one for camera, fields in found.items() if (one := Comparison(**fields)).differs}


def spread(rows: NDArray[T], most: int = MOST) -> NDArray[T]:
    """At most so many, evenly spread over all."""
    if len(rows) <= most:
        return rows
    return rows[np.linspace(0, len(rows) - 1, most).round().astype(int)]


def _thumbnails(pictures: NDArray[np.uint8]) -> Thumbnails:
    """[n,H,W,3] -> [n,SIZE,SIZE,3]: means of equal areas."""
    from PIL import Image  # not for whoever only reads

    found = np.empty((len(pictures), SIZE, SIZE, 3), np.uint8)
    for row, picture in zip(found, pictures, strict=True):
        row[:] = np.asarray(Image.fromarray(np.ascontiguousarray(picture)).resize((SIZE, SIZE), Image.Resampling.BOX))
    return found


def _distinct(thumbnails: Thumbnails) -> Thumbnails:
    """The first of equal ones."""
    if not len(thumbnails):
        return thumbnails
    _, first = np.unique(thumbnails.reshape(len(thumbnails), -1), axis=0, return_index=True)
    return thumbnails[np.sort(first)]


def _flat(thumbnails: Thumbnails) -> bool:
    return not len(thumbnails) or float(np.median(thumbnails.std(axis=(1, 2, 3)))) < _FLAT


def _likeness(seen: Thumbnails, learned: Thumbnails, *, others: bool = False) -> float:
    """Each picture's correlation with the one that it is most like; their mean.

    Args:
        others: both are the same, and no picture is compared with itself.
    """
    alike = _directions(seen) @ _directions(learned).T
    if others:
        np.fill_diagonal(alike, -1.0)
    return float(alike.max(1).mean())


def _directions(thumbnails: Thumbnails) -> NDArray[np.float64]:
    flat = thumbnails.reshape(len(thumbnails), -1).astype(np.float64)
    flat -= flat.mean(1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1.0)


def _draw(path: Path, rows: Sequence[Thumbnails]) -> None:
    """A row of thumbnails each, enlarged."""
    from PIL import Image  # not for whoever writes no picture

    columns = min(_SHOWN, max(map(len, rows)))
    sheet = np.full((len(rows), SIZE + 1, columns * (SIZE + 1), 3), 255, np.uint8)
    for row, thumbnails in zip(sheet, rows, strict=True):
        for number, thumbnail in enumerate(spread(thumbnails, columns)):
            row[:SIZE, number * (SIZE + 1) : number * (SIZE + 1) + SIZE] = thumbnail
    image = Image.fromarray(sheet.reshape(-1, *sheet.shape[2:]))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.resize((image.width * _SCALE, image.height * _SCALE), Image.Resampling.NEAREST).save(path)
