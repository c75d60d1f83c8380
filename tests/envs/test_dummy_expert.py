from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.demonstrations.expert import expert_class
from embodied_rl.envs.dummy import DummyEnv, DummyExpert, DummyParams
from embodied_rl.errors import UserError
from tests.fakes import ScriptedSim


@pytest.mark.parametrize(("step_size", "noisy"), [(0.15, False), (0.15, True), (0.03, False), (0.5, True)])
def test_it_reaches_the_goal_from_everywhere(step_size: float, noisy: bool) -> None:
    env = DummyEnv(1, DummyParams(step_size=step_size), seed=0)
    expert = expert_class("dummy")(env)
    for reset_state_id in range(0, env.num_reset_states, 7):
        env.reset([0], [reset_state_id])
        expert.reset(0)
        generator = np.random.default_rng(reset_state_id) if noisy else None
        for _ in range(100):
            action = expert.act(0, generator)
            assert action.dtype == np.float32 and np.abs(action).max() <= 1
            if env.step([0], action[None]).success[0]:
                break
        else:
            pytest.fail(f"no success from {reset_state_id}")


def test_it_wants_its_env_and_a_reset() -> None:
    with pytest.raises(UserError, match="got a ScriptedSim, expected a DummyEnv"):
        DummyExpert(ScriptedSim(1, []))
    with pytest.raises(RuntimeError, match=r"call reset\(0\) first"):
        DummyExpert(DummyEnv(1, DummyParams(), seed=0)).act(0, None)
