"""A pickle in a checkpoint is refused by name wherever checkpoints are read, and never run."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.state_dict_saver import save

from embodied_rl.commands.doctor import folder_findings
from embodied_rl.commands.export import export
from embodied_rl.errors import CheckpointError
from embodied_rl.launch import run
from embodied_rl.training.checkpoint import has_adapters, load_actor
from embodied_rl.training.checkpoint_store import STATE_FILE
from tests.commands.checkpoints import republish
from tests.configs import tiny_run
from tests.data.rollouts import small_policy
from tests.test_end_to_end import only_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
QUICK = ("cluster=serial", "algorithm=grpo", "runner.max_steps=1", "runner.eval_at_end=false")


class Exploding:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_run(tmp_path_factory.mktemp("run"), *QUICK)
    run(config)
    return only_run(config) / "checkpoints/global_step_1"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved.parents[1], tmp_path / "run")
    return tmp_path / "run/checkpoints/global_step_1"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    path = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Exploding(path)))
    assert path.is_dir(), "it does explode"
    path.rmdir()
    return path


# Where it lies; each returns the name that the refusal must say.


def as_metadata(checkpoint: Path, bomb: Exploding) -> str:
    """A whole checkpoint of before, its ``.metadata`` replaced."""
    save_as_before(checkpoint, 0.1)
    (checkpoint / "actor/.metadata").write_bytes(pickle.dumps(bomb))
    return "actor/.metadata"


def as_bytes_entry(checkpoint: Path, bomb: Exploding) -> str:
    """The same with whole metadata: an entry of the shard that is no tensor."""
    save_as_before(checkpoint, bomb)
    (checkpoint / "actor/.metadata").unlink()
    return "actor/__0_0.distcp"


def save_as_before(checkpoint: Path, rate: object) -> None:
    shutil.rmtree(checkpoint / "actor")
    state = {"model": small_policy().state_dict(), "optimizer": {"param_groups": [{"lr": rate}]}}
    save(state, checkpoint_id=str(checkpoint / "actor"), no_dist=True)
    (checkpoint / STATE_FILE).write_text('{"step": 1, "policy_version": 1}')


def inside(name: str, *, with_sum: bool = False) -> Callable[[Path, Exploding], str]:
    """The file itself; ``with_sum``: who can write the one can write the other."""

    def plant(checkpoint: Path, bomb: Exploding) -> str:
        (checkpoint / name).write_bytes(pickle.dumps(bomb))
        if with_sum:
            republish(checkpoint)
        return name

    return plant


RECORD_WITH_SUM = "policy.json with its sum"
SHARD = "actor/shard_00001.safetensors"
BESIDE = ("actor/extra.pt", "actor/pytorch_model.bin", "optimizer.pkl", "actor/.metadata", "actor/__1_0.distcp")
PLANTS = {
    "former metadata": as_metadata,
    "former bytes entry": as_bytes_entry,
    **{name: inside(name) for name in (SHARD, "policy.json", *BESIDE)},
    **{f"{name} with its sum": inside(name, with_sum=True) for name in (SHARD, "policy.json", *BESIDE)},
}


# Where it is read; each returns what was said.


def resumed(checkpoint: Path, *overrides: str) -> str:
    options = ("runner.max_steps=2", f"runner.resume_dir={checkpoint}", *overrides)
    with pytest.raises(CheckpointError) as caught:
        run(tiny_run(checkpoint.parents[2] / "new", *QUICK, *options))
    return str(caught.value)


def evaluated(checkpoint: Path) -> str:
    return resumed(checkpoint, "runner.only_eval=true")


def started_from(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        run(tiny_run(checkpoint.parents[2] / "new", *QUICK, f"runner.init_from={checkpoint}"))
    return str(caught.value)


def exported(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        export(checkpoint, checkpoint.parents[2] / "exported")
    return str(caught.value)


def examined(checkpoint: Path) -> str:
    return "\n".join(f.text + " " + f.advice for f in folder_findings(checkpoint) if f.status == "problem")


READERS = (resumed, evaluated, started_from, exported, examined)
WHERE = [(read, plant) for read in READERS for plant in PLANTS]
WHERE = [(read, plant) for read, plant in WHERE if read in (exported, examined) or plant != RECORD_WITH_SUM]
"""Who trains or evaluates builds the policy by the configuration, and has no use for its record."""


@pytest.mark.parametrize(("read", "plant"), WHERE)
def test_it_is_refused_by_name_and_not_run(
    read: Callable[[Path], str], plant: str, checkpoint: Path, marker: Path
) -> None:
    name = PLANTS[plant](checkpoint, Exploding(marker))
    said = read(checkpoint)
    assert not marker.exists(), "it ran"
    assert name in said


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_the_readers_refuse_it_by_themselves(
    plant: Callable[[Path, Exploding], str], checkpoint: Path, marker: Path
) -> None:
    """They do not rely on who has compared the checksums before."""
    name = plant(checkpoint, Exploding(marker))
    if name != "policy.json":
        for read in (lambda: load_actor(small_policy(), None, checkpoint), lambda: has_adapters(checkpoint)):
            with pytest.raises(CheckpointError, match=re.escape(name)):
                read()
    assert not marker.exists(), "it ran"
