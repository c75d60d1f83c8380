"""Episodes that some envs share: whoever has ended one takes the next, so nobody waits for the longest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


class EpisodeQueue:
    """The numbered episodes of N envs. Env i of them begins with episode i; a call gives an env its next.

    Which env plays which depends on how long episodes last, so on the policy and their initial states alone. With
    episodes of K chunks at most all is played within K chunks for each N of them: an episode begins no later than the
    one N places before it has ended.

    Args:
        states: the initial state of each episode, N or more. None, among the first N: the env has nothing to do.
        env_ids: of the envs.
        tasks: of each episode, where the simulator holds few at once.
        at_once: an episode of a task that no env plays begins only if there are fewer of these, or if all that lie N
            places before it or more have ended, so that the bound above stays. An env that waits for that asks again.
    """

    def __init__(
        self,
        states: Sequence[int | None],
        env_ids: range,
        *,
        tasks: Sequence[int] | None = None,
        at_once: int | None = None,
    ) -> None:
        if len(states) < len(env_ids):
            raise ValueError(f"EpisodeQueue: got {len(states)} episodes, expected one at least for {len(env_ids)} envs")
        self.states, self._env_ids = list(states), env_ids
        self._tasks, self._at_once = tasks, at_once
        self.playing = torch.arange(len(env_ids))
        """[N] int64: the number of the episode that each env plays, or has played last."""
        self._going_on = [state is not None for state in self.first]
        """Of each env, as far as it has not asked for more."""
        self._begun = len(env_ids)
        self._idle = self.states.count(None)

    @property
    def first(self) -> list[int | None]:
        """The initial states of the first N."""
        return self.states[: len(self._env_ids)]

    @property
    def further(self) -> EpisodeQueue | None:
        """What an env is to ask when it has ended its first episode; None: there are no others."""
        return self if len(self.states) > len(self._env_ids) else None

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.states) - self._idle

    @property
    def begun(self) -> int:
        """Number of those that an env plays or has played."""
        return self._begun - self._idle

    def __call__(self, env_id: int, number: int) -> int | None:
        """The initial state of the next episode of an env, which has ended its own; ``number`` is of no interest. None:
        there is none, or none yet."""
        del number
        slot = env_id - self._env_ids.start
        self._going_on[slot] = False
        if self._begun == len(self.states) or not self._fits(self._begun):
            return None
        self.playing[slot], self._going_on[slot] = self._begun, True
        self._begun += 1
        return self.states[self._begun - 1]

    def played_by(self, env_id: int) -> int:
        """The number of the episode that an env plays, or has played last."""
        return int(self.playing[env_id - self._env_ids.start])

    def over(self, numbers: Collection[int], running: Collection[int]) -> bool:
        """Whether these episodes have all ended.

        Args:
            running: places of the envs that go on.
        """
        return max(numbers) < self._begun and not {int(self.playing[slot]) for slot in running} & set(numbers)

    def _fits(self, number: int) -> bool:
        """Whether the episode may begin beside those under way."""
        if self._tasks is None or self._at_once is None:
            return True
        under_way = [played for played, on in zip(self.playing.tolist(), self._going_on, strict=True) if on]
        tasks = {self._tasks[played] for played in under_way}
        neighbours = number - min(under_way, default=number) < len(self._env_ids)
        return neighbours or self._tasks[number] in tasks or len(tasks) < self._at_once
