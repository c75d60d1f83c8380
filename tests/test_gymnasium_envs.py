"""The project's envs as users of Gymnasium have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import embodied_rl.gymnasium_envs as ours
from embodied_rl.envs.base import adapter_class
from embodied_rl.errors import UserError
from embodied_rl.gymnasium_envs import PlatformEnv, PlatformVectorEnv

NAMES = {path.stem for path in Path("config/env").glob("*.yaml")}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the checker's, of infinite bounds


def straight(obs: np.ndarray) -> np.ndarray:
    """The dummy env's way to the goal."""
    return np.clip((obs[..., 2:] - obs[..., :2]) / 0.15, -1, 1)


def make(name: str = "dummy", **options: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(f"embodied_rl/{name}-v0", **options)


def make_vec(name: str = "dummy", **options: Any) -> PlatformVectorEnv:
    envs = gymnasium.make_vec(f"embodied_rl/{name}-v0", vectorization_mode="vector_entry_point", **options)
    assert isinstance(envs, PlatformVectorEnv)
    return envs


def test_every_preset_is_registered() -> None:
    found = {name.removeprefix("embodied_rl/") for name in gymnasium.registry if name.startswith("embodied_rl/")}
    assert found == {f"{name}-v0" for name in NAMES if name != "gymnasium"}
    ours.register()


@pytest.mark.parametrize("options", [{}, {"image_size": 16}, {"task_id": 2}])
def test_gymnasiums_own_checks_pass(options: dict[str, Any]) -> None:
    check_env(make(render_mode="rgb_array", **options).unwrapped)


def test_choices_pass_them_too() -> None:
    env = PlatformEnv("gymnasium", id="CartPole-v1")
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    check_env(env, skip_render_check=True)
    _, info = env.reset(seed=3)
    assert info["instruction"] == "cart pole"
    steps = 0
    while True:
        _, reward, terminated, truncated, info = env.step(1)
        steps += 1
        assert reward == 1
        if terminated or truncated:
            break
    assert (terminated, truncated, info["success"]) == (True, False, False)
    assert 5 < steps < 20


def test_an_episode_has_the_platforms_rewards_horizon_and_success() -> None:
    env = make(task_id=1)
    obs, info = env.reset(seed=0)
    assert info["task_id"] == 1
    assert 64 <= info["reset_state_id"] < 128
    assert "upper left" in info["instruction"]
    start, total = np.linalg.norm(obs[2:] - obs[:2]), 0.0
    for _ in range(32):
        obs, reward, terminated, truncated, info = env.step(straight(obs))
        total += float(reward)
        if terminated:
            break
    assert (terminated, truncated, info["is_success"]) == (True, False, True)
    assert total == pytest.approx(start - np.linalg.norm(obs[2:] - obs[:2]) + 1, abs=1e-5), "progress and the bonus"
    env.reset()
    for step in range(1, 33):
        _, _, terminated, truncated, info = env.step(np.zeros(2, np.float32))
        assert (terminated, truncated, info["success"]) == (False, step == 32, False)


@pytest.mark.parametrize("steps", [5, 50], ids=["shorter than the preset's", "longer"])
def test_episodes_of_another_length(steps: int) -> None:
    env, envs = make(episode_steps=steps), make_vec(num_envs=2, episode_steps=steps)
    env.reset(seed=0)
    envs.reset(seed=0)
    still = np.zeros((2, 2), np.float32)
    for step in range(1, steps + 1):
        assert env.step(still[0])[2:4] == (False, step == steps)
        assert envs.step(still)[3].tolist() == [step == steps] * 2
    for wrong in (0, 2.5):
        with pytest.raises(ValueError, match=r"episode_steps: got .* 1 or more"):
            make(episode_steps=wrong)


def test_after_its_end_an_episode_takes_no_step() -> None:
    for env in (make().unwrapped, make_vec(num_envs=2)):
        with pytest.raises(ResetNeeded, match=r"or none has begun.*call reset\(\)"):
            env.step(env.action_space.sample())
    env = make()
    for _ in range(2):
        env.reset(seed=0)
        while not any(env.step(np.zeros(2, np.float32))[2:4]):
            pass
        with pytest.raises(ResetNeeded, match=r"the episode is over.*call reset\(\)"):
            env.step(np.zeros(2, np.float32))


def test_no_record_of_an_episode_is_kept() -> None:
    env, envs = make(), make_vec(num_envs=4)
    for each in (env, envs):
        each.reset(seed=0)
        for _ in range(32):
            each.step(np.zeros(each.action_space.shape or (), np.float32))
    assert isinstance(env.unwrapped, PlatformEnv)
    assert (env.unwrapped._play.env.num_ended, envs._play.env.num_ended) == (0, 0)


def test_an_initial_state_by_its_number() -> None:
    env = make()
    first, _ = env.reset(options={"reset_state_id": 70})
    other, _ = env.reset(options={"reset_state_id": 71})
    again, info = env.reset(options={"reset_state_id": 70})
    assert info["reset_state_id"] == 70
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    for wrong in (100_000, -1, 7.5, "7", [70, 71]):
        with pytest.raises(ValueError, match=r"^reset_state_id: got .*, expected (0 to 255|an integer)$"):
            env.reset(options={"reset_state_id": wrong})


@pytest.mark.parametrize("named", [70, np.int64(70), [70, 200], (70, 200), np.array([70, 200]), [None, 200]])
def test_initial_states_of_a_vector_by_their_numbers(named: Any) -> None:
    """One for all or one each; None is drawn, as are the episodes that follow."""
    envs, single = make_vec(num_envs=2), make()
    obs, infos = envs.reset(seed=3, options={"reset_state_id": named})
    for i, number in enumerate(named if np.ndim(named) else [named, named]):
        first, info = single.reset(seed=3 + i, options={"reset_state_id": number})
        assert infos["reset_state_id"][i] == info["reset_state_id"]
        assert number in (None, info["reset_state_id"])
        assert np.array_equal(obs[i], first)
    _, _, _, truncated, infos = [envs.step(np.zeros((2, 2), np.float32)) for _ in range(32)][-1]
    assert truncated.all()
    assert infos["reset_state_id"][1] == single.reset()[1]["reset_state_id"]


@pytest.mark.parametrize("wrong", [100_000, [70], [70, 71, 72], [70, 256], [70, -1], 7.5, [7, "8"], "70", [[70, 71]]])
def test_wrong_numbers_leave_a_vector_as_it_is(wrong: Any) -> None:
    envs, untouched = make_vec(num_envs=2), make_vec(num_envs=2)
    for each in (envs, untouched):
        each.reset(seed=5)
    with pytest.raises(ValueError, match=r"^reset_state_id: got .*, expected (0 to 255|an integer, or a list of 2)$"):
        envs.reset(seed=6, options={"reset_state_id": wrong})
    assert envs.reset()[1]["reset_state_id"].tolist() == untouched.reset()[1]["reset_state_id"].tolist()


def test_env_i_of_a_vector_plays_what_one_env_of_its_seed_plays() -> None:
    """Over several episodes, some of which succeed and some of which run out of time."""
    n, seed = 3, 11
    envs, singles = make_vec(num_envs=n, image_size=8), [make(image_size=8) for _ in range(n)]
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    obs, infos = envs.reset(seed=seed)
    alone = [env.reset(seed=seed + i) for i, env in enumerate(singles)]
    ended = succeeded = 0
    for step in range(100):
        assert envs.observation_space.contains(obs)
        for i, (single, _) in enumerate(alone):
            assert all(np.array_equal(obs[key][i], single[key]) for key in ("state", "agentview"))
        actions = straight(obs["state"]).astype(np.float32)
        actions[step % n] = 0
        actions[0] = 0
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        alone = []
        for i, env in enumerate(singles):
            one, reward, one_terminated, one_truncated, info = env.step(actions[i])
            assert (reward, one_terminated, one_truncated) == (rewards[i], terminated[i], truncated[i])
            if one_terminated or one_truncated:
                ended, succeeded = ended + 1, succeeded + bool(info["success"])
                assert infos["_final_obs"][i]
                assert np.array_equal(infos["final_obs"][i]["state"], one["state"])
                assert infos["final_info"]["success"][i] == info["success"]
                one, info = env.reset()
                assert infos["reset_state_id"][i] == info["reset_state_id"]
                assert infos["instruction"][i] == info["instruction"]
            else:
                assert "_final_obs" not in infos or not infos["_final_obs"][i]
                assert infos["success"][i] == info["success"]
            alone.append((one, info))
    assert ended > succeeded > 3


@pytest.mark.parametrize("seed", [np.int64(3), np.array(3), [3, 4], (3, 4), np.array([3, 4]), [np.int32(3), None]])
def test_seeds_in_every_form(seed: Any) -> None:
    envs, singles = make_vec(num_envs=2), [make(), make()]
    envs.reset(seed=[8, 4])
    singles[1].reset(seed=4)
    wanted = [singles[0].reset(seed=3), singles[1].reset(seed=None if np.ndim(seed) and seed[1] is None else 4)]
    obs, infos = envs.reset(seed=seed)
    assert infos["reset_state_id"].tolist() == [info["reset_state_id"] for _, info in wanted]
    assert np.array_equal(obs, [first for first, _ in wanted])


@pytest.mark.parametrize("seed", [[3], [3, 4, 5], [], 3.5, "3", [3, "4"], [[3, 4]], np.array([3.0, 4.0])])
def test_wrong_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"^seed: got .*, expected an integer, or a list of 2$"):
        make_vec(num_envs=2).reset(seed=seed)


