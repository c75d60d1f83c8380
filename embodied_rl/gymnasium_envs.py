"""The project's envs for users of Gymnasium: importing this module registers ``embodied_rl/<name>-v0`` for each
``env=<name>``.

::

    import embodied_rl.gymnasium_envs
    env = gymnasium.make("embodied_rl/libero_spatial-v0", task_id=3)
    envs = gymnasium.make_vec("embodied_rl/libero_spatial-v0", num_envs=8, vectorization_mode="vector_entry_point")

Episodes, rewards and success are those of a run with the env's defaults. See docs/gymnasium.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from operator import index
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from embodied_rl.composition import env_of
from embodied_rl.config import CONFIG_MODULE
from embodied_rl.contracts import ChunkResult, EnvObs
from embodied_rl.envs.base import SimEnv, adapter_class, check_reset_state
from embodied_rl.envs.chunked import ChunkedEnv, NextResetState
from embodied_rl.envs.reset_states import task_ranges
from embodied_rl.params import parse_params

NAMESPACE = "embodied_rl"
RESET_STATE = "reset_state_id"
"""Option of ``reset``, and key of its info: the number of the initial state."""


class _Play:
    """Slots of one simulator with their spaces, and where episodes may start."""

    def __init__(
        self,
        preset: str,
        num_envs: int,
        task_id: int | None,
        episode_steps: int | None,
        init_params: Mapping[str, Any],
        *,
        auto_reset: bool,
    ) -> None:
        if episode_steps is not None and (not isinstance(episode_steps, int) or episode_steps < 1):
            raise ValueError(f"episode_steps: got {episode_steps!r}, expected a number of steps, 1 or more")
        # gymnasium.make has a parameter of its own that is called id.
        names = {"env_id": "id"} if preset == "envpool" else {}
        env = env_of(preset, {names.get(name, name): value for name, value in init_params.items()})
        adapter = adapter_class(env.env_type)
        params = parse_params(adapter.Params, env.init_params, "env.init_params")
        self.num_envs, self.max_episode_steps = num_envs, episode_steps or env.eval.max_episode_steps
        self.sim: SimEnv = adapter(num_envs, params, env.seed)  # type: ignore[call-arg]  # every adapter's signature
        self.env = ChunkedEnv(
            self.sim,
            env_ids=range(num_envs),
            num_action_chunks=1,
            max_episode_steps=self.max_episode_steps,
            auto_reset=auto_reset,
            ignore_terminations=env.eval.ignore_terminations,
            use_rel_reward=env.use_rel_reward,
            reward_coef=env.reward_coef,
        )
        self._states = list(task_ranges(self.sim, None if task_id is None else [task_id]).values())
        choices: tuple[int, ...] = getattr(self.sim, "action_choices", ())
        self.action_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (self.sim.action_dim,), np.float32)
        if choices:
            self.action_space = (
                spaces.Discrete(choices[0]) if len(choices) == 1 else spaces.MultiDiscrete(list(choices))
            )
        state = spaces.Box(-np.inf, np.inf, (self.sim.state_dim,), np.float32)
        cameras = {
            name: spaces.Box(0, 255, (*shape, 3), np.uint8) for name, shape in sorted(self.sim.image_shapes.items())
        }
        self.observation_space = spaces.Dict({**cameras, "state": state}) if cameras else state

    def draw(self, generator: np.random.Generator) -> int:
        """An initial state, any with the same probability."""
        number = int(generator.integers(sum(map(len, self._states))))
        for states in self._states:
            if number < len(states):
                return states[number]
            number -= len(states)
        raise AssertionError(number)

    def named(self, options: Mapping[str, Any] | None) -> list[int | None]:
        """The initial state of each slot that ``reset``'s options name; None: to be drawn."""
        states = _each(RESET_STATE, (options or {}).get(RESET_STATE), self.num_envs)
        for state in states:
            if state is not None:
                check_reset_state(self.sim, state)
        return states

    def step(self, actions: Any) -> ChunkResult:
        """One step of every slot; ``actions`` is [N,A], or [N] of one choice each."""
        if self.env.all_done:
            raise ResetNeeded("step: the episode is over, or none has begun, so there is nothing to do; call reset()")
        controls = np.asarray(actions, np.float32).reshape(-1, 1, self.sim.action_dim)
        result = self.env.chunk_step(torch.from_numpy(np.ascontiguousarray(controls)))
        self.env.drain_episodes()  # records for whoever evaluates: nobody here
        return result

    def shown(self, obs: EnvObs, index: int | slice = slice(None)) -> Any:
        """Observations in the spaces' shape: of one env, or batched."""
        images = {name: image[index].numpy() for name, image in obs.images.items()}
        state = obs.state[index].numpy()
        return {**images, "state": state} if images else state

    def start_info(self, reset_state_id: int) -> dict[str, Any]:
        task = self.sim.task(reset_state_id)
        return {RESET_STATE: reset_state_id, "task_id": task.task_id, "instruction": task.instruction}


