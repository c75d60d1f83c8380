"""Wherever checkpoints are read: a pickle is refused by name and never run, and a bit that flipped is noticed."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.faults.exploding import Exploding
from embodied_rl.checkpoints.shards import has_adapters, load_actor
from embodied_rl.checkpoints.store import STATE_FILE
from embodied_rl.commands.doctor import folder_findings
from embodied_rl.commands.export import export
from embodied_rl.errors import CheckpointError
from embodied_rl.launch import run
from tests.commands.checkpoints import republish
from tests.configs import tiny_run
from tests.test_end_to_end import only_run
from tests.training.rollouts import small_policy

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
QUICK = ("cluster=serial", "algorithm=grpo", "runner.max_steps=1", "runner.eval_at_end=false")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_run(tmp_path_factory.mktemp("run"), *QUICK)
    run(config)
    return only_run(config) / "checkpoints/global_step_1"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved.parents[1], tmp_path / "run")
    return tmp_path / "run/checkpoints/global_step_1"


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
    **{name: inside(name) for name in (SHARD, "policy.json", STATE_FILE, *BESIDE)},
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
    if name not in ("policy.json", STATE_FILE):
        for read in (lambda: load_actor(small_policy(), None, checkpoint), lambda: has_adapters(checkpoint)):
            with pytest.raises(CheckpointError, match=re.escape(name)):
                read()
    assert not marker.exists(), "it ran"


def test_the_configuration_beside_it_makes_no_objects(checkpoint: Path, marker: Path) -> None:
    (checkpoint.parents[1] / "config.yaml").write_text(f"runner: !!python/object/apply:os.mkdir [{marker}]\n")
    assert "config.yaml: cannot be read" in resumed(checkpoint)
    assert not marker.exists(), "it ran"


# What disks and copies do; each returns what must be said of it.


def flipped(name: str, place: Callable[[bytes], int]) -> Callable[[Path], str]:
    """One bit, in the byte at ``place``."""

    def damage(checkpoint: Path) -> str:
        content = bytearray((checkpoint / name).read_bytes())
        content[place(bytes(content))] ^= 1
        (checkpoint / name).write_bytes(content)
        return f"{name}{': ' if name == STATE_FILE else ' '}is not what was saved"

    return damage


def shortened(name: str) -> Callable[[Path], str]:
    def damage(checkpoint: Path) -> str:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[:-1])
        return f"{name} has {len(content) - 1} bytes, {len(content)} were saved"

    return damage


def removed(name: str) -> Callable[[Path], str]:
    def damage(checkpoint: Path) -> str:
        (checkpoint / name).unlink()
        return f"{name} is missing"

    return damage


def linked(name: str) -> Callable[[Path], str]:
    def damage(checkpoint: Path) -> str:
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to("elsewhere")
        return f"{checkpoint}: cannot be read ([Errno 2] No such file or directory"

    return damage


def added(name: str) -> Callable[[Path], str]:
    def damage(checkpoint: Path) -> str:
        shutil.copy(checkpoint / SHARD, checkpoint / name)
        return f"{name} was not saved with it"

    return damage


DAMAGES = {
    "number in a shard": flipped(SHARD, lambda content: len(content) - 1),
    "name in a shard": flipped(SHARD, lambda content: content.index(b"model.")),
    "size of a shard's header": flipped(SHARD, lambda _: 0),
    "record": flipped("policy.json", lambda content: content.index(b"mlp")),
    "step": flipped(STATE_FILE, lambda content: content.index(b'"step": ') + len(b'"step": ')),
    "checksum": flipped(STATE_FILE, lambda content: content.index(b'"sha256": "') + len(b'"sha256": "')),
    "shortened shard": shortened(SHARD),
    "shortened record": shortened("policy.json"),
    "no shard": removed(SHARD),
    "link to nowhere": linked(SHARD),
    "no record": removed("policy.json"),
    "another shard": added("actor/shard_00002.safetensors"),
    "another record": added("extra.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("read", READERS)
def test_damage_is_noticed_and_its_file_named(read: Callable[[Path], str], damage: str, checkpoint: Path) -> None:
    assert DAMAGES[damage](checkpoint) in read(checkpoint)


def test_all_that_is_wrong_is_said_at_once(checkpoint: Path) -> None:
    expected = [DAMAGES[damage](checkpoint) for damage in ("number in a shard", "no record", "another shard")]
    said = resumed(checkpoint)
    assert said.startswith(f"{checkpoint} is not what was saved:\n")
    assert all(text in said for text in expected)
    assert said.endswith("Use another checkpoint of the run, or copy this one again.")


def test_the_reference_policy_is_compared_too(checkpoint: Path) -> None:
    """A run that goes on reads the one that it started from, for its reference."""
    options = (*QUICK, "algorithm.kl_beta=0.1")
    start = checkpoint.parents[2] / "start"
    shutil.copytree(checkpoint, start)
    config = tiny_run(checkpoint.parents[2], *options, f"runner.init_from={start}", "runner.experiment_name=kl")
    run(config)
    said = DAMAGES["number in a shard"](start)
    again = (f"runner.init_from={start}", "runner.experiment_name=kl", "runner.resume_dir=auto", "runner.max_steps=2")
    with pytest.raises(CheckpointError, match=re.escape(said)):
        run(tiny_run(checkpoint.parents[2], *options, *again))
