"""Stand-ins whose every answer is written down in the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from embodied_rl.contracts import ChunkResult, EnvObs
from embodied_rl.envs.base import SimObs, SimStep, Task

NOTHING = [False] * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What an episode from one initial state does; stepping beyond the tables is an error."""

    rewards: Sequence[float]
    """Reward level after step 1, 2, ..."""
    success: Sequence[bool]
    """Whether the goal holds after step 1, 2, ..."""
    terminated: Sequence[bool] | None = None
    """Whether the simulator ends the episode after step 1, 2, ..."""
    truncated: Sequence[bool] | None = None
    """Whether the simulator cuts it there."""


class ScriptedSim:
    """A simulator that plays ``scripts[reset_state_id]`` and logs every call that names slots.

    State [4] is (slot, reset state id, episode step, first action component of the last step); an image is filled with
    10 * slot + episode step, a rendered frame with 100 + that.
    """

    Params: ClassVar[type] = dict
    control_hz = 20.0
    action_dim = 2
    state_dim = 4

    def __init__(
        self,
        num_slots: int,
        scripts: Sequence[Script],
        *,
        batched: bool = False,
        states_per_task: int = 1,
        image_size: int = 0,
    ) -> None:
        self.batched = batched
        self.num_reset_states = len(scripts)
        self.image_shapes: Mapping[str, tuple[int, int]] = {"cam": (image_size, image_size + 1)} if image_size else {}
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.closed = False
        self._scripts = scripts
        self._states_per_task = states_per_task
        self._reset_state = np.full(num_slots, -1)
        self._steps = np.zeros(num_slots, dtype=np.int64)
        self._last_action = np.zeros(num_slots, dtype=np.float32)

    def slots_called(self, name: str) -> list[tuple[int, ...]]:
        """The slots of each call of ``name``, in order."""
        return [slots for call, slots in self.calls if call == name]

    def task(self, reset_state_id: int) -> Task:
        task_id = reset_state_id // self._states_per_task
        return Task(task_id=task_id, instruction=f"task {task_id}", suite="scripted")

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        self.calls.append(("reset", tuple(slots)))
        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            self._reset_state[slot] = reset_state_id
            self._steps[slot] = 0
            self._last_action[slot] = 0

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        self.calls.append(("step", tuple(slots)))
        assert actions.shape == (len(slots), self.action_dim)
        self._last_action[list(slots)] = actions[:, 0]
        scripts = [self._scripts[self._reset_state[slot]] for slot in slots]
        rewards = [script.rewards[self._steps[slot]] for slot, script in zip(slots, scripts, strict=True)]
        flags = {
            name: np.asarray(
                [
                    (getattr(script, name) or NOTHING)[self._steps[slot]]
                    for slot, script in zip(slots, scripts, strict=True)
                ]
            )
            for name in ("success", "terminated", "truncated")
            if name == "success" or any(getattr(script, name) for script in self._scripts)
        }
        self._steps[list(slots)] += 1
        return SimStep(rewards=np.asarray(rewards, np.float32), **flags)

    def observe(self, slots: Sequence[int]) -> SimObs:
        self.calls.append(("observe", tuple(slots)))
        index = list(slots)
        columns = (np.asarray(index), self._reset_state[index], self._steps[index], self._last_action[index])
        return SimObs(
            images={camera: self._filled(index, shape, 0) for camera, shape in self.image_shapes.items()},
            state=np.stack(columns, axis=1).astype(np.float32),
        )

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        self.calls.append(("render", tuple(slots)))
        return self._filled(list(slots), (2, 2), 100)

    def close(self) -> None:
        self.closed = True

    def _filled(self, slots: list[int], shape: tuple[int, int], offset: int) -> NDArray[np.uint8]:
        values = offset + 10 * np.asarray(slots) + self._steps[slots]
        return np.broadcast_to(values[:, None, None, None], (len(slots), *shape, 3)).astype(np.uint8)


def seen_after(result: ChunkResult) -> EnvObs:
    """The observations that a chunk led to; only a message to the policy may be without."""
    assert result.next_obs is not None
    return result.next_obs