class PlatformEnv(gymnasium.Env[Any, Any]):
    """One env. ``info`` has ``success`` and ``is_success`` (the goal holds), and from ``reset`` the ``instruction``,
    ``task_id`` and ``reset_state_id``.

    Args:
        preset: the choice of ``env``, such as libero_spatial.
        task_id: this task alone; None: all, drawn at each reset.
        render_mode: rgb_array, or None.
        episode_steps: after which an episode is truncated; None: the preset's ``env.eval.max_episode_steps``. That of
            ``gymnasium.make``, ``max_episode_steps``, can only make it shorter.
        init_params: the adapter's own options (``env.init_params``); EnvPool's ``id`` is ``env_id``, too.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's

    def __init__(
        self,
        preset: str,
        *,
        task_id: int | None = None,
        render_mode: str | None = None,
        episode_steps: int | None = None,
        **init_params: Any,
    ) -> None:
        self._play = _Play(preset, 1, task_id, episode_steps, init_params, auto_reset=False)
        self.action_space, self.observation_space = self._play.action_space, self._play.observation_space
        self.metadata = {**self.metadata, "render_fps": round(self._play.sim.control_hz)}
        self.render_mode = render_mode
        self.max_episode_steps = self._play.max_episode_steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode from a drawn initial state, or from ``options["reset_state_id"]``."""
        [state] = self._play.named(options)
        super().reset(seed=seed)
        state = self._play.draw(self.np_random) if state is None else state
        obs = self._play.env.reset([state])
        return self._play.shown(obs, 0), self._play.start_info(state)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = self._play.step([action])
        assert result.next_obs is not None
        holds = bool(result.success)
        return (
            self._play.shown(result.next_obs, 0),
            float(result.rewards),
            bool(result.terminated),
            bool(result.truncated),
            {"success": holds, "is_success": holds},
        )

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        return self._play.sim.render([0])[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._play.env.close()


class PlatformVectorEnv(VectorEnv[Any, Any, Any]):
    """Several envs in one simulator, which batches where it can. An env starts its next episode in the step that ends
    one (``AutoresetMode.SAME_STEP``: ``final_obs`` and ``final_info`` in the infos).

    Env i of ``reset(seed=s)`` plays what a :class:`PlatformEnv` of ``reset(seed=s + i)`` does.
    """

    metadata = {"render_modes": ["rgb_array"], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - Gymnasium's

    def __init__(
        self,
        preset: str,
        num_envs: int = 1,
        *,
        task_id: int | None = None,
        render_mode: str | None = None,
        episode_steps: int | None = None,
        **init_params: Any,
    ) -> None:
        self._play = _Play(preset, num_envs, task_id, episode_steps, init_params, auto_reset=True)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.metadata = {**self.metadata, "render_fps": round(self._play.sim.control_hz)}
        self.single_action_space, self.single_observation_space = self._play.action_space, self._play.observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._generators = [np_random()[0] for _ in range(num_envs)]
        self._starts = [0] * num_envs
        """Initial states of the present episodes."""

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | NDArray[np.integer] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every env, from drawn initial states or from ``options["reset_state_id"]``, a number for
        all or one for each; where that is None it is drawn."""
        named, seeds = self._play.named(options), _each("seed", seed, self.num_envs, apart=1)
        generators = [None if own is None else np_random(own)[0] for own in seeds]
        self._generators = [new or old for new, old in zip(generators, self._generators, strict=True)]
        starts = [self._next(i, 0) if state is None else state for i, state in enumerate(named)]
        self._starts[:] = starts
        following: NextResetState = self._next
        obs, infos = self._play.env.reset(starts, following), {}
        for i, state in enumerate(starts):
            infos = self._add_info(infos, self._play.start_info(state), i)
        return self._play.shown(obs), infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        result, infos = self._play.step(actions), dict[str, Any]()
        assert result.next_obs is not None
        terminated, truncated, success = (
            flags[:, 0].numpy() for flags in (result.terminated, result.truncated, result.success)
        )
        ended = iter(range(0 if result.final_obs is None else len(result.final_obs)))
        for i, holds in enumerate(success.tolist()):
            info: dict[str, Any] = {"success": holds, "is_success": holds}
            if terminated[i] or truncated[i]:
                assert result.final_obs is not None
                last = {"final_obs": self._play.shown(result.final_obs, next(ended)), "final_info": info}
                infos, info = self._add_info(infos, last, i), self._play.start_info(self._starts[i])
            infos = self._add_info(infos, info, i)
        rewards = result.rewards[:, 0].numpy().astype(np.float64)
        return self._play.shown(result.next_obs), rewards, terminated, truncated, infos

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        if self.render_mode != "rgb_array":
            return None
        return tuple(self._play.sim.render(range(self.num_envs)))

    def close_extras(self, **kwargs: Any) -> None:
        del kwargs
        self._play.env.close()

    def _next(self, env_id: int, episode: int) -> int:
        del episode
        self._starts[env_id] = self._play.draw(self._generators[env_id])
        return self._starts[env_id]


def _each(name: str, given: Any, count: int, *, apart: int = 0) -> list[int | None]:
    """A number for each of ``count`` envs.

    Args:
        name: what it is, for the message.
        given: a number for each, or one for all, from which each next env's is ``apart``; None: no number.

    Raises:
        ValueError: it is something else.
    """
    try:
        one = np.ndim(given) == 0
        numbers = [None if number is None else index(number) for number in ([given] * count if one else given)]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count:
        raise ValueError(
            f"{name}: got {given!r}, expected an integer" + (f", or a list of {count}" if count > 1 else "")
        )
    return [None if number is None else number + apart * i * one for i, number in enumerate(numbers)]


def register() -> None:
    """Register every ``env=<name>`` but Gymnasium's own; importing this module has done it."""
    for file in sorted(files(CONFIG_MODULE).joinpath("env").iterdir(), key=lambda file: file.name):
        name, _, suffix = file.name.rpartition(".")
        if suffix == "yaml" and name != "gymnasium" and f"{NAMESPACE}/{name}-v0" not in gymnasium.registry:
            gymnasium.register(
                id=f"{NAMESPACE}/{name}-v0",
                entry_point=f"{__name__}:PlatformEnv",
                vector_entry_point=f"{__name__}:PlatformVectorEnv",
                kwargs={"preset": name},
            )


register()
