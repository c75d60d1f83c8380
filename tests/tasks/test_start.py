"""Where a run begins that has begun before: its own weights, and those that its reference policy has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embodied_rl.errors import CheckpointError
from embodied_rl.launch import run
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.planning import plan_of, start_at
from tests.configs import tiny_run

RUN = ("model=mlp", "cluster=serial", "runner.max_steps=1", "runner.val_check_interval=-1", "runner.eval_at_end=false")


def source(directory: Path, seed: int) -> Path:
    """The checkpoint of a run of the experiment that others start from."""
    run(tiny_run(directory, *RUN, "runner.experiment_name=source", f"actor.seed={seed}"))
    return max(directory.glob("results/source/*/checkpoints/global_step_1"))


def config(directory: Path, *overrides: str) -> EmbodiedConfig:
    """A run from that experiment."""
    given = (*RUN, "runner.experiment_name=trained", f"runner.init_from={directory / 'results/source'}")
    return tiny_run(directory, *given, *overrides)


def test_the_reference_is_what_the_run_began_with(tmp_path: Path) -> None:
    first = source(tmp_path, seed=1)
    with_reference = ("algorithm.kl_beta=0.1",)
    run(config(tmp_path, *with_reference))
    assert source(tmp_path, seed=2) != first

    again = (*with_reference, "runner.resume_dir=auto", "runner.max_steps=2")
    assert plan_of(config(tmp_path, *with_reference)).start.initial != first
    assert plan_of(config(tmp_path, *again)).start.initial == first
    run(config(tmp_path, *again))
    assert plan_of(config(tmp_path, *again)).start.initial == first

    moved = tmp_path / "elsewhere"
    (tmp_path / "results").rename(moved)
    there = (*again, f"runner.output_dir={moved}", f"runner.init_from={moved / 'source'}")
    with pytest.raises(CheckpointError, match=r"global_step_1: no such directory, but the run began with its weights"):
        plan_of(config(tmp_path, *there))
    newer = max(moved.glob("source/*"))
    shutil.rmtree(newer)
    [trained] = moved.glob("trained/*/checkpoints/global_step_2")
    found = start_at(trained, config(tmp_path, *there))
    assert found.initial == moved / first.relative_to(tmp_path / "results")


def test_without_a_reference_nothing_is_needed_of_where_the_run_began(tmp_path: Path) -> None:
    source(tmp_path, seed=1)
    run(config(tmp_path))
    shutil.rmtree(tmp_path / "results/source")
    for more in (("runner.max_steps=2",), ("runner.only_eval=true",), ("runner.only_eval=true", "algorithm.kl_beta=1")):
        assert plan_of(config(tmp_path, "runner.resume_dir=auto", *more)).start.initial is None
    with pytest.raises(CheckpointError, match=r"runner.init_from=.*: no such directory"):
        plan_of(config(tmp_path))
