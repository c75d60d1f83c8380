"""Recorded chunks with what came of them: rewards as the env would give them, and the observation that follows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.demonstrations.collection import may_lack_starts
from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.demonstrations.lerobot.reader import DataSet, ReportProgress
from embodied_rl.demonstrations.lerobot.writer import START_LEVEL, TERMINATED
from embodied_rl.errors import UserError
from embodied_rl.schema import EnvConfig


class DemonstratedOutcomes:
    """The chunks of a LeRobot data set whose outcome is known; they begin at any frame.

    The rewards are ``next.reward``, the simulator's level after each step, shaped as ``env`` says. An episode ends
    where the goal is first reached (``next.success``), unless ``env.train.ignore_terminations``, or where the simulator
    ended it (``terminated`` of its record); of one that does not, nobody recorded what follows its last frame, so
    chunks that would need to know are left out. So are failures, and
    first frames of takeovers whose set does not tell the level before them, where a change of it is the reward.

    Args:
        path: the data set's folder.
        chunk: C, the actions of a chunk.
        cameras: the policy's camera -> the data set's feature.
        state: as of :class:`Demonstrations`.

    Raises:
        UserError: no data set, one without rewards, or without a chunk whose outcome is known.
    """

    def __init__(
        self,
        path: str,
        env: EnvConfig,
        *,
        chunk: int,
        cameras: Mapping[str, str],
        sizes: Mapping[str, tuple[int, int]],
        state: bool = True,
        report: ReportProgress = lambda what, done, total: None,
    ) -> None:
        self._frames = Demonstrations(
            path, chunk=chunk, cameras=cameras, sizes=sizes, state=state, clip_actions=True, report=report
        )
        source, rows = DataSet.open(Path(path)), self._frames.rows
        source.require("next.reward", "the rewards")
        source.require("next.success", "where episodes end")
        level = source.rows("next.reward")[rows, 0]
        success = source.column("next.success")[rows].astype(bool)
        rewards, lasts = level.copy(), np.zeros(len(rows), dtype=np.int64)
        terminal, paid = np.zeros(len(rows), dtype=bool), np.ones(len(rows), dtype=bool)
        cut, end = may_lack_starts(source.root), 0
        for record in source.used_episodes():
            start, end = end, end + record["length"]
            lasts[start:end] = end
            if env.use_rel_reward:
                rewards[start + 1 : end] -= level[start : end - 1]
                before = record.get(START_LEVEL)
                paid[start] = before is not None or not cut
                rewards[start] -= before or 0.0
            reached = np.flatnonzero(success[start:end])
            if len(reached) and not env.train.ignore_terminations:
                lasts[start:end] = start + reached[0] + 1
                terminal[start:end] = True
            elif record.get(TERMINATED):
                terminal[start:end] = True
        numbers = np.arange(len(rows))
        self._rewards, self._ends, self._chunk = torch.from_numpy(rewards * np.float32(env.reward_coef)), lasts, chunk
        self._terminal = terminal
        self._begins = numbers[paid & np.where(terminal, numbers < lasts, numbers + chunk < lasts)]
        if not len(self._begins):
            raise UserError(
                f"{path}: no chunk of {chunk} actions has a known outcome: no episode ends (next.success, terminated) "
                "or is longer; use another data set, or shorter chunks"
            )

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def num_frames(self) -> int:
        """Observations; a chunk may begin with any of them, or not."""
        return self._frames.num_frames

    def observations(self, frames: Tensor) -> EnvObs:
        """Those of the frames with these numbers ([B] int64)."""
        return self._frames.sample(frames)[0]

    def sample(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The chunks with these numbers ([B] int64).

        Returns:
            The frame that each begins with [B] int64; actions [B,C,A]; rewards [B,C] float32; valid [B,C] bool, False
            beyond the end; terminated [B,C] bool; and the frame that follows [B], any after a termination.
        """
        begins = self._begins[index.numpy()]
        actions, _ = self._frames.chunks(begins)
        steps = begins[:, None] + np.arange(self._chunk)
        ends = self._ends[begins][:, None]
        valid = steps < ends
        terminated = (steps == ends - 1) & self._terminal[begins][:, None]
        following = np.minimum(begins + self._chunk, ends[:, 0] - 1)
        rewards = self._rewards[np.minimum(steps, ends - 1)]
        begins, following, valid, terminated = map(torch.from_numpy, (begins, following, valid, terminated))
        return begins, actions, rewards, valid, terminated, following
