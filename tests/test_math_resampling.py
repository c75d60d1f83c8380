"""Completions without a score while groups are drawn again: what is counted is what is trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.contracts import TrainBatch
from embodied_rl.launch import run
from embodied_rl.training.update import Updater
from tests.configs import tiny_math_run

SIZE, PROMPTS = 4, 6


@dataclass(frozen=True)
class Step:
    """One training step of a run."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    trained: list[int]
    """Numbers of the completions in the batch."""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    batches: list[TrainBatch] = []
    original = Updater.run

    def spy(updater: Updater, batch: TrainBatch, **arguments: Any) -> dict[str, float]:
        batches.append(batch)
        return original(updater, batch, **arguments)

    monkeypatch.setattr(Updater, "run", spy)

    def of(function: str, *overrides: str) -> Step:
        config = tiny_math_run(
            tmp_path,
            "algorithm=dapo",
            f"algorithm.group_size={SIZE}",
            f"data.rollout_batch_size={PROMPTS}",
            f"reward.function=tests.language.rewards.scores:{function}",
            "rollout.max_new_tokens=24",  # so that some are cut, but not most
            "runner.max_steps=1",
            "runner.save_interval=-1",
            "runner.eval_at_end=false",
            *overrides,
        )
        run(config)
        [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
        samples = (directory / "samples/step_000001.jsonl").read_text().splitlines()
        [batch] = batches
        return Step(
            metrics=json.loads((directory / "metrics.jsonl").read_text()),
            samples=[json.loads(line) for line in samples],
            trained=sorted(batch.sequence_ids[batch.trainable()].tolist()),
        )

    return of


def passing(samples: list[dict[str, Any]], *, masked: bool) -> dict[int, list[int]]:
    """Prompt's number -> numbers of its completions with a score, where some are right and some wrong."""
    found: dict[int, list[int]] = {}
    for group in range(len(samples) // SIZE):
        members = [s for s in samples if s["number"] // SIZE == group]
        assert len(members) == SIZE
        known = [s for s in members if s["score"] is not None and not (masked and s["finish_reason"] == "length")]
        if len({s["score"] for s in known}) == 2:
            found[group] = [s["number"] for s in known]
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("function", ["right_or_wrong", "right_wrong_or_unverified"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_first_groups_that_pass_fill_the_batch(step: Any, function: str, masked: bool, seed: int) -> None:
    got = step(function, f"reward.mask_truncated={masked}", f"actor.seed={seed}", "algorithm.max_resample_rounds=9")
    good = passing(got.samples, masked=masked)
    rounds = int(got.metrics["rollout/rounds"])
    assert len(got.samples) == rounds * PROMPTS * SIZE
    assert len([group for group in good if group < (rounds - 1) * PROMPTS]) < PROMPTS, "no round too many"
    assert len(good) >= PROMPTS, "none too few"
    wanted = sorted(good)[:PROMPTS]
    assert got.trained == [number for group in wanted for number in good[group]]
    assert got.metrics["actor/groups"] == PROMPTS
    assert got.metrics["actor/samples"] == len(got.trained)
    known = [s["score"] for s in got.samples if s["number"] in {n for g in good.values() for n in g}]
    assert set(known) == {0.0, 1.0}


def test_what_is_missing_after_the_last_round_costs_no_good_group(step: Any) -> None:
    got = step("right_wrong_or_unverified", "reward.mask_truncated=true", "algorithm.max_resample_rounds=0")
    good = passing(got.samples, masked=True)
    assert 0 < len(good) < PROMPTS
    assert got.trained == [number for group in sorted(good) for number in good[group]]
    assert got.metrics["actor/groups"] == len(good)


def test_without_any_score_no_round_is_too_many_and_the_reason_is_said(
    step: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = "rollout.max_new_tokens=2", "rollout.min_new_tokens=2"
    got = step("right_or_wrong", "reward.mask_truncated=true", "algorithm.max_resample_rounds=2", *cut)
    whole = [s["number"] // SIZE for s in got.samples if s["finish_reason"] == "stop"]
    assert len(set(whole)) == len(whole), "nowhere two that could be compared"
    assert got.metrics["rollout/rounds"] == 3
    assert got.metrics["actor/groups"] == got.metrics["actor/samples"] == 0
    assert got.metrics["actor/groups_unscored"] == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "no update: no prompt has enough completions with a score, 0% are unverified and 9" in said