def test_make_vec_of_choices() -> None:
    envs = PlatformVectorEnv("gymnasium", 2, id="CartPole-v1")
    envs.reset(seed=0)
    for _ in range(20):
        _, rewards, terminated, _, infos = envs.step(np.array([0, 1]))
        assert rewards.tolist() == [1.0, 1.0]
        if terminated.any():
            assert infos["_final_obs"].tolist() == terminated.tolist()
            return
    raise AssertionError("both poles stand")


def test_sync_and_async_vectors_of_gymnasiums_work() -> None:
    for mode in ("sync", "async"):
        envs = gymnasium.make_vec("embodied_rl/dummy-v0", num_envs=2, vectorization_mode=mode)
        obs, _ = envs.reset(seed=11)
        single, _ = make().reset(seed=12)
        assert np.array_equal(obs[1], single)
        envs.close()


def test_frames_for_people() -> None:
    env = make(render_mode="rgb_array")
    env.reset(seed=0)
    frame = env.render()
    assert isinstance(frame, np.ndarray)
    assert (frame.shape, frame.dtype) == ((128, 128, 3), np.uint8)
    envs = make_vec(num_envs=2, render_mode="rgb_array")
    envs.reset(seed=0)
    frames = envs.render()
    assert frames is not None
    assert np.array_equal(frames[0], frame)
    assert make_vec(num_envs=1).render() is None


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"env\.init_params\.image_siz: no such key"):
        make(image_siz=3)
    with pytest.raises(UserError, match=r"task_ids: got \[7\]"):
        make(task_id=7)


