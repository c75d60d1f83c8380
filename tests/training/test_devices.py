"""Updates on a stand-in accelerator: where a GPU would refuse to go on, so does it, and the numbers are the CPU's."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.stand_in import stand_in_accelerator
from tests.test_presets import PRESETS
from tests.training.learner import Learner, distance, training_config
from tests.training.test_update import RECIPES

RATIO = "algorithm.early_stop_imp_ratio=1.001"
MORE = [("decoupled_ppo", RATIO), ("ppo", "algorithm.critic_warmup_steps=1", "algorithm.normalize_returns=true")]
CASES = [*RECIPES, *MORE, *((preset,) for preset in PRESETS if (preset,) not in RECIPES)]


@pytest.mark.parametrize("recipe", CASES, ids="-".join)
def test_an_accelerator_trains_as_the_cpu(mesh: DeviceMesh, recipe: tuple[str, ...]) -> None:
    config = training_config(*recipe, "actor.micro_batch_size=16")
    learner = Learner(mesh, config)
    expected = learner.train(2)
    with stand_in_accelerator() as device:
        accelerated = Learner(mesh, config, device=device)
        found = accelerated.train(2)
        weights = {name: tensor.detach().cpu() for name, tensor in accelerated.policy.state_dict().items()}
        assert {state["exp_avg"].device.type for state in accelerated.optimizer.state.values()} == {device}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert distance(weights, learner.weights()) < 1e-6
