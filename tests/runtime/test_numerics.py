"""How torch calculates, in the workers themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.cli import config_of
from embodied_rl.runtime.numerics import Numerics
from tests.configs import small_math, tiny_run
from tests.runtime.witness import Seen, look, seen_by_workers

ASKED = ["cluster.matmul_precision=high", "cluster.cudnn_tf32=false"]


def names(groups: list[list[Seen]]) -> list[str]:
    return [seen.name for group in groups for seen in group]


def test_every_worker_has_the_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ["cluster.component_placement.actor=0-1", "cluster.component_placement.env=0-1"]
    groups = seen_by_workers(tiny_run(tmp_path, *ranks, *ASKED), monkeypatch)
    assert sorted(names(groups)) == ["ActorGroup[0]", "ActorGroup[1]", "EnvGroup[0]", "EnvGroup[1]", "RolloutGroup[0]"]
    assert {seen.numerics for group in groups for seen in group} == {
        Numerics(matmul_precision="high", cudnn_tf32=False)
    }
    assert look().numerics == Numerics()


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


def test_the_defaults_are_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = seen_by_workers(tiny_run(tmp_path), monkeypatch)
    assert {seen.numerics for group in groups for seen in group} == {Numerics()}


def test_another_precision_is_refused() -> None:
    with pytest.raises(Exception, match=r"cluster\.matmul_precision: .*'tf32'"):
        config_of("env=dummy", "cluster.matmul_precision=tf32")
