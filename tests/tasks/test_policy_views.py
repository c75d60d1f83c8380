"""Which thumbnails a run's checkpoints get, and of what it warns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.cli import config_of
from embodied_rl.commands.export import export
from embodied_rl.evaluation import views
from embodied_rl.evaluation.views import Views
from embodied_rl.launch import run
from embodied_rl.plan import Start
from embodied_rl.schema import ModelConfig
from embodied_rl.tasks.embodied.views import PolicyViews
from embodied_rl.workers.env import EnvReport
from tests.configs import tiny_run
from tests.evaluation.test_views import scene
from tests.test_end_to_end import only_run

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
    started = Run(tmp_path, Start())
    started.views.see([report(TURNED)], training=False)  # an evaluation before training
    assert not len(started.saved())
    started.views.see([report(None), report(HERE), report(NEARBY)], training=True)
    started.views.see([report(TURNED)], training=True)
    assert np.array_equal(started.saved(), np.concatenate([HERE.cameras["top"], NEARBY.cameras["top"]]))
    assert started.said == []


def test_what_it_starts_with_is_kept_while_it_learns_from_the_like(tmp_path: Path, before: Path) -> None:
    started = Run(tmp_path, Start(initial=before))
    started.views.see([report(NEARBY)], training=True)
    assert started.said == []
    assert np.array_equal(started.saved(), np.concatenate([HERE.cameras["top"], NEARBY.cameras["top"]]))


def test_training_on_something_else_is_said_once_and_replaces_it(tmp_path: Path, before: Path) -> None:
    started = Run(tmp_path, Start(initial=before))
    started.views.see([report(TURNED)], training=False)
    assert len(started.said) == 2
    assert "turned by 180 degrees" in started.said[0]
    started.views.see([report(TURNED)], training=True)
    assert len(started.said) == 2
    assert np.array_equal(started.saved(), TURNED.cameras["top"])


def test_a_resumed_run_keeps_what_its_checkpoint_has(tmp_path: Path, before: Path) -> None:
    started = Run(tmp_path, Start(step=3, resumed=before, initial=tmp_path))
    started.views.learn(NEARBY)
    started.views.see([report(NEARBY)], training=True)
    assert np.array_equal(started.saved(), HERE.cameras["top"])
    assert started.said == []


def test_an_older_checkpoint_gets_them_when_it_goes_on(tmp_path: Path) -> None:
    started = Run(tmp_path, Start(step=3, resumed=tmp_path))
    started.views.see([report(HERE)], training=True)
    assert np.array_equal(started.saved(), HERE.cameras["top"])


def test_demonstrations_are_what_an_evaluation_must_show(tmp_path: Path) -> None:
    started = Run(tmp_path, Start())
    started.views.learn(HERE)
    started.views.see([report(TURNED)], training=False)
    assert "turned by 180 degrees" in started.said[0]
    assert np.array_equal(started.saved(), HERE.cameras["top"])


@pytest.mark.parametrize("key", ["path", "lora"])
def test_a_folder_of_weights_or_adapters_has_them_too(tmp_path: Path, before: Path, key: str) -> None:
    folder = str(before)
    model = replace(MODEL, path=folder if key == "path" else str(tmp_path))
    if key == "lora":
        model = replace(model, lora=replace(model.lora, path=folder))
    started = Run(tmp_path, Start(), model)
    started.views.see([report(TURNED)], training=False)
    assert "turned by 180 degrees" in started.said[0]


@pytest.mark.parametrize(
    "going_on", [(), ("env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=8", "algorithm=ppo")]
)
def test_they_go_with_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], going_on: tuple[str, ...]
) -> None:
    """From a run to one that goes on from its checkpoint, to an exported folder, and to who plays that."""
    seen = ("model=cnn", "env.init_params.image_size=48", "model.params.image_features=16", "cluster=serial")
    keys = (*seen, *going_on, "runner.save_interval=1", "runner.eval_at_end=false")
    config = tiny_run(tmp_path, *keys, "runner.max_steps=2")
    run(config)
    first, second = sorted(only_run(config).glob("checkpoints/*"))
    kept = (first / views.FILE).read_bytes()
    assert (second / views.FILE).read_bytes() == kept
    run(tiny_run(tmp_path, *keys, "runner.max_steps=2", f"runner.resume_dir={first}"))
    assert (second / views.FILE).read_bytes() == kept
    export(second, tmp_path / "folder")
    assert (tmp_path / "folder" / views.FILE).read_bytes() == kept
    capsys.readouterr()
    run(tiny_run(tmp_path / "played", *seen, f"model.path={tmp_path / 'folder'}", "runner.only_eval=true"))
    [comparison] = (tmp_path / "played").rglob(views.COMPARISON)
    assert "agentview" in comparison.read_text()
    assert "its pictures are unlike" not in capsys.readouterr().out
