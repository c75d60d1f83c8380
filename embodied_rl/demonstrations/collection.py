"""A data set that grows by what workers play: which episodes it has, and how those that wait get in."""

from __future__ import annotations

import datetime
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from embodied_rl.demonstrations.lerobot import metadata, writer
from embodied_rl.demonstrations.lerobot.episode import EpisodeFacts, staged
from embodied_rl.demonstrations.lerobot.metadata import Shapes
from embodied_rl.demonstrations.lerobot.reader import DataSet, damaged
from embodied_rl.demonstrations.plan import CONFIG
from embodied_rl.extras import versions
from embodied_rl.files import parse_json, write_json
from embodied_rl.params import at

_PROVENANCE: Final = "meta/provenance.json"
_PACKAGES: Final = ("torch", "numpy", "av", "mujoco", "robosuite", "mani-skill", "transformers")


def settings_of_collection(root: Path) -> dict[str, Any] | None:
    """The configuration that a data set's episodes were played with; None where ``task=collect`` did not make it.

    Raises:
        UserError: it is damaged.
    """
    config = root / CONFIG
    if not config.is_file():
        return None
    try:
        settings = yaml.safe_load(config.read_text())
        if not isinstance(settings, dict):
            raise ValueError(f"got {type(settings).__name__}, expected a configuration")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise damaged(config, error) from error
    return settings


def may_lack_starts(root: Path) -> bool:
    """Whether the first steps of a data set's episodes may be missing, as takeovers leave them out.

    Raises:
        UserError: its configuration is damaged.
    """
    settings = settings_of_collection(root)
    if settings is None:
        return (root / _PROVENANCE).exists()  # then it is dagger's, since task=collect writes both
    return at(settings, "collect.takeover_after") is not None


def executed_noise(root: Path) -> float:
    """Standard deviation of the noise on the executed actions of a data set, which records them without it; 0 where
    none is known of.

    Raises:
        UserError: what tells it is damaged.
    """
    settings, path = settings_of_collection(root), root / CONFIG
    try:
        if settings is not None:
            return float(at(settings, "collect.noise") or 0.0)
        path = root / _PROVENANCE
        if not path.is_file():
            return 0.0
        # dagger's; of earlier versions none says it
        return max((float(at(played, "noise") or 0.0) for played in parse_json(path.read_text())), default=0.0)
    except (OSError, ValueError, TypeError) as error:
        raise damaged(path, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """One folder. Its methods are the driver's."""

    root: Path
    shapes: Shapes
    robot_type: str
    noise: float
    """Standard deviation of that on the executed actions."""

    @property
    def exists(self) -> bool:
        """Whether anything is published."""
        return (self.root / metadata.INFO).exists()

    @property
    def played(self) -> bool:
        """Whether :meth:`publish` was called, also where nothing was to be kept."""
        return (self.root / _PROVENANCE).exists()

    def published(self) -> list[EpisodeFacts]:
        """The episodes that the data set has."""
        if not self.exists:
            return []
        return [
            EpisodeFacts(instruction=record["tasks"][0], **{name: record[name] for name in (*writer.FACTS, "length")})
            for record in DataSet.open(self.root).episodes()
        ]

    def known(self) -> list[EpisodeFacts]:
        """Every attempt whose outcome is known, each once."""
        found = {facts.name: facts for facts in self.published()}
        found |= {episode.facts.name: episode.facts for episode in staged(self.root)}
        return [found[name] for name in sorted(found)]

    def outcomes(self) -> dict[tuple[int, int, int], bool]:
        """(task, demonstration, attempt) -> success, of those."""
        return {(facts.task_id, facts.demonstration, facts.attempt): facts.success for facts in self.known()}

    def states(self) -> set[int]:
        """The initial states of those."""
        return {facts.reset_state_id for facts in self.known()}

    def publish(self, run_dir: Path, weights: str | None) -> int:
        """Put the staged episodes into the data set, and forget them; returns how many it has then.

        Args:
            run_dir: the run that played them, to be noted.
            weights: of the model that played, if one did.
        """
        published = self.published()
        there = {facts.name for facts in published}
        waiting = [episode for episode in staged(self.root) if episode.kept]
        new = [episode for episode in waiting if episode.facts.name not in there]
        if new:
            writer.append(self.root, new, self.shapes, robot_type=self.robot_type)
        self._note_provenance(len(published) + len(new), run_dir, weights)
        for episode in waiting:
            shutil.rmtree(episode.folder)
        return len(published) + len(new)

    def _note_provenance(self, total: int, run_dir: Path, weights: str | None) -> None:
        """Add to the list of the runs that the episodes came from those that it does not have yet, of ``total``: also
        what a run wrote that was killed before it noted it."""
        path = self.root / _PROVENANCE
        runs = parse_json(path.read_text()) if path.exists() else []
        noted = runs[-1]["episodes"][1] if runs else 0
        if runs and noted >= total:
            return
        runs.append(
            {
                "episodes": [noted, total],
                "written": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
                "run_directory": str(run_dir),
                "command": sys.argv,
                "weights": weights,
                "noise": self.noise,
                "python": sys.version.split()[0],
                "packages": versions(*_PACKAGES),
            }
        )
        write_json(path, runs)
