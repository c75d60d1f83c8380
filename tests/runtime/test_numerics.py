"""How torch calculates, in the workers themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from embodied_rl.cli import config_of
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.launch import run
from embodied_rl.runtime.numerics import Numerics
from tests.checkpoints.saved import saved_tensors
from tests.configs import small_math, tiny_run
from tests.runtime.witness import Seen, look, seen_by_workers
from tests.test_end_to_end import assert_equal, metrics_of, only_run

DETERMINISTIC = "runner.deterministic=true"
ASKED = ["cluster.matmul_precision=high", "cluster.cudnn_tf32=false"]


def names(groups: list[list[Seen]]) -> list[str]:
    return [seen.name for group in groups for seen in group]


@pytest.mark.cold_start
def test_every_worker_has_the_precision_and_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    ranks = ["cluster.component_placement.actor=0-1", "cluster.component_placement.env=0-1"]
    groups = seen_by_workers(tiny_run(tmp_path, *ranks, *ASKED, DETERMINISTIC), monkeypatch)
    assert sorted(names(groups)) == ["ActorGroup[0]", "ActorGroup[1]", "EnvGroup[0]", "EnvGroup[1]", "RolloutGroup[0]"]
    found = [seen for group in groups for seen in group]
    assert {seen.numerics for seen in found} == {
        Numerics(matmul_precision="high", cudnn_tf32=False, deterministic=True)
    }
    assert {seen.environment["CUBLAS_WORKSPACE_CONFIG"] for seen in found} == {":4096:8"}
    assert look().numerics == Numerics()
    assert "CUBLAS_WORKSPACE_CONFIG" not in look().environment


@pytest.mark.cold_start
def test_workers_of_language_have_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = seen_by_workers(small_math("cluster=process", *ASKED), monkeypatch)
    assert sorted(names(groups)) == ["ActorGroup[0]", "RolloutGroup[0]"]
    assert all(seen.numerics.matmul_precision == "high" for group in groups for seen in group)


def test_in_one_process_it_is_as_before_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    groups = seen_by_workers(tiny_run(tmp_path, "cluster=serial", "cluster.matmul_precision=medium"), monkeypatch)
    assert len(groups) == 3
    assert {seen.numerics for group in groups for seen in group} == {
        Numerics(matmul_precision="medium", cudnn_tf32=True)
    }
    assert look().numerics == Numerics(cudnn_tf32=False)


@pytest.mark.cold_start
def test_the_defaults_are_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = seen_by_workers(tiny_run(tmp_path), monkeypatch)
    assert {seen.numerics for group in groups for seen in group} == {Numerics()}
    [env] = [seen for group in groups for seen in group if seen.name == "EnvGroup[0]"]
    assert not env.compiler, "70 MB that it does not need"


def test_another_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.matmul_precision: .*'tf32'"):
        config_of("env=dummy", "cluster.matmul_precision=tf32")


UNREPEATABLE = '''
import torch
from embodied_rl.models.mlp import MlpPolicy

class Unrepeatable(MlpPolicy):
    """Its values pass through an operation that adds in any order."""

    def evaluate(self, replay_inputs, **options):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return super().evaluate(replay_inputs, **options)
'''


def test_one_process_is_deterministic_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    groups = seen_by_workers(tiny_run(tmp_path, "cluster=serial", DETERMINISTIC), monkeypatch)
    for seen in (seen for group in groups for seen in group):
        assert seen.numerics == Numerics(deterministic=True)
        assert seen.environment["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's choice of the two that work
        assert seen.environment["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    after = look()
    assert after.numerics == Numerics()
    assert after.environment["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert "TORCHINDUCTOR_DETERMINISTIC" not in after.environment


def test_it_may_be_too_late_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UserError, match=r"used CUDA before, .*set CUBLAS_WORKSPACE_CONFIG=:4096:8 .*cluster=process"):
        run(tiny_run(tmp_path, "cluster=serial", DETERMINISTIC))
    assert look().numerics == Numerics()


@pytest.mark.parametrize("cluster", ["serial", "process"])
def test_an_operation_that_cannot_repeat_itself_ends_the_run(tmp_path: Path, cluster: str) -> None:
    file = tmp_path / "unrepeatable.py"
    file.write_text(UNREPEATABLE)
    options = [f"cluster={cluster}", f"model.model_type={file}:Unrepeatable", "runner.max_steps=1"]
    message = (
        r"^runner\.deterministic=true: put_ does not have a deterministic implementation "
        rf"\({file}, line 9\); set it to false, or use a policy or loss without that operation$"
    )
    with pytest.raises(UserError, match=message):
        run(tiny_run(tmp_path, DETERMINISTIC, *options))
    run(tiny_run(tmp_path, "runner.deterministic=false", *options, "runner.eval_at_end=false"))


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^out of luck$"), Numerics(deterministic=True).explained():
        raise RuntimeError("out of luck")


COMPILED = pytest.param(
    ["actor.torch_compile=true"],
    id="compiled",
    marks=[
        pytest.mark.slow,
        pytest.mark.cold_start,
        pytest.mark.timeout(600),
        pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"),
    ],
)


@pytest.mark.parametrize("options", [pytest.param([], id="eager"), COMPILED])
def test_two_runs_and_a_resumed_one_are_equal(tmp_path: Path, options: list[str]) -> None:
    def train(name: str, *more: str) -> Path:
        own = [DETERMINISTIC, f"runner.experiment_name={name}", "runner.eval_at_end=false", "algorithm=ppo"]
        config = tiny_run(tmp_path, *own, *options, *more)
        run(config)
        return only_run(config)

    first = train("first", "runner.max_steps=2")
    second = train("second", "runner.max_steps=2")
    train("parts", "runner.max_steps=1")
    parts = train("parts", "runner.max_steps=2", "runner.resume_dir=auto")
    expected = saved_tensors(first / "checkpoints/global_step_2")
    for other in (second, parts):
        assert metrics_of(other) == metrics_of(first)
        assert_equal(saved_tensors(other / "checkpoints/global_step_2"), expected)


def test_weights_that_come_at_any_time_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"runner\.deterministic: got true with rollout\.interruptible=true"):
        small_math("cluster=process", "rollout.max_staleness=1", "rollout.interruptible=true", DETERMINISTIC)
