"""``model.trainable``: patterns, and what they leave to updates, checkpoints and weight syncs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.launch import run
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.trainable import freeze_others
from embodied_rl.tasks.planning import plan_of
from tests.checkpoints.saved import saved_tensors, saved_weights
from tests.configs import embodied, tiny_run
from tests.test_end_to_end import only_run
from tests.training.learner import distance, load_and_go_on, save_and_go_on, trained, training_config
from tests.training.ranks import Ranks
from tests.training.rollouts import small_policy

LAST = "model.trainable={*:false,policy.4.*:true}"


def names(policy: Policy) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


def test_the_last_pattern_that_matches_counts() -> None:
    policy = small_policy(1)
    of_value_head = {name for name in names(policy) if name.startswith("value_head.")}
    freeze_others(policy, {"*": False, "policy.*": True, "policy.0.*": False})
    assert names(policy) - of_value_head == {f"policy.{n}.{kind}" for n in (2, 4) for kind in ("weight", "bias")}
    assert of_value_head <= names(policy), "always"

    policy = small_policy(1)
    everything = names(policy)
    freeze_others(policy, {"log_std": False})
    assert names(policy) == everything - {"log_std"}


def test_what_a_model_does_not_train_stays_frozen() -> None:
    policy = small_policy()
    policy.get_parameter("policy.0.bias").requires_grad_(False)
    freeze_others(policy, {"*": True})
    assert "policy.0.bias" not in names(policy)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "{polcy.0.weight:true}",
            r"got 'polcy.0.weight', which is no parameter's name. Did you mean 'policy.0.weight'",
        ),
        ("{value_head.*:false}", r"got 'value_head.\*', which is no parameter's name"),
        ("{*:false}", "which leaves nothing to train"),
    ],
)
def test_patterns_are_refused_before_the_start(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(embodied("env=dummy", f"model.trainable={override}"))


def test_adapters_have_a_choice_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"name what is to be trained beside them in model\.lora\.modules_to_save"):
        embodied("env=dummy", LAST, "model.lora.rank=2")


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_an_update_moves_the_chosen_alone_in_any_number_of_ranks(
    mesh: DeviceMesh, two_ranks: Ranks, algorithm: str
) -> None:
    config = training_config(algorithm, LAST)
    before = {name: tensor.clone() for name, tensor in small_policy(int(algorithm == "ppo")).state_dict().items()}
    one, (two, _) = trained(mesh, config, 2), two_ranks.run(trained, config, 2)
    for weights in (one["weights"], two["weights"]):
        moved = {name for name, tensor in weights.items() if not torch.equal(tensor, before[name])}
        assert moved == {name for name in before if name.startswith(("policy.4.", "value_head."))}
    assert distance(one["weights"], two["weights"]) < 1e-5


def test_another_number_of_ranks_goes_on_from_a_checkpoint(mesh: DeviceMesh, two_ranks: Ranks, tmp_path: Path) -> None:
    config = training_config("ppo", LAST)
    one = save_and_go_on(mesh, config, tmp_path)
    two, _ = two_ranks.run(load_and_go_on, config, tmp_path)
    assert distance(one["saved"], two["loaded"]) == 0
    assert distance(one["after"], two["after"]) < 1e-5


def test_only_they_travel_and_have_moments(tmp_path: Path) -> None:
    """Rollout workers check the whole policy after every sync, in which the last layer alone was new."""
    config = tiny_run(
        tmp_path, LAST, "algorithm=ppo", "actor.verify_weight_sync=true", "runner.max_steps=2", "runner.save_interval=1"
    )
    run(config)
    first, second = (only_run(config) / f"checkpoints/global_step_{step}" for step in (1, 2))
    before, after = saved_weights(first), saved_weights(second)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    chosen = {name for name in before if name.startswith(("policy.4.", "value_head."))}
    assert moved == chosen
    moments = {name for name in saved_tensors(second) if name.startswith("optimizer.") and "exp_avg" in name}
    assert moments
    assert all(any(name in moment for name in chosen) for moment in moments)
