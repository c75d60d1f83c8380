"""Episodes, action chunks, masks, auto-reset, reward shaping and success bookkeeping: once, for every simulator.

See docs/environments.md for the semantics in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_rl.contracts import ChunkResult, EnvObs, EpisodeRecord
from embodied_rl.envs.base import SimEnv, SimObs, SimStep
from embodied_rl.envs.open_episodes import OpenEpisode

NextResetState = Callable[[int, int], int | None]
"""(env id, k) -> the initial state of the env's episode k, counted from 0, or None for no further episode. With
auto-reset it must give all envs of a group the same answer for the same k; then they share starts however long their
episodes last."""


class FrameRecorder(Protocol):
    """Takes the frames of a video."""

    def wants(self, env_index: int) -> bool:
        """Asked before every step; the env is not rendered while False."""
        ...

    def record(
        self,
        env_index: int,
        frame: NDArray[np.uint8],
        *,
        instruction: str,
        episode_step: int,
        reward: float,
        success: bool,
    ) -> None:
        """One frame: ``env_index`` is the env id, ``frame`` [H,W,3], ``reward`` the shaped reward of the step that led
        to it. ``episode_step`` 0 is the first observation of an episode, with reward 0."""
        ...


class ChunkedEnv:
    """N envs of one pipeline stage, driven chunk by chunk. The only ``chunk_step`` of the project.

    Args:
        sim: its slots 0 .. N-1 are the envs.
        env_ids: N ids over all workers and stages.
        num_action_chunks: C, the actions of a chunk.
        max_episode_steps: an episode is truncated when it has taken this many steps.
        auto_reset: episodes follow each other without end, and :meth:`open_episodes` tells of those under way.
            Otherwise :meth:`reset` says whether an env's next episode begins, at the end of the chunk in which one
            ended, or it stays done: it is not stepped or rendered again and its last observation is repeated.
        ignore_terminations: success is recorded but does not end the episode. A simulator that cannot go on ends it
            all the same.
        use_rel_reward: reward changes of the simulator's reward level (r_t - r_{t-1}, with r_{-1} = 0) instead of it.
        reward_coef: factor of every reward.
        recorder: gets a frame of every step of the envs that it wants.
        first_lengths: N numbers of steps after which the envs' episodes number 0 are truncated; None:
            ``max_episode_steps``. Nobody is told of those that are cut short so.
    """

    def __init__(
        self,
        sim: SimEnv,
        *,
        env_ids: Sequence[int],
        num_action_chunks: int,
        max_episode_steps: int,
        auto_reset: bool,
        ignore_terminations: bool,
        use_rel_reward: bool,
        reward_coef: float,
        recorder: FrameRecorder | None = None,
        first_lengths: Sequence[int] | None = None,
    ) -> None:
        for name, value in (("num_action_chunks", num_action_chunks), ("max_episode_steps", max_episode_steps)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        self.sim = sim
        """A simulator of the same kind may take its place, and :meth:`reset` or :meth:`resume` follows."""
        self._env_ids = torch.tensor(env_ids, dtype=torch.int64)
        self._first_lengths = None if first_lengths is None else np.array(first_lengths, dtype=np.int64)
        self._num_action_chunks = num_action_chunks
        self._max_episode_steps = max_episode_steps
        self._auto_reset = auto_reset
        self._ignore_terminations = ignore_terminations
        self._use_rel_reward = use_rel_reward
        self._reward_coef = reward_coef
        self._success_return: float | None = getattr(sim, "success_return", None)
        self.recorder = recorder
        self._next_reset_state: NextResetState | None = None
        self.started = False
        """There has been a :meth:`reset` or :meth:`resume`."""
        self._finished: list[EpisodeRecord] = []

        n = len(env_ids)
        self._done = np.ones(n, dtype=np.bool_)
        self._episode = np.zeros(n, dtype=np.int64)
        self._reset_state = np.zeros(n, dtype=np.int64)
        self._steps = np.zeros(n, dtype=np.int64)
        self._length = np.full(n, max_episode_steps, dtype=np.int64)
        # Of the present episodes, for whoever has to play them again.
        self._actions = np.zeros((n, max_episode_steps if auto_reset else 0, sim.action_dim), dtype=np.float32)
        self._level = np.zeros(n, dtype=np.float32)
        self._return = np.zeros(n, dtype=np.float64)
        self._max_reward = np.zeros(n, dtype=np.float32)
        self._succeeded, self._failed = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
        self._tasks = [sim.task(0)] * n
        self._state = np.zeros((n, sim.state_dim), dtype=np.float32)
        self._images = {
            camera: np.zeros((n, height, width, 3), dtype=np.uint8)
            for camera, (height, width) in sim.image_shapes.items()
        }

    @property
    def running(self) -> list[int]:
        """The slots of envs that go on."""
        return np.flatnonzero(~self._done).tolist()

    @property
    def under_way(self) -> float:
        """Of the episodes that go on, the part that is played, together: 1 for two at the half of their longest."""
        return float(self._steps[~self._done].sum()) / self._max_episode_steps

    @property
    def num_ended(self) -> int:
        """Number of episodes that ended and :meth:`drain_episodes` has yet to give."""
        return len(self._finished)

    @property
    def all_done(self) -> bool:
        """No env has anything left to do until the next reset."""
        return bool(self._done.all())

    def current_obs(self) -> EnvObs:
        """The policy's present observation: the last ``next_obs``, to continue from."""
        return self._env_obs(range(len(self._done)))

    def reset(
        self,
        reset_state_ids: Sequence[int | None],
        next_reset_state: NextResetState | None = None,
        *,
        first_episode: int = 0,
    ) -> EnvObs:
        """Start an episode in every env; unfinished ones are dropped without a record.

        Args:
            reset_state_ids: N ids. None leaves an env idle, that is done from the start, with observations of zeros
                (where an evaluation has fewer episodes than envs).
            next_reset_state: where an env's further episodes start; None, not with auto-reset: there are none.
            first_episode: the number of these episodes, from which further ones are counted.
        """
        n = len(self._done)
        if len(reset_state_ids) != n:
            raise ValueError(f"reset: got {len(reset_state_ids)} reset state ids, expected one for each of {n} envs")
        if self._auto_reset and next_reset_state is None:
            raise ValueError("reset: got no next_reset_state, expected one with auto_reset=True")
        self._next_reset_state = next_reset_state
        self.started = True
        self._done[:] = True
        self._episode[:] = first_episode
        for buffer in (self._state, *self._images.values()):
            buffer[:] = 0
        starts = {slot: state for slot, state in enumerate(reset_state_ids) if state is not None}
        for block in self._blocks(list(starts)):
            self._start(block, [starts[slot] for slot in block])
        return self._env_obs(range(n))

    def chunk_step(self, actions: Tensor) -> ChunkResult:
        """Take up to C steps in every env that is not done. ``actions``: [N,C,A] float32 on the CPU."""
        n = len(self._done)
        if not self.started:
            raise RuntimeError("chunk_step before the first reset; call reset(reset_state_ids) first")
        expected = (n, self._num_action_chunks, self.sim.action_dim)
        if tuple(actions.shape) != expected or actions.dtype != torch.float32:
            raise ValueError(
                f"chunk_step: got actions {list(actions.shape)} {actions.dtype}, "
                f"expected {list(expected)} torch.float32"
            )
        controls = actions.detach().numpy()
        running = np.flatnonzero(~self._done)
        if not np.isfinite(controls).all() and not np.isfinite(controls[running]).all():
            bad = running[~np.isfinite(controls[running]).all(axis=(1, 2))]
            raise ValueError(f"chunk_step: actions of envs {self._env_ids[bad].tolist()} are NaN or infinite")

        rewards = np.zeros(expected[:2], dtype=np.float32)
        terminated, truncated, valid, success = (np.zeros(expected[:2], dtype=np.bool_) for _ in range(4))
        final_obs: list[EnvObs] = []
        waiting = np.flatnonzero(self._done).tolist()
        task_ids = torch.tensor([task.task_id for task in self._tasks])
        for block in self._blocks(running.tolist()):
            for c in range(self._num_action_chunks):
                alive = [slot for slot, done in zip(block, self._done[block].tolist(), strict=True) if not done]
                if not alive:
                    break
                which = self._index(alive)
                # A copy: an adapter may change its actions in place, and the policy's are recorded.
                step = self._step(alive, controls[which, c].copy())
                rewards[which, c], success[which, c], terminated[which, c], truncated[which, c] = step
                valid[which, c] = True
            self._observe(block)
            if self._next_reset_state is not None:
                final_obs += self._restart([slot for slot in block if self._done[slot]])
        if self._next_reset_state is not None:
            self._restart(waiting)  # their last observations were `next_obs` ever since
        return ChunkResult(
            rewards=torch.from_numpy(rewards),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            valid=torch.from_numpy(valid),
            success=torch.from_numpy(success),
            task_ids=task_ids,
            next_obs=self._env_obs(range(n)),
            final_obs=EnvObs.concatenate(final_obs) if final_obs else None,
        )

    def open_episodes(self) -> list[OpenEpisode]:
        """With auto-reset: the episodes that continue with the next chunk, enough of them for :meth:`resume`."""
        return [
            OpenEpisode(
                env_id=int(self._env_ids[slot]),
                number=int(self._episode[slot]),
                reset_state_id=int(self._reset_state[slot]),
                actions=self._actions[slot, : self._steps[slot]].copy(),
                state=self._state[slot].copy(),
            )
            for slot in np.flatnonzero(~self._done).tolist()
        ]

    def resume(
        self,
        episodes: Sequence[OpenEpisode],
        next_reset_state: NextResetState,
        *,
        report_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[int]:
        """Bring every env to where :meth:`open_episodes` found it: its actions are taken again from the reset.

        Nothing is rendered on the way, and no record made.

        Args:
            episodes: one for each env.
            next_reset_state: as in :meth:`reset`.
            report_progress: told how many of how many envs stand where they are to.

        Returns:
            The ids of envs that did not come to the state where they were: another machine or version of the simulator
            rounds otherwise. They continue from where the actions led, or with their next episode if that ended.

        Raises:
            ValueError: the episodes are not those of this env.
        """
        n = len(self._done)
        by_env = {episode.env_id: episode for episode in episodes}
        if sorted(by_env) != sorted(self._env_ids.tolist()) or len(episodes) != n:
            raise ValueError(f"resume: got episodes of envs {sorted(by_env)}, expected {self._env_ids.tolist()}")
        for episode in episodes:
            steps, action_dim = episode.actions.shape
            if action_dim != self.sim.action_dim or steps >= self._max_episode_steps:
                raise ValueError(
                    f"resume: got {steps} actions of {action_dim} components for env {episode.env_id}, expected fewer "
                    f"than {self._max_episode_steps} of {self.sim.action_dim}"
                )
        self._next_reset_state, self.started = next_reset_state, True
        replayed = [by_env[int(env_id)] for env_id in self._env_ids]
        self._episode[:] = [episode.number for episode in replayed]
        astray: list[int] = []
        for block in self._blocks(list(range(n))):
            self._replay({slot: replayed[slot] for slot in block})
            self._observe(block)
            astray += [s for s in block if self._done[s] or not np.array_equal(self._state[s], replayed[s].state)]
            self._restart([slot for slot in block if self._done[slot]])
            report_progress(block[-1] + 1, n)
        self._finished = []
        return [int(self._env_ids[slot]) for slot in astray]

    def drain_episodes(self) -> list[EpisodeRecord]:
        """The episodes that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()

    def _blocks(self, slots: list[int]) -> list[list[int]]:
        """Slots that advance together. One by one where the simulator gains nothing from a batch: each slot then goes
        through its steps, observation and reset before the next, so an adapter that shares a scene switches rarely."""
        if self.sim.batched:
            return [slots] if slots else []
        return [[slot] for slot in slots]

    def _replay(self, episodes: Mapping[int, OpenEpisode]) -> None:
        """Take the actions of episodes, by slot, from their resets; all end with the same step, since a batched
        simulator may move slots that wait."""
        for left in range(max(len(e.actions) for e in episodes.values()), -1, -1):
            if starting := {s: e.reset_state_id for s, e in episodes.items() if len(e.actions) == left}:
                self._begin(list(starting), list(starting.values()))
            alive = [s for s, e in episodes.items() if len(e.actions) >= left > 0 and not self._done[s]]
            if alive:
                self._step(alive, np.stack([episodes[s].actions[-left] for s in alive]))

    def _start(self, slots: list[int], reset_state_ids: list[int]) -> None:
        self._begin(slots, reset_state_ids)
        self._observe(slots)
        self._record_frames(slots, np.zeros(len(slots), np.float32), np.zeros(len(slots), np.bool_))

    def _begin(self, slots: list[int], reset_state_ids: list[int]) -> None:
        self.sim.reset(slots, reset_state_ids)
        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            self._tasks[slot] = self.sim.task(reset_state_id)
        self._reset_state[slots] = reset_state_ids
        for array in (self._done, self._steps, self._level, self._return, self._succeeded, self._failed):
            array[slots] = 0
        self._max_reward[slots] = -np.inf
        if self._first_lengths is not None:
            first = self._episode[slots] == 0
            self._length[slots] = np.where(first, self._first_lengths[slots], self._max_episode_steps)

    def _restart(self, slots: list[int]) -> list[EnvObs]:
        """Start the next episodes of ended envs; returns the last observations of those that have one."""
        assert self._next_reset_state is not None
        starts = {s: self._next_reset_state(int(self._env_ids[s]), int(self._episode[s]) + 1) for s in slots}
        going_on = {slot: state for slot, state in starts.items() if state is not None}
        if not going_on:
            return []
        slots = list(going_on)
        last = self._env_obs(slots)
        self._episode[slots] += 1
        self._start(slots, list(going_on.values()))
        return [last]

    def _step(
        self, slots: list[int], actions: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """One control step: (rewards, success, terminated, truncated), each [len(slots)]."""
        if self._auto_reset:
            self._actions[slots, self._steps[slots]] = actions
        outcome = self.sim.step(slots, actions)
        which = self._index(slots)
        if not isinstance(outcome, SimStep):
            raise TypeError(
                f"{type(self.sim).__name__}.step: got {outcome!r:.80} ({type(outcome).__name__}), expected a SimStep"
            )
        for name in ("rewards", "success", "terminated", "truncated"):
            array = getattr(outcome, name)
            if array is not None and array.shape != (len(slots),):
                raise ValueError(
                    f"{type(self.sim).__name__}.step: got {name} {list(array.shape)}, expected [{len(slots)}]"
                )
        self._check_finite(f"{type(self.sim).__name__}.step: the reward", outcome.rewards, slots)
        levels = outcome.rewards.astype(np.float32)
        unscaled = levels - self._level[which] if self._use_rel_reward else levels
        rewards = self._reward_coef * unscaled
        self._level[which] = levels
        self._steps[which] += 1
        self._return[which] += unscaled
        self._max_reward[which] = np.maximum(self._max_reward[which], rewards)

        success = outcome.success
        terminated = np.zeros_like(success) if self._ignore_terminations else success
        if outcome.terminated is not None:
            terminated = terminated | outcome.terminated
        truncated = at_length = self._steps[which] >= self._length[which]
        if outcome.truncated is not None:
            truncated = truncated | outcome.truncated
        truncated = truncated & ~terminated
        self._done[which] = done = terminated | truncated
        if self._success_return is not None:  # known at the end alone, so it does not bring the end about
            success = success | (done & (self._return[which] >= self._success_return))
        self._succeeded[which] |= success
        self._failed[which] = terminated & ~self._succeeded[which]
        self._record_frames(slots, rewards, success)
        if done.any():
            cut_short = at_length & ~terminated & (self._length[which] < self._max_episode_steps)
            told = (done & ~cut_short).tolist()
            self._finished += [self._episode_record(slot) for slot, tell in zip(slots, told, strict=True) if tell]
        return rewards, success, terminated, truncated

    def _episode_record(self, slot: int) -> EpisodeRecord:
        return EpisodeRecord(
            env_id=int(self._env_ids[slot]),
            task_id=self._tasks[slot].task_id,
            instruction=self._tasks[slot].instruction,
            reset_state_id=int(self._reset_state[slot]),
            success=bool(self._succeeded[slot]),
            episode_return=self._reward_coef * float(self._return[slot]),
            episode_length=int(self._steps[slot]),
            max_reward=float(self._max_reward[slot]),
            failed=bool(self._failed[slot]),
            suite=self._tasks[slot].suite,
        )

    def _record_frames(self, slots: list[int], rewards: NDArray[np.float32], success: NDArray[np.bool_]) -> None:
        recorder = self.recorder
        if recorder is None:
            return
        wanted = [i for i, slot in enumerate(slots) if recorder.wants(int(self._env_ids[slot]))]
        if not wanted:
            return
        slots, rewards, success = [slots[i] for i in wanted], rewards[wanted], success[wanted]
        for slot, frame, reward, holds in zip(slots, self.sim.render(slots), rewards, success, strict=True):
            recorder.record(
                int(self._env_ids[slot]),
                frame,
                instruction=self._tasks[slot].instruction,
                episode_step=int(self._steps[slot]),
                reward=float(reward),
                success=bool(holds),
            )

    def _observe(self, slots: list[int]) -> None:
        obs = self.sim.observe(slots)
        self._check(obs, slots)
        which = self._index(slots)
        self._state[which] = obs.state
        for camera, images in obs.images.items():
            self._images[camera][which] = images

    def _index(self, slots: list[int]) -> list[int] | slice:
        """``slots``, which ascend, as an index: where they are all, a slice takes a tenth of a list's time."""
        return slice(None) if len(slots) == len(self._done) else slots

    def _check(self, obs: SimObs, slots: list[int]) -> None:
        """Assigning into the buffers would broadcast and convert silently."""
        where, n = f"{type(self.sim).__name__}.observe", len(slots)
        if not isinstance(obs, SimObs):
            raise TypeError(f"{where}: got {obs!r:.80} ({type(obs).__name__}), expected a SimObs")
        got = {name: (a.shape, a.dtype) for name, a in {"state": obs.state, **obs.images}.items()}
        expected = {name: ((n, *a.shape[1:]), a.dtype) for name, a in {"state": self._state, **self._images}.items()}
        if got != expected:
            got, expected = ({key: (size, t.name) for key, (size, t) in part.items()} for part in (got, expected))
            raise ValueError(f"{where}: got {got}, expected {expected}")
        self._check_finite(f"{where}: the state", obs.state, slots)

    def _check_finite(self, what: str, values: NDArray[np.float32], slots: list[int]) -> None:
        """Refuse what the policy could only answer with NaN, which would be blamed on its actions."""
        if not np.isfinite(values).all():
            finite = np.isfinite(values).reshape(len(slots), -1).all(axis=1)
            slot = slots[int(np.argmin(finite))]
            raise ValueError(
                f"{what} is NaN or infinite in env {int(self._env_ids[slot])}, step {int(self._steps[slot])} of an "
                f"episode from initial state {int(self._reset_state[slot])}, expected numbers"
            )

    def _env_obs(self, slots: Sequence[int]) -> EnvObs:
        """A message about ``slots``, which shares no memory with the buffers."""
        index = list(slots)
        if len(index) == len(self._done):
            return EnvObs(
                env_ids=self._env_ids,
                images={camera: torch.from_numpy(images.copy()) for camera, images in self._images.items()},
                state=torch.from_numpy(self._state.copy()),
                instructions=tuple([task.instruction for task in self._tasks]),
            )
        return EnvObs(
            env_ids=self._env_ids[index],
            images={camera: torch.from_numpy(images[index]) for camera, images in self._images.items()},
            state=torch.from_numpy(self._state[index]),
            instructions=tuple(self._tasks[slot].instruction for slot in index),
        )
