"""Episodes that some envs share: whoever has ended one takes the next, so nobody waits for the longest."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class EpisodeQueue:
    """The numbered episodes of N envs. Env i of them begins with episode i; a call gives an env its next.

    Which env plays which depends on how long episodes last, so on the policy and their initial states alone. With
    episodes of K chunks at most all is played within K chunks for each N of them: an episode begins no later than the
    one N places before it has ended.

    Args:
        states: the initial state of each episode, N or more. None, among the first N: the env has nothing to do.
        env_ids: of the envs.
    """

    def __init__(self, states: Sequence[int | None], env_ids: range) -> None:
        if len(states) < len(env_ids):
            raise ValueError(f"EpisodeQueue: got {len(states)} episodes, expected one at least for {len(env_ids)} envs")
        self.states, self._env_ids = list(states), env_ids
        self.playing = torch.arange(len(env_ids))
        """[N] int64: the number of the episode that each env plays, or has played last."""
        self._begun = len(env_ids)
        self._idle = self.states.count(None)

    @property
    def first(self) -> list[int | None]:
        """The initial states of the first N."""
        return self.states[: len(self._env_ids)]

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.states) - self._idle

    @property
    def begun(self) -> int:
        """Number of those that an env plays or has played."""
        return self._begun - self._idle

    def __call__(self, env_id: int, number: int) -> int | None:
        """The initial state of an env's next episode, whose ``number`` is of no interest; None: all have been begun."""
        del number
        if self._begun == len(self.states):
            return None
        self.playing[env_id - self._env_ids.start] = self._begun
        self._begun += 1
        return self.states[self._begun - 1]

    def played_by(self, env_id: int) -> int:
        """The number of the episode that an env plays, or has played last."""
        return int(self.playing[env_id - self._env_ids.start])
