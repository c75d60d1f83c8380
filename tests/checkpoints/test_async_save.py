from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.checkpoints.shards import (
    ACTOR_DIR,
    AsyncWriter,
    ShardWriter,
    actor_state,
    load_actor,
    save_actor,
    write_error,
)
from embodied_rl.errors import CheckpointError
from tests.training.learner import Learner, same, training_config
from tests.training.ranks import Ranks


def save_while_training(mesh: DeviceMesh, directory: Path) -> dict[str, Any]:
    """Train on while the checkpoint is written; what was saved, and whether rank 0 was told."""
    learner, writer, told = Learner(mesh, training_config("ppo")), AsyncWriter(), threading.Event()
    learner.train(first=0)
    saved = learner.weights()
    writer.begin(actor_state(learner.policy, learner.optimizer), directory / ACTOR_DIR, told.set)
    learner.train(first=1)
    after = learner.weights()
    writer.wait()
    return {"saved": saved, "after": after, "told": told.is_set()}


def loaded(mesh: DeviceMesh, directory: Path) -> dict[str, Tensor]:
    learner = Learner(mesh, training_config("ppo"))
    load_actor(learner.policy, learner.optimizer, directory)
    weights = learner.weights()
    learner.train(first=1)
    return weights | {f"after {name}": tensor for name, tensor in learner.weights().items()}


def test_what_is_saved_is_what_was_there_at_the_beginning(mesh: DeviceMesh, tmp_path: Path) -> None:
    result = save_while_training(mesh, tmp_path)
    assert result["told"]
    assert not same(result["saved"], result["after"])
    expected = result["saved"] | {f"after {name}": tensor for name, tensor in result["after"].items()}
    assert same(loaded(mesh, tmp_path), expected), "moments too, or the next step would differ"


@pytest.mark.slow
def test_two_ranks_save_while_they_train(two_ranks: Ranks, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Their collectives and those of the training do not get into each other's way."""
    result = two_ranks.run(save_while_training, tmp_path)
    assert all(rank["told"] for rank in result)
    weights = loaded(mesh, tmp_path)
    assert same({name: weights[name] for name in result[0]["saved"]}, result[0]["saved"])


def test_a_second_save_waits_for_the_first(mesh: DeviceMesh, tmp_path: Path) -> None:
    learner, writer, order = Learner(mesh, training_config("grpo")), AsyncWriter(), list[str]()
    gate = threading.Event()

    def first_done() -> None:
        gate.wait(30)
        order.append("first published")

    writer.begin(actor_state(learner.policy, learner.optimizer), tmp_path / "a" / ACTOR_DIR, first_done)
    order.append("training goes on")
    threading.Timer(0.2, gate.set).start()
    writer.begin(actor_state(learner.policy, learner.optimizer), tmp_path / "b" / ACTOR_DIR, lambda: None)
    order.append("second begun")
    writer.wait()
    assert order == ["training goes on", "first published", "second begun"]


def test_a_failure_surfaces_once(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, writer, told = Learner(mesh, training_config("grpo")), AsyncWriter(), threading.Event()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write_data", full)
        writer.begin(actor_state(learner.policy, learner.optimizer), tmp_path / "a" / ACTOR_DIR, told.set)
        with pytest.raises(BaseException, match="No space left on device") as caught:
            writer.wait()
    assert not told.is_set(), "it is not published"
    message = str(write_error(caught.value, tmp_path))
    assert message.startswith(f"{tmp_path}: cannot be written: [Errno 28] No space left on device")
    writer.wait()
    writer.begin(actor_state(learner.policy, learner.optimizer), tmp_path / "b" / ACTOR_DIR, told.set)
    writer.wait()
    assert told.is_set()


def test_a_checkpoint_without_optimiser_starts_runs_and_continues_none(mesh: DeviceMesh, tmp_path: Path) -> None:
    saved, other = (Learner(mesh, training_config("grpo")) for _ in range(2))
    saved.train()
    save_actor(saved.policy, None, tmp_path)
    load_actor(other.policy, None, tmp_path)
    assert same(other.weights(), saved.weights())
    with pytest.raises(CheckpointError, match=r"holds no optimiser.*save_contents=\[model\].*runner\.init_from"):
        load_actor(other.policy, other.optimizer, tmp_path)
