from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.planning import plan_of
from tests.demonstrations.recording import record
from tests.workers.job import Job, easy, small


def vision(config: EmbodiedConfig) -> EmbodiedConfig:
    """With a camera, for ``tiny_vla``."""
    params = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
    return replace(
        config,
        env=replace(config.env, init_params={"image_size": 32}),
        model=replace(config.model, model_type="tiny_vla", params=params),
    )


@pytest.mark.parametrize(
    ("model", "level"),
    [("mlp", "token_level"), ("mlp", "action_level"), ("mlp", "chunk_level"), ("tiny_vla", "chunk_level")],
)
def test_the_first_optimiser_step_has_a_ratio_of_1(model: str, level: str) -> None:
    """Acting and training agree: same weights, inputs, temperature and masks, from simulator to loss."""
    config = small(
        "algorithm=ppo",
        f"algorithm.logprob_type={level}",
        "algorithm.sampling_params.temperature=0.8",
        "algorithm.update_epoch=1",
        "algorithm.n_minibatches=1",
        "actor.micro_batch_size=12",
    )
    with Job(vision(config) if model == "tiny_vla" else easy(config)) as job:
        for step in range(2):
            job.roll(step)
            metrics = job.update(step)
            assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
            assert metrics["ratio_max"] == pytest.approx(1.0, abs=5e-5 if level == "chunk_level" else 1e-5)
            assert abs(metrics["approx_kl"]) < 1e-8
            assert metrics["optimizer_steps"] == 1
            job.sync(step + 1)


def test_old_weights_give_another_ratio() -> None:
    """The test above would notice."""
    config = small("algorithm=ppo", "algorithm.update_epoch=1", "algorithm.n_minibatches=1")
    with Job(config) as job:
        job.roll()
        job.update()
        job.roll(1)  # without a sync
        assert job.update(1)["ratio_max"] > 1.001


def test_what_the_update_reports() -> None:
    config = small("algorithm=ppo", "algorithm.normalize_advantages=false", "actor.optim.lr=0.002")
    with Job(config) as job:
        trajectories, _, _ = job.roll()
        metrics = job.update()
    chunks = sum(int(t.valid.any(-1).sum()) for t in trajectories)
    assert metrics["samples"] == chunks
    assert metrics["learning_rate"] == 0.002
    assert metrics["optimizer_steps"] == 4 * 4
    assert {"policy_loss", "value_loss", "entropy", "grad_norm", "explained_variance", "return_mean"} <= metrics.keys()
    assert metrics["groups_filtered"] == 0
    # Undiscounted returns of two chunks are within the rewards and values there were.
    assert metrics["return_std"] > 0
    assert metrics["advantage_std"] > 0


def test_the_order_of_arrival_changes_nothing() -> None:
    weights = []
    for reverse in (False, True):
        with Job(small("algorithm.rollout_epoch=2")) as job:
            job.roll()
            if reverse:
                job.actor._received.reverse()
            job.update()
            weights.append(job.weights())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_seed_decides_the_initial_weights() -> None:
    weights = []
    for seed in (1, 1, 2):
        with Job(small(f"actor.seed={seed}")) as job:
            weights.append(job.weights()["policy.0.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.slow
def test_what_a_resume_reads_leaves_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(small("algorithm=ppo", "critic.enable=true")) as job:
        actor = job.actor
        assert actor._critic is not None
        actor.save(tmp_path)
        left: list[tuple[str, bool]] = []

        class Noted:
            def __init__(self, whose: str, optimizer: Optimizer) -> None:
                self.whose, self.optimizer = whose, optimizer

            def leave_device(self) -> None:
                left.append((self.whose, bool(self.optimizer.state)))

        for optimizer in (actor._optimizer, actor._critic.optimizer):
            optimizer.state.clear()
        monkeypatch.setattr(actor, "_state", Noted("actor", actor._optimizer))
        monkeypatch.setattr(actor._critic, "_state", Noted("critic", actor._critic.optimizer))
        actor.load(tmp_path, weights_only=False)
        assert left == [("actor", True), ("critic", True)], "once the moments were read"


def test_training_makes_the_policy_better() -> None:
    """The whole loop learns: GRPO on the dummy env, from almost no success to most."""
    config = small(
        "env.train.total_num_envs=64",
        "env.train.max_episode_steps=32",
        "env.eval.max_episode_steps=32",
        "env.eval.episodes_per_task=16",
        "algorithm.update_epoch=4",
        "algorithm.n_minibatches=4",
        "++model.params.hidden_size=64",
    )
    with Job(config) as job:
        before = sum(e.success for e in job.evaluate()) / 64
        for step in range(12):
            job.roll(step)
            job.update(step)
            job.sync(step + 1)
        after = sum(e.success for e in job.evaluate()) / 64
    assert before < 0.2
    assert after > 0.6


def test_it_keeps_to_recorded_episodes(tmp_path: Path) -> None:
    shown = [record(tmp_path / name, seeds, image_size=64) for name, seeds in (("a", range(4)), ("b", range(4, 6)))]
    kept = ("algorithm=ppo", "algorithm.bc_coef=0.5", "algorithm.bc_batch_size=5")
    losses = {}
    for path in (str(shown[0]), f"[{shown[0]}]", f"[{shown[0]},{shown[1]}]"):
        with Job(vision(small(*kept, f"algorithm.bc_path={path}"))) as job:
            job.roll()
            losses[path] = job.update()["bc_loss"]
    one, listed, both = losses.values()
    assert one == listed > 0
    assert both != one, "other frames are drawn"
    with Job(vision(small("algorithm=ppo"))) as job:
        job.roll()
        assert "bc_loss" not in job.update()


def test_recorded_episodes_of_another_env_are_refused_before_anything_starts(tmp_path: Path) -> None:
    shown = record(tmp_path, range(1))
    config = vision(small("algorithm=ppo", "algorithm.bc_coef=0.5", f"algorithm.bc_path={shown}"))
    with pytest.raises(ConfigError, match=r"algorithm.bc_path=.*: was recorded without images"):
        plan_of(config)
    config = small("algorithm=ppo", "algorithm.bc_coef=0.5", f"algorithm.bc_path={tmp_path / 'none'}")
    with pytest.raises(UserError, match=r"algorithm.bc_path: "):
        plan_of(config)
