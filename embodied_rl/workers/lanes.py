"""Who serves whom. A *lane* is one pipeline stage of one env worker: the unit that waits for the policy at once."""

from __future__ import annotations

from dataclasses import dataclass

Lane = tuple[int, int]
"""(env worker's rank, stage): the key of its messages in the request and answer channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """All lanes of a run."""

    env_workers: int
    stages: int

    def all(self) -> list[Lane]:
        """Ordered by env worker, then stage; a lane's place is also the order of its envs' ids."""
        return [(rank, stage) for rank in range(self.env_workers) for stage in range(self.stages)]

    def index(self, lane: Lane) -> int:
        return lane[0] * self.stages + lane[1]

    def env_ids(self, lane: Lane, total_num_envs: int) -> range:
        """The lane's part of ``total_num_envs``, which divides evenly (checked with the config)."""
        per_lane = total_num_envs // (self.env_workers * self.stages)
        return range(self.index(lane) * per_lane, (self.index(lane) + 1) * per_lane)

    def served_by(self, rollout_rank: int, rollout_workers: int) -> list[list[Lane]]:
        """The lanes of one rollout worker, by stage: it serves every ``rollout_workers``-th env worker."""
        ranks = range(rollout_rank, self.env_workers, rollout_workers)
        return [[(rank, stage) for rank in ranks] for stage in range(self.stages)]
