"""Which thumbnails a run's checkpoints get, and of what it warns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.cli import config_of
from embodied_rl.evaluation.views import Views
from embodied_rl.plan import Start
from embodied_rl.schema import ModelConfig
from embodied_rl.tasks.embodied.views import PolicyViews
from embodied_rl.workers.env import EnvReport
from tests.evaluation.test_views import scene

MODEL = config_of("env=dummy").model
HERE, TURNED, NEARBY = (
    Views.of({"top": pictures}) for pictures in (scene(1), scene(1)[:, ::-1, ::-1], scene(1, 9)[6:])
)


def report(views: Views | None) -> EnvReport:
    return EnvReport(episodes=[], seconds={}, env_steps=0, videos=[], open_episodes=[], views=views)


class Run:
    """What a run says, and what its checkpoint then has."""

    def __init__(self, folder: Path, start: Start, model: ModelConfig = MODEL) -> None:
        self.said: list[str] = []
        self.folder = folder
        self.views = PolicyViews(start, model, folder, lambda text, style: self.said.append(text))

    def saved(self) -> NDArray[np.uint8]:
        """Of its camera; empty: a checkpoint has none."""
        self.views.write(self.folder / "checkpoint")
        found = Views.read(self.folder / "checkpoint")
        return np.empty(0, np.uint8) if found is None else found.cameras["top"]


@pytest.fixture
def before(tmp_path: Path) -> Path:
    HERE.write(tmp_path / "before")
    return tmp_path / "before"


def test_a_fresh_policy_learns_from_its_first_rollout(tmp_path: Path) -> None:
    run = Run(tmp_path, Start())
    run.views.see([report(TURNED)], training=False)  # an evaluation before training
    assert not len(run.saved())
    run.views.see([report(None), report(HERE), report(NEARBY)], training=True)
    run.views.see([report(TURNED)], training=True)
    assert np.array_equal(run.saved(), np.concatenate([HERE.cameras["top"], NEARBY.cameras["top"]]))
    assert run.said == []


def test_what_it_starts_with_is_kept_while_it_learns_from_the_like(tmp_path: Path, before: Path) -> None:
    run = Run(tmp_path, Start(initial=before))
    run.views.see([report(NEARBY)], training=True)
    assert run.said == []
    assert np.array_equal(run.saved(), np.concatenate([HERE.cameras["top"], NEARBY.cameras["top"]]))


def test_training_on_something_else_is_said_once_and_replaces_it(tmp_path: Path, before: Path) -> None:
    run = Run(tmp_path, Start(initial=before))
    run.views.see([report(TURNED)], training=False)
    assert len(run.said) == 2
    assert "turned by 180 degrees" in run.said[0]
    run.views.see([report(TURNED)], training=True)
    assert len(run.said) == 2
    assert np.array_equal(run.saved(), TURNED.cameras["top"])


def test_a_resumed_run_keeps_what_its_checkpoint_has(tmp_path: Path, before: Path) -> None:
    run = Run(tmp_path, Start(step=3, resumed=before, initial=tmp_path))
    run.views.learn(NEARBY)
    run.views.see([report(NEARBY)], training=True)
    assert np.array_equal(run.saved(), HERE.cameras["top"])
    assert run.said == []


def test_an_older_checkpoint_gets_them_when_it_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, Start(step=3, resumed=tmp_path))
    run.views.see([report(HERE)], training=True)
    assert np.array_equal(run.saved(), HERE.cameras["top"])


def test_demonstrations_are_what_an_evaluation_must_show(tmp_path: Path) -> None:
    run = Run(tmp_path, Start())
    run.views.learn(HERE)
    run.views.see([report(TURNED)], training=False)
    assert "turned by 180 degrees" in run.said[0]
    assert np.array_equal(run.saved(), HERE.cameras["top"])


@pytest.mark.parametrize("key", ["path", "lora"])
def test_a_folder_of_weights_or_adapters_has_them_too(tmp_path: Path, before: Path, key: str) -> None:
    folder = str(before)
    model = replace(MODEL, path=folder if key == "path" else str(tmp_path))
    if key == "lora":
        model = replace(model, lora=replace(model.lora, path=folder))
    run = Run(tmp_path, Start(), model)
    run.views.see([report(TURNED)], training=False)
    assert "turned by 180 degrees" in run.said[0]
