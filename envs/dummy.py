"""Point reaching: a fast, exact stand-in for a simulator, for tests and for a first look at the platform.

A point moves in the square [-1, 1]² towards a goal. Four tasks, one for each quadrant that the goal may lie in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt

from embodied_rl.envs.base import SimEnv, SimObs, SimStep, Task, check_reset_state
from embodied_rl.errors import UserError
from embodied_rl.params import OF_THE_REWARD

_QUADRANTS = (("upper right", (1, 1)), ("upper left", (-1, 1)), ("lower left", (-1, -1)), ("lower right", (1, -1)))
_MIN_START_DISTANCE = 1.0
_RENDER_SIZE = 128
_NOISE = 0.3
"""Standard deviation of the noise on each of the expert's actions."""
_GOAL_COLOUR, _POINT_COLOUR = (40, 160, 60), (200, 40, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyParams:
    """Parameters of :class:`DummyEnv`."""

    states_per_task: PositiveInt = 64
    """Initial states of each of the four tasks."""
    step_size: PositiveFloat = field(default=0.15, metadata=OF_THE_REWARD)
    """Distance along an axis by which an action of 1 moves the point."""
    success_radius: PositiveFloat = field(default=0.12, metadata=OF_THE_REWARD)
    """The goal holds while the point is within this distance of it."""
    success_bonus: float = field(default=1.0, metadata=OF_THE_REWARD)
    """Added to the reward level while the goal holds."""
    image_size: Annotated[int, Field(ge=0, le=8192)] = 0
    """Side in pixels of the one camera's ("agentview") images; 0: no camera, the state is all there is."""


class DummyEnv:
    """The point-reaching task behind the :class:`~embodied_rl.envs.base.SimEnv` protocol.

    State: position (2) and goal (2), each in [-1, 1]. Action: displacement (2) in units of ``step_size``, clipped to
    [-1, 1]. Reward level: by how much the point is nearer to the goal than at the episode's start, plus
    ``success_bonus`` while the goal holds; so relative rewards are the progress of each step.

    Nothing is random: initial states are functions of their id alone, so ``seed`` changes nothing.
    """

    Params: ClassVar[type] = DummyParams
    states_need_seed = False
    batched = True
    control_hz = 10.0
    action_dim = 2
    state_dim = 4

    def __init__(self, num_slots: int, params: DummyParams, seed: int) -> None:
        self._params = params
        self.step_size = params.step_size
        self.num_reset_states = len(_QUADRANTS) * params.states_per_task
        self.image_shapes = self.image_shapes_of(params)
        self._position = np.zeros((num_slots, 2), dtype=np.float32)
        self._goal = np.zeros((num_slots, 2), dtype=np.float32)
        self._start_distance = np.zeros(num_slots, dtype=np.float32)

    @staticmethod
    def image_shapes_of(params: DummyParams) -> Mapping[str, tuple[int, int]]:
        size = params.image_size
        return {"agentview": (size, size)} if size else {}

    @staticmethod
    def memory_of(params: DummyParams, *, envs: int, tasks: int | None) -> float:
        del params, envs, tasks
        return 0.0  # a few numbers an env

    def task(self, reset_state_id: int) -> Task:
        check_reset_state(self, reset_state_id)
        task_id = reset_state_id // self._params.states_per_task
        return Task(
            task_id=task_id,
            instruction=f"move the point to the goal in the {_QUADRANTS[task_id][0]} quadrant",
            suite="dummy",
        )

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            signs = _QUADRANTS[self.task(reset_state_id).task_id][1]
            self._position[slot], self._goal[slot] = _initial_state(reset_state_id, signs)
        self._start_distance[slots] = self._distance(np.asarray(slots))

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        index = np.asarray(slots)
        moved = self._position[index] + self._params.step_size * np.clip(actions, -1.0, 1.0)
        self._position[index] = np.clip(moved, -1.0, 1.0)
        distance = self._distance(index)
        success = distance <= self._params.success_radius
        level = self._start_distance[index] - distance + self._params.success_bonus * success
        return SimStep(rewards=level.astype(np.float32), success=success)

    def observe(self, slots: Sequence[int]) -> SimObs:
        index = np.asarray(slots)
        images = {camera: self._draw(index, height) for camera, (height, _) in self.image_shapes.items()}
        return SimObs(images=images, state=np.concatenate([self._position[index], self._goal[index]], axis=1))

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        return self._draw(np.asarray(slots), _RENDER_SIZE)

    def close(self) -> None:
        """Nothing to release."""

    def _distance(self, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.linalg.norm(self._position[slots] - self._goal[slots], axis=1)

    def _draw(self, slots: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
        """[n,size,size,3]: a green disc of the success radius around the goal, a red one at the point; y points up."""
        frame = np.full((len(slots), size, size, 3), 255, dtype=np.uint8)
        centres = (np.arange(size, dtype=np.float32) + 0.5) / size * 2.0 - 1.0
        radius = max(self._params.success_radius, 2.0 / size)
        for points, colour, r in ((self._goal, _GOAL_COLOUR, radius), (self._position, _POINT_COLOUR, 0.7 * radius)):
            dx = centres[None, None, :] - points[slots, 0, None, None]
            dy = -centres[None, :, None] - points[slots, 1, None, None]
            frame[dx**2 + dy**2 <= r**2] = colour
        return frame


class DummyExpert:
    """An :class:`~embodied_rl.demonstrations.expert.Expert` for :class:`DummyEnv`: straight to the goal."""

    def __init__(self, env: SimEnv) -> None:
        if not isinstance(env, DummyEnv):
            raise UserError(f"DummyExpert: got a {type(env).__name__}, expected a DummyEnv: it plays env_type dummy")
        self._env = env
        self._slots: set[int] = set()

    def reset(self, slot: int) -> None:
        self._slots.add(slot)

    def act(self, slot: int, generator: np.random.Generator | None) -> NDArray[np.float32]:
        if slot not in self._slots:
            raise RuntimeError(f"act: the expert has no episode in slot {slot}; call reset({slot}) first")
        position, goal = np.split(self._env.observe([slot]).state[0], 2)
        action = (goal - position) / self._env.step_size
        if generator is not None:
            action = np.clip(action, -1.0, 1.0) + generator.normal(0.0, _NOISE, action.shape)
        return np.clip(action, -1.0, 1.0).astype(np.float32)


def _initial_state(reset_state_id: int, signs: tuple[int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Position anywhere and goal in the quadrant of ``signs``, at least ``_MIN_START_DISTANCE`` apart."""
    rng = np.random.default_rng(reset_state_id)
    goal = np.asarray(signs) * rng.uniform(0.2, 0.8, size=2)
    while True:
        position = rng.uniform(-0.8, 0.8, size=2)
        if np.linalg.norm(position - goal) >= _MIN_START_DISTANCE:
            return position.astype(np.float32), goal.astype(np.float32)
