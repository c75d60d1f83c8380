"""Recording one stage's rollout, and sharing it out among the actor's ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, RolloutStart, Trajectory
from embodied_rl.models.base import PolicyOutput


class TrajectoryBuilder:
    """Collects what the policy decided, chunk by chunk, and what came of it, in one rollout of N envs.

    Args:
        start: the rollout's first turn, with group ids, and env ids that ascend.
        with_actions: record executed actions, too.
    """

    def __init__(self, start: RolloutStart, *, with_actions: bool = False) -> None:
        assert start.group_ids is not None
        self._with_actions = with_actions
        self._env_ids, self._group_ids, self._rollout_epoch = start.obs.env_ids, start.group_ids, start.rollout_epoch
        self._decisions: list[PolicyOutput] = []
        self._versions: list[int] = []
        self._results: list[ChunkResult] = []
        self._next_values: list[Tensor] = []
        self._unacted: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._env_ids]
        """Of each env, chunk -> the replay inputs of the state that follows it, where nobody acts on that."""

    def decided(self, decision: PolicyOutput, version: int) -> None:
        """Record the policy's decision for the next chunk, and the version of its weights."""
        self._decisions.append(decision)
        self._versions.append(version)

    def happened(self, result: ChunkResult, next_values: Tensor | None, final_values: Tensor | None) -> None:
        """Record what came of the last decision.

        Args:
            next_values: [N] float32, the values of the states that follow (``result.next_obs``); None without a value
                head.
            final_values: those of ``result.final_obs``, which follow in the episodes that ended.
        """
        self._results.append(result)
        if next_values is None:
            return
        if result.final_obs is not None:
            assert final_values is not None
            next_values = next_values.clone()
            next_values[torch.searchsorted(self._env_ids, result.final_obs.env_ids)] = final_values
        self._next_values.append(next_values)

    def led_to(self, env_ids: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """Record states that follow what happened last and on which nobody acts, in the place of any recorded before.

        Args:
            inputs: each [n,...], their replay inputs.
        """
        chunk = len(self._results) - 1
        for row, place in enumerate(torch.searchsorted(self._env_ids, env_ids).tolist()):
            self._unacted[place][chunk] = {key: tensor[row] for key, tensor in inputs.items()}

    def build(self) -> Trajectory:
        """The finished rollout.

        Raises:
            ValueError: nothing was recorded, or not as many results, or values of what followed, as decisions.
        """
        decisions, results = self._decisions, self._results
        first = decisions[0] if decisions else None
        wanted = (len(decisions), len(decisions) if first is not None and first.values is not None else 0)
        if first is None or (len(results), len(self._next_values)) != wanted:
            raise ValueError(
                f"got {len(results)} results and {len(self._next_values)} values of what followed for {len(decisions)} "
                "decisions, expected as many of each, and one at least"
            )
        unacted_inputs, unacted_rows = self._followed()
        stack = lambda tensors: None if tensors[0] is None else torch.stack(tensors)  # noqa: E731
        return Trajectory(
            env_ids=self._env_ids,
            group_ids=self._group_ids,
            rollout_epoch=self._rollout_epoch,
            rewards=torch.stack([r.rewards for r in results]),
            scores=torch.stack([r.success.any(-1) for r in results]).any(0).float(),
            terminated=torch.stack([r.terminated for r in results]),
            truncated=torch.stack([r.truncated for r in results]),
            valid=torch.stack([r.valid for r in results]),
            logprobs=torch.stack([d.logprobs for d in decisions]),
            values=stack([d.values for d in decisions]),
            bootstrap_values=torch.stack(self._next_values) if self._next_values else None,
            replay_inputs={key: torch.stack([d.replay_inputs[key] for d in decisions]) for key in first.replay_inputs},
            policy_versions=torch.tensor(self._versions),
            tokens=stack([d.tokens for d in decisions]),
            actions=torch.stack([d.actions for d in decisions]) if self._with_actions else None,
            task_ids=torch.stack([r.task_ids for r in results]),
            unacted_inputs=unacted_inputs,
            unacted_rows=unacted_rows,
        )

    def _followed(self) -> tuple[dict[str, Tensor] | None, Tensor | None]:
        """``unacted_inputs`` and ``unacted_rows``."""
        if not any(self._unacted):
            return None, None
        rows = torch.full((len(self._results), len(self._env_ids)), -1)
        for place, states in enumerate(self._unacted):
            rows[list(states), place] = torch.arange(len(states))
        padded = [[*states.values()] for states in self._unacted]  # all have the rollout's last
        most = max(map(len, padded))
        columns = [[*states, *[states[-1]] * (most - len(states))] for states in padded]
        names = columns[0][0]
        return {
            name: torch.stack([torch.stack([state[name] for state in column]) for column in columns], 1)
            for name in names
        }, rows


def split_by_rank(trajectory: Trajectory, world_size: int) -> list[Trajectory | None]:
    """One part per actor rank: whole groups, dealt out by group id, so that no group is ever split."""
    owner = trajectory.group_ids % world_size
    return [trajectory.select(owner == rank) for rank in range(world_size)]
