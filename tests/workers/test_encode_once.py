"""Frozen encoders of pictures that are asked once for all passes of an update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.launch import run
from embodied_rl.models.base import Policy
from embodied_rl.schema import EmbodiedConfig
from tests.configs import tiny_run
from tests.logged import accounted
from tests.models.test_attention import policy_and_inputs as flow_policy_and_inputs
from tests.models.test_policies import act, make, observe
from tests.test_end_to_end import metrics_of, only_run
from tests.workers.job import Job, small
from tests.workers.test_actor import vision

FROZEN = {"cameras.*": False, "words.*": False, "word_projection.*": False, "word_positions": False}
TWICE = ("algorithm=ppo", "algorithm.update_epoch=3", "algorithm.n_minibatches=2")


def seeing(*options: str, trainable: dict[str, bool] = FROZEN, **actor: Any) -> EmbodiedConfig:
    config = vision(small(*TWICE, *options))
    model = replace(config.model, trainable=trainable)
    return replace(config, model=model, actor=replace(config.actor, encode_once=True, **actor))


def policy_and_inputs(family: str, directory: Path) -> tuple[Policy, dict[str, Tensor]]:
    if family != "tiny_vla":
        return flow_policy_and_inputs(family, directory)
    policy = make(family)
    return policy, dict(act(policy, observe(family)).replay_inputs)


@pytest.mark.parametrize("family", ["tiny_vla", "pi0", "pi05", "smolvla"])
def test_a_decision_is_evaluated_alike(family: str, tmp_path: Path) -> None:
    policy, inputs = policy_and_inputs(family, tmp_path)
    encoded = policy.encoded(inputs)
    assert not any(name.startswith("images/") for name in encoded)
    assert {name for name in inputs if not name.startswith("images/")} < set(encoded)
    ours, theirs = (policy.evaluate(given, temperature=0.8) for given in (encoded, inputs))
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)
    if theirs.values is not None:
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["tiny_vla", "pi0", "pi05", "smolvla"])
def test_nothing_else_changes_what_is_encoded(family: str, tmp_path: Path) -> None:
    """All other parameters may be trained meanwhile."""
    policy, inputs = policy_and_inputs(family, tmp_path)
    before = policy.encoded(inputs)
    named = {id(parameter) for parameter in policy.picture_parameters()}
    with torch.no_grad():
        for parameter in policy.parameters():
            if id(parameter) not in named:
                parameter.add_(0.1)
    for name, tensor in policy.encoded(inputs).items():
        assert torch.equal(tensor, before[name]), name
    with torch.no_grad():
        for parameter in policy.picture_parameters():
            parameter.add_(0.1)
    after = policy.encoded(inputs)
    assert all(not torch.equal(after[name], before[name]) for name in after if name.startswith("encoded/"))


def trained(config: EmbodiedConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], dict[str, Tensor], int]:
    """Metrics and weights after two steps, and how often pictures went through the encoder."""
    from embodied_rl.models.tiny_vla import _ImageStem

    count, forward = 0, _ImageStem.forward

    def counted(self: Any, images: Tensor, *args: Any) -> Tensor:
        nonlocal count
        count += len(images)
        return forward(self, images, *args)

    with Job(config) as job:
        for step in range(2):
            job.roll(step)
            monkeypatch.setattr(_ImageStem, "forward", counted)
            metrics = job.update(step)
            monkeypatch.setattr(_ImageStem, "forward", forward)
            job.sync(step + 1)
        return metrics, job.weights(), count


@pytest.mark.parametrize("options", [(), ("critic.enable=true",), ("algorithm.kl_beta=0.1",)], ids=str)
def test_training_is_the_same(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    once = seeing(*options)
    every = replace(once, actor=replace(once.actor, encode_once=False))
    (ours, weights, seldom), (theirs, expected, often) = (trained(c, monkeypatch) for c in (once, every))
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    if not options:
        assert often > 2.8 * seldom, "and one to count operations"


def test_what_is_trained_is_refused() -> None:
    with pytest.raises(UserError, match=r"actor.encode_once.*encoders of pictures of model_type=tiny_vla are trained"):
        Job(seeing(trainable={"words.*": False}))
    config = small(*TWICE)
    with pytest.raises(UserError, match=r"actor.encode_once.*model_type=mlp has no encoder of pictures"):
        Job(replace(config, actor=replace(config.actor, encode_once=True)))


def test_without_a_second_pass_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor\.encode_once.*algorithm\.update_epoch is 1"):
        small("algorithm=ppo", "algorithm.update_epoch=1", "actor.encode_once=true")


def test_two_ranks_do_it_together(tmp_path: Path) -> None:
    found = []
    patterns = ",".join(f"{pattern}:false" for pattern in FROZEN)
    for ranks in ("0", "0-1"):
        config = tiny_run(
            tmp_path / ranks,
            *("cluster=process", f"cluster.component_placement={{env: 0, rollout: 0, actor: '{ranks}'}}"),
            *(*TWICE, "runner.max_steps=1", "runner.eval_at_end=false", "actor.encode_once=true"),
            *("model=tiny_vla", "model.params.hidden_size=16", "model.params.num_layers=1", "model.params.num_heads=2"),
            *("env.init_params.image_size=32", f"++model.trainable={{{patterns}}}"),
        )
        run(config)
        [step] = accounted(only_run(config))
        assert step["time/encoding"] > 0
        found += [
            {name: value for name, value in line.items() if name.startswith("actor/")}
            for line in metrics_of(only_run(config))
        ]
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-4)
