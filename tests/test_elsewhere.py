"""Keys that do not exist here, but in other programs."""

from __future__ import annotations

import pytest

from embodied_rl import elsewhere
from embodied_rl.command_line import checked
from embodied_rl.errors import ConfigError
from embodied_rl.explain.own import own_keys


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("actor_rollout_ref.actor.clip_ratio", "'algorithm.clip_ratio_low' and 'algorithm.clip_ratio_high'"),
        ("algorithm.entropy_coeff", "'algorithm.entropy_bonus'"),
        ("total_timesteps", "'runner.max_steps'"),
        ("batch_size", "'actor.global_batch_size' and 'algorithm.n_minibatches'"),
        ("env.num_envs", "'env.train.total_num_envs'"),
    ],
)
def test_what_another_program_calls_so(key: str, ours: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked(["env=dummy", "algorithm=ppo", f"{key}=1"])
    [problem] = raised.value.problems
    assert problem.startswith(f"{key}: no such key. That is {ours} here (python train.py explain ")


@pytest.mark.parametrize(("key", "nearest"), [("lr", "actor.optim.lr"), ("algorithm.gama", "algorithm.gamma")])
def test_a_slip_in_our_own_names_is_no_other_programs(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: no such key\. Did you mean '{nearest}'"):
        checked(["env=dummy", "algorithm=ppo", f"{key}=1"])


def test_every_name_of_ours_is_one() -> None:
    own = own_keys()
    assert [name for names in elsewhere._COMMON.values() for name in names if name not in own] == []
