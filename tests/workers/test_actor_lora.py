"""Adapters in a whole job: rollouts get them, the reference is the base under them, checkpoints hold them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.errors import CheckpointError
from embodied_rl.models.weights.lora import save_adapters
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.training.scoring import BaseReference, Reference
from tests.workers.job import Job, easy, small


def config_of(*overrides: str) -> EmbodiedConfig:
    return easy(
        small(
            "algorithm=grpo",
            "algorithm.group_size=2",
            "model.lora.rank=4",
            "algorithm.update_epoch=3",
            "actor.optim.lr=0.05",
            *overrides,
        ),
        0.7,
    )


def test_rollouts_act_with_the_adapters_and_the_base_stays() -> None:
    with Job(config_of()) as job:
        before = job.weights()
        for step in range(2):
            trajectories, _, _ = job.roll(step)
            # On policy: what was recorded is what the actor computes.
            assert job.update(step)["ratio"] == pytest.approx(1.0, abs=0.5)
            job.sync(step + 1)
        after = job.weights()
        own = job.policy.state_dict()
        assert all(torch.equal(own[name], after[name]) for name in after)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == {name for name in after if ".lora_" in name}
        fresh, _, _ = job.roll(2)
        for t in fresh:
            flat = {key: tensor.flatten(0, 1) for key, tensor in t.replay_inputs.items()}
            with torch.no_grad():
                again = job.actor._policy.eval()(flat, temperature=1.0).logprobs.view_as(t.logprobs)
            assert torch.allclose(again[t.valid], t.logprobs[t.valid], atol=1e-5)
        assert not torch.equal(fresh[0].logprobs, trajectories[0].logprobs)


def penalised(*overrides: str) -> EmbodiedConfig:
    return config_of("algorithm.kl_beta=0.3", *overrides)


@pytest.mark.parametrize("kind", ["k3", "full"])
def test_the_reference_is_the_base_and_costs_no_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = penalised(f"algorithm.kl_penalty_type={kind}")
    outcome = []
    for shared in (True, False):
        if not shared:
            # A rule that makes a copy for the same run: modules that are trained whole, here none that exist.
            monkeypatch.setattr("embodied_rl.workers.actor.BaseReference", Reference)
            monkeypatch.setattr("embodied_rl.workers.actor.ActorWorker._shares_its_base", lambda _: False)
        with Job(config) as job:
            assert type(job.actor._scorer._reference) is (BaseReference if shared else Reference)
            for step in range(2):
                job.roll(step)
                metrics = job.update(step)
                job.sync(step + 1)
            outcome.append((job.weights(), metrics["reference_kl"]))
    (weights, kl), (copied, copied_kl) = outcome
    assert kl > 1e-5
    assert kl == pytest.approx(copied_kl, rel=1e-4)
    assert all(torch.allclose(weights[name], copied[name], atol=1e-5) for name in weights)


def test_modules_that_are_trained_whole_need_a_copy() -> None:
    with Job(penalised("model.lora.modules_to_save=[log_std]")) as job:
        assert type(job.actor._scorer._reference) is Reference


def test_a_run_goes_on_with_adapters_of_a_folder(tmp_path: Path) -> None:
    with Job(config_of()) as job:
        job.roll()
        job.update()
        job.sync(1)
        before = {name: tensor for name, tensor in job.weights().items() if ".lora_" in name}
        save_adapters(job.policy, config_of().model.lora, "a/base", tmp_path / "adapters")
    given = f"model.lora.path={tmp_path / 'adapters'}"
    config = easy(small("algorithm=grpo", "algorithm.group_size=2", "algorithm.kl_beta=0.3", given), 0.7)
    with Job(config) as job:
        # Without its adapters the policy is not what the run starts from.
        assert type(job.actor._scorer._reference) is Reference
        assert all(torch.equal(tensor, before[name]) for name, tensor in job.weights().items() if name in before)
        job.roll()
        assert job.update()["reference_kl"] == pytest.approx(0.0, abs=1e-3)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in job.weights().items() if name in before)
        job.actor.save(tmp_path / "checkpoint")
    saved = PolicyRecord.read(tmp_path / "checkpoint").model.lora
    assert (saved.path, saved.rank, saved.alpha) == (None, 4, config_of().model.lora.alpha)


def test_a_checkpoint_with_adapters_resumes_and_one_without_starts_them(tmp_path: Path) -> None:
    plain = config_of("model.lora.rank=0")
    with Job(plain) as job:
        job.roll()
        job.update()
        job.actor.save(tmp_path / "plain")
        base = job.weights()
    # The adapters start on the weights of a run without them.
    started = replace(plain, model=config_of().model)
    with Job(started, initial=tmp_path / "plain") as job:
        weights = {name.replace(".base_layer", ""): tensor for name, tensor in job.weights().items()}
        assert all(torch.equal(weights[name], base[name]) for name in base)
        job.roll()
        job.update()
        job.actor.save(tmp_path / "lora")
        after = job.weights()
    with Job(started) as job:
        job.actor.load(tmp_path / "lora", weights_only=False)
        assert all(torch.equal(tensor, after[name]) for name, tensor in job.weights().items())
        with pytest.raises(CheckpointError, match="holds another model than this run's"):
            job.actor.load(tmp_path / "plain", weights_only=False)
    # And a run may start from adapters, too.
    with Job(started, initial=tmp_path / "lora") as job:
        assert all(torch.equal(tensor, after[name]) for name, tensor in job.weights().items())


def test_dropout_is_of_the_update_alone_and_the_same_again() -> None:
    def outcome(dropout: float) -> tuple[dict[str, torch.Tensor], float]:
        with Job(config_of(f"model.lora.dropout={dropout}", "actor.recompute_logprobs=true")) as job:
            for step in range(2):
                job.roll(step)
                metrics = job.update(step)
                job.sync(step + 1)
            return job.weights(), metrics["logprob_gap_max"]

    (none, gap), (some, gap_with), (again, _) = outcome(0.0), outcome(0.5), outcome(0.5)
    assert gap < 1e-5
    assert gap_with < 1e-5, "log-probabilities are computed without it"
    assert all(torch.equal(some[name], again[name]) for name in some)
    assert any(not torch.equal(some[name], none[name]) for name in some)
