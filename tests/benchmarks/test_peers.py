"""The comparison with peers: its verdicts, its list, and, where their environment exists, the comparison itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.peers import environment, ours, ours_losses
from benchmarks.peers.cases import CASES
from benchmarks.peers.comparison import Case, Explanation, compare, difference
from benchmarks.peers.inputs import Computations, draw
from benchmarks.peers.workload import ENVS, ROLLOUT, WORKLOADS
from benchmarks.peers.workload import draw as draw_workload

ROOT = Path(__file__).resolve().parents[2]


def one(*numbers: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(numbers)}


@pytest.mark.parametrize(
    ("ours_", "theirs", "gap", "equal"),
    [
        ((1.0, 2.0), (1.0, 2.0), 0.0, True),
        # 3e-5 is more than 1e-5 · (1 + 1) and less than 1e-5 · (1 + 1000).
        ((1.00003, 0.0), (1.0, 0.0), 3e-5, False),
        ((1000.00003, 0.0), (1000.0, 0.0), 0.0, True),
        # A gradient of 1e-3 may be off by 2e-8, not by 1e-5.
        ((0.00101, 0.0), (0.001, 0.0), 1e-5, False),
        ((float("nan"), 0.0), (1.0, 0.0), float("inf"), False),
        ((1.0, 0.0), (float("inf"), 0.0), float("inf"), False),
    ],
)
def test_difference(ours_: tuple[float, ...], theirs: tuple[float, ...], gap: float, equal: bool) -> None:
    found, same = difference(one(*ours_), one(*theirs))
    assert found == pytest.approx(gap, rel=0.05, abs=1e-4 if theirs[0] == 1000.0 else 0.0)
    assert same is equal


def test_difference_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="got parts"):
        difference(one(1.0), {"y": torch.zeros(1)})
    with pytest.raises(ValueError, match="shape"):
        difference(one(1.0), one(1.0, 2.0))


OURS = {"a": one(1.0), "a, as peer": one(2.0)}
THEIRS = {"a": one(1.0), "b": one(2.0)}


def case(theirs: str, explained: Explanation | None = None, raises: str | None = None) -> Case:
    return Case(function="f", peer="p", ours="a", theirs=theirs, explained=explained, raises=raises)


PROVEN = Explanation(why="because", ours="a, as peer", theirs="b")
UNPROVEN = Explanation(why="because", ours="a", theirs="b")


@pytest.mark.parametrize(
    ("given", "verdict", "fails"),
    [
        (case("a"), "equal", False),
        (case("b"), "DIFFERS", True),
        (case("b", PROVEN), "explained", False),
        (case("b", UNPROVEN), "WRONG", True),
        (case("a", PROVEN), "STALE", True),
        (case("broken", raises="IndexError: out"), "peer raises", False),
        (case("broken", raises="KeyError"), "STALE", True),
        (case("a", raises="IndexError"), "STALE", True),
    ],
)
def test_verdicts(given: Case, verdict: str, fails: bool) -> None:
    result = compare(given, OURS, THEIRS, {"broken": "IndexError: out of range"})
    assert result.verdict == verdict
    assert result.fails is fails


def test_a_peer_that_raises_unexpectedly_is_named() -> None:
    with pytest.raises(ValueError, match="broken raised IndexError"):
        compare(case("broken"), OURS, THEIRS, {"broken": "IndexError"})


def test_no_two_computations_share_a_name() -> None:
    computations = Computations()
    computations("a")(lambda x: {})
    with pytest.raises(ValueError, match="two computations"):
        computations("a")(lambda x: {})


def test_our_side_of_every_case_is_finite() -> None:
    inputs = draw(0)
    computations = {**ours.COMPUTATIONS, **ours_losses.COMPUTATIONS}
    named = {c.ours for c in CASES} | {c.explained.ours for c in CASES if c.explained}
    assert named <= set(computations)
    for name in named:
        for part, tensor in computations[name](inputs).items():
            assert tensor.isfinite().all(), f"{name}: {part}"


def test_inputs_are_a_function_of_the_seed() -> None:
    first, again, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["logprobs"], other["logprobs"])


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_is_valid_up_to_the_end(name: str) -> None:
    workload = draw_workload(name)
    steps = WORKLOADS[name][0]
    in_time = workload.valid.transpose(1, 2).reshape(ROLLOUT * steps, ENVS)
    ended = workload.ended.transpose(1, 2).reshape(ROLLOUT * steps, ENVS)
    assert torch.equal(in_time.long(), (ended.long().cumsum(0) - ended.long() == 0).long())
    assert 0 < ended.sum() < ENVS


@pytest.mark.slow
@pytest.mark.skipif(not environment.exists(), reason="no .venv-peers; bash benchmarks/peers/setup.sh makes it")
def test_no_difference_is_unexplained() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