def given(env_type: str, monkeypatch: pytest.MonkeyPatch, preset: str, **options: Any) -> Any:
    """The ``Params`` that an adapter gets, without its simulator."""
    found: list[Any] = []

    def stop(self: object, num_slots: int, params: Any, seed: int) -> None:
        found.append(params)
        raise RuntimeError("far enough")

    monkeypatch.setattr(adapter_class(env_type), "__init__", stop)
    for kind in (PlatformEnv, PlatformVectorEnv):
        with pytest.raises(RuntimeError, match="far enough"):
            kind(preset, **options)
    assert found[0] == found[1]
    return found[0]


TEXTS = (
    "push bob's cube, then wait!",
    "the cube (red) = {it}: [a]",
    "schiebe den Würfel",
    "null",
    "1",
    " lead",
    "",
    "${oc.env:HOME} \\${x}",
    "???",
    'it\'s "so" \\',
)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_reach_the_adapter_as_they_are(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = given("maniskill", monkeypatch, "maniskill", env_id="LiftPegUpright-v1", instruction=text)
    assert (params.env_id, params.instruction) == ("LiftPegUpright-v1", text)


def test_other_values_do_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = {"ClipReward": {"min_reward": -1, "a name": ["x, y", None]}}
    params = given("gymnasium", monkeypatch, "gymnasium", wrappers=("FlattenObservation", wrapper))
    assert params.wrappers == ("FlattenObservation", wrapper)
    sizes = {"camera_width": np.int64(24), "camera_height": np.array(16)}
    params = given("gymnasium", monkeypatch, "gymnasium", id="Pendulum-v1", success_key=None, **sizes)
    assert (params.id, params.success_key, params.camera_width, params.camera_height) == ("Pendulum-v1", None, 24, 16)


def test_an_env_of_envpools_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """``id`` is the first parameter of ``make`` and ``make_vec`` themselves."""
    assert given("envpool", monkeypatch, "envpool", env_id="Pendulum-v1").id == "Pendulum-v1"
    assert given("envpool", monkeypatch, "envpool", id="Pendulum-v1").id == "Pendulum-v1"
    for made in (make, make_vec):
        with pytest.raises(RuntimeError, match="far enough"):
            made("envpool", env_id="Pendulum-v1")
    with pytest.raises(UserError, match=r"env\.init_params\.env_id: no such key"):
        make("dummy", env_id="Pendulum-v1")


def test_values_that_no_option_can_have_are_refused() -> None:
    with pytest.raises(UserError, match=r"env\.init_params\.wrappers: got \(<class .*>,\), expected numbers, texts"):
        PlatformEnv("gymnasium", wrappers=(gymnasium.Wrapper,))


def test_options_that_a_preset_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"env\.init_params\.assets: missing"):
        make("put_on_plate")
    folder = tmp_path / "my assets=(2), jürgen's"
    params = given("put_on_plate", monkeypatch, "put_on_plate", assets=folder, objects="test")
    assert (params.assets, params.objects, params.camera_height) == (str(folder), "test", 224)
    params = given("metaworld", monkeypatch, "metaworld", task=["push", "reach"])
    assert list(params.task) == ["push", "reach"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("simulator")
@pytest.mark.filterwarnings("ignore")
def test_libero() -> None:
    pytest.importorskip("libero", reason="the extra for libero is not installed")
    env = make("libero_spatial", task_id=3, draft=True)
    check_env(env.unwrapped, skip_render_check=True)
    obs, info = env.reset(seed=0)
    assert info["task_id"] == 3
    assert set(obs) == {"agentview", "wrist", "state"}
    assert obs["agentview"].std() > 10, "a picture"
    env.close()
