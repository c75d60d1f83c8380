"""Stable-Baselines3's PPO on the project's vectors of envs."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import embodied_rl.gymnasium_envs  # noqa: F401 - registers
from embodied_rl.errors import UserError

pytest.importorskip("stable_baselines3", reason="the extra for dev is not installed")
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from embodied_rl.sb3 import Sb3VecEnv

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the dummy env's pictures are small


def vector(name: str = "dummy", num_envs: int = 4, **options: Any) -> Sb3VecEnv:
    mode = "vector_entry_point"
    return Sb3VecEnv(gymnasium.make_vec(f"embodied_rl/{name}-v0", num_envs, vectorization_mode=mode, **options))


def flat(value: Any) -> list[Any]:
    """Numbers and words in nested dicts of arrays."""
    if isinstance(value, dict):
        return [(key, flat(value[key])) for key in sorted(value)]
    return np.asarray(value).tolist()


@pytest.mark.parametrize("options", [{}, {"image_size": 8}], ids=["state", "images"])
def test_it_plays_what_sb3s_own_vector_plays(options: dict[str, Any]) -> None:
    """Over many ends of episodes, by success and by time."""
    ours = vector(num_envs=3, **options)
    theirs = DummyVecEnv([lambda: gymnasium.make("embodied_rl/dummy-v0", **options)] * 3)
    ours.seed(7)
    theirs.seed(7)
    seen: Any = ours.reset()
    expected: Any = theirs.reset()
    kept = [(seen, expected)]
    ended = succeeded = 0
    for _ in range(100):
        assert flat(ours.reset_infos) == flat(theirs.reset_infos)
        state = expected["state"] if isinstance(expected, dict) else expected
        actions = np.clip((state[:, 2:] - state[:, :2]) / 0.15, -1, 1)
        actions[0] = 0
        seen, rewards, dones, infos = ours.step(actions)
        expected, their_rewards, their_dones, their_infos = theirs.step(actions)
        kept.append((seen, expected))
        assert rewards.tolist() == their_rewards.tolist()
        assert dones.tolist() == their_dones.tolist()
        assert flat(dict(enumerate(infos))) == flat(dict(enumerate(their_infos)))
        ended += int(dones.sum())
        succeeded += sum(info["is_success"] for info, done in zip(infos, dones, strict=True) if done)
    assert ended > succeeded > 3
    for ours_then, theirs_then in kept:
        assert flat(ours_then) == flat(theirs_then), "an observation that was given does not change afterwards"


def test_ppo_learns_the_dummy_env() -> None:
    envs = VecMonitor(vector(num_envs=8))
    model = PPO("MlpPolicy", envs, n_steps=64, batch_size=128, learning_rate=1e-3, ent_coef=0.0, seed=0, device="cpu")
    before = np.mean(evaluate_policy(model, envs, n_eval_episodes=16)[0])
    model.learn(12_000)
    after = np.mean(evaluate_policy(model, envs, n_eval_episodes=16)[0])
    assert after > before + 0.5
    assert len(model.ep_info_buffer or ()) > 20


def test_frames_and_attributes() -> None:
    envs = vector(num_envs=2, render_mode="rgb_array")
    envs.reset()
    assert [frame.shape for frame in envs.get_images() if frame is not None] == [(128, 128, 3)] * 2
    assert vector(num_envs=2).get_images() == [None, None]
    assert envs.get_attr("render_mode", indices=1) == ["rgb_array"]
    envs.set_attr("note", 3)
    assert envs.get_attr("note") == [3, 3]
    with pytest.raises(UserError, match="one for all envs"):
        envs.set_attr("note", 3, indices=0)
    with pytest.raises(UserError, match="no single envs"):
        envs.env_method("reset")
    assert envs.env_is_wrapped(gymnasium.Wrapper) == [False, False]
    envs.close()


def test_options_are_one_dict_for_all_envs() -> None:
    envs = vector(num_envs=2)
    envs.set_options({"reset_state_id": [70, 71]})
    envs.reset()
    assert [info["reset_state_id"] for info in envs.reset_infos] == [70, 71]
    envs.set_options([{"reset_state_id": 70}, {"reset_state_id": 71}])
    with pytest.raises(UserError, match=r"set_options: got .*, expected one dict for all envs"):
        envs.reset()


def test_vectors_of_gymnasiums() -> None:
    with pytest.raises(UserError, match="expected SAME_STEP"):
        Sb3VecEnv(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"))
    envs = gymnasium.make_vec(
        "CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
    )
    model = PPO("MlpPolicy", Sb3VecEnv(envs), n_steps=64, batch_size=64, n_epochs=1, device="cpu")
    model.learn(256)
    assert model.num_timesteps == 256


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("simulator")
@pytest.mark.filterwarnings("ignore")
def test_ppo_trains_on_libero_from_pictures() -> None:
    pytest.importorskip("libero", reason="the extra for libero is not installed")
    import torch

    envs = vector("libero_spatial", 2, task_id=3, draft=True)
    model = PPO("MultiInputPolicy", envs, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu")
    before = [weight.detach().clone() for weight in model.policy.parameters()]
    model.learn(32)
    after = list(model.policy.parameters())
    assert model.num_timesteps == 32
    assert all(weight.isfinite().all() for weight in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    envs.close()
