"""``runner.recover=auto``: a run whose actor is lost goes on from its newest whole checkpoint, in the same command."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from embodied_rl.errors import ConfigError
from embodied_rl.launch import carry_out
from embodied_rl.models.mlp import MlpPolicy
from embodied_rl.runtime.worker import WorkerError
from embodied_rl.tasks.hooks import Hooks
from embodied_rl.tasks.planning import plan_of
from tests.checkpoints.saved import saved_tensors
from tests.configs import embodied, tiny_math_run, tiny_run
from tests.test_end_to_end import assert_equal, metrics_of, only_run

pytestmark = pytest.mark.timeout(300)
AUTO = (
    "cluster=process",
    "runner.recover=auto",
    "runner.max_steps=4",
    "runner.save_interval=2",
    "runner.eval_at_end=false",
)


class Accidents(Hooks):
    """What happens after so many steps, each time once."""

    def __init__(self, at: Mapping[int, Callable[[], object]]) -> None:
        self._at = dict(at)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        if accident := self._at.pop(step, None):
            accident()


def kill_actor() -> None:
    actor, *_ = [child for child in psutil.Process().children() if child.name().startswith("ActorGroup")]
    os.kill(actor.pid, signal.SIGKILL)


def outcome(directory: Path) -> dict[str, Any]:
    return {"metrics": metrics_of(directory), "tensors": saved_tensors(directory / "checkpoints/global_step_4")}


@pytest.mark.parametrize(
    "crossed",
    [
        (),
        ("model.lora.rank=2", "runner.save_async=true"),
        ("cluster.component_placement={env: 0-1, rollout: 0-1, actor: 0-1}",),
        (
            *("algorithm=ppo", "env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=8"),
            *("env.train.enable_offload=true", "env.eval.enable_offload=true"),
        ),
    ],
    ids=str,
)
def test_a_killed_actor(tmp_path: Path, capsys: pytest.CaptureFixture[str], crossed: tuple[str, ...]) -> None:
    options = (*AUTO, "runner.val_check_interval=2", "runner.eval_at_end=true", *crossed)
    disturbed = tiny_run(tmp_path, *options, "runner.experiment_name=disturbed")
    carry_out(plan_of(disturbed), hooks=Accidents({3: kill_actor}))
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"ActorGroup\[\d\] \(process", said) and "SIGKILL" in said
    assert "recovery 1 of at most 5: in 1 s the run goes on from" in said
    undisturbed = tiny_run(tmp_path, *options, "runner.experiment_name=undisturbed")
    carry_out(plan_of(undisturbed))
    left, right = only_run(disturbed), only_run(undisturbed)
    assert_equal(outcome(left), outcome(right))
    assert sorted(p.name for p in left.glob("eval_step_*")) == sorted(p.name for p in right.glob("eval_step_*"))


class Fragile(MlpPolicy):
    """Raises once, in the actor's training step of a run that has a checkpoint."""

    def evaluate(self, replay_inputs: Mapping[str, Tensor], **options: Any) -> Any:
        marker = Path(os.environ["FRAGILE"])
        saved = next(marker.parent.glob("results/*/*/checkpoints/global_step_2"), None)
        if self.training and saved and (os.environ.get("FRAGILE_AGAIN") or not marker.exists()):
            marker.touch()
            raise ZeroDivisionError("a cosmic ray")
        return super().evaluate(replay_inputs, **options)


def test_rollouts_that_run_ahead(tmp_path: Path) -> None:
    """What was ahead of the checkpoint is played anew, with newer weights than before."""
    config = tiny_run(tmp_path, *AUTO, "rollout.max_staleness=1")
    carry_out(plan_of(config), hooks=Accidents({3: kill_actor}))
    assert [step["step"] for step in metrics_of(only_run(config))] == [1, 2, 3, 4]


@pytest.mark.parametrize("again", [False, True])
def test_an_actor_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: bool
) -> None:
    monkeypatch.setenv("FRAGILE", str(tmp_path / "happened"))
    config = tiny_run(tmp_path, *AUTO, f"model.model_type={__name__}:Fragile")
    if not again:
        carry_out(plan_of(config))
        assert [step["step"] for step in metrics_of(only_run(config))] == [1, 2, 3, 4]
        return
    monkeypatch.setenv("FRAGILE_AGAIN", "1")
    with pytest.raises(
        WorkerError, match=r"a cosmic ray[\s\S]*no recovery: no checkpoint was made since the last one, at step 2"
    ):
        carry_out(plan_of(config))
    assert capsys.readouterr().out.count("recovery 1 of at most 5") == 1


def damage(checkpoint: Path) -> None:
    file = checkpoint / "actor/shard_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_newest_checkpoint_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(tmp_path, *AUTO, "runner.save_interval=1")

    def accident() -> None:
        damage(only_run(config) / "checkpoints/global_step_3")
        kill_actor()

    carry_out(plan_of(config), hooks=Accidents({3: accident}))
    said = " ".join(capsys.readouterr().out.split())
    assert "shard_00001.safetensors is not what was saved (another SHA-256)" in said
    assert "set aside as damaged_global_step_3" in said and "goes on from" in said
    names = {path.name for path in (only_run(config) / "checkpoints").iterdir()}
    assert {"damaged_global_step_3", "global_step_2", "global_step_3", "global_step_4"} <= names


def test_a_run_that_resumes_sets_it_aside_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tiny_run(tmp_path, *AUTO, "runner.save_interval=1", "runner.max_steps=3")
    carry_out(plan_of(first))
    damage(only_run(first) / "checkpoints/global_step_3")
    plan = plan_of(tiny_run(tmp_path, *AUTO, "runner.resume_dir=auto"))
    assert plan.start.step == 2
    carry_out(plan)
    assert "set aside as damaged_global_step_3" in " ".join(capsys.readouterr().out.split())
    assert [step["step"] for step in metrics_of(only_run(first))] == [1, 2, 3, 4]


def test_without_a_checkpoint_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"SIGKILL[\s\S]*no recovery: there is no checkpoint of this run yet"):
        carry_out(plan_of(tiny_run(tmp_path, *AUTO)), hooks=Accidents({1: kill_actor}))


@pytest.mark.parametrize("crossed", [(), ("model.lora.rank=2",)], ids=str)
def test_math(tmp_path: Path, crossed: tuple[str, ...]) -> None:
    by_text = "reward.function=tests.language.rewards.scores:by_text"
    runs = {
        name: tiny_math_run(tmp_path, *AUTO, by_text, f"runner.experiment_name={name}", *crossed)
        for name in ("disturbed", "undisturbed")
    }
    carry_out(plan_of(runs["disturbed"]), hooks=Accidents({2: kill_actor}))
    carry_out(plan_of(runs["undisturbed"]))
    assert_equal(*(outcome(only_run(config)) for config in runs.values()))


def test_it_needs_checkpoints() -> None:
    with pytest.raises(ConfigError, match=r"runner\.recover: got auto, but the run saves no checkpoint to go on from"):
        embodied("runner.recover=auto", "runner.save_interval=-1")


def test_a_debugger_gets_the_failure() -> None:
    with pytest.raises(ConfigError, match=r"runner\.recover: this run would not read it, since the serial backend"):
        embodied("runner.recover=auto", "cluster=serial")
