"""Recording one stage's rollout, and sharing it out among the actor's ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.contracts import ActionChunk, ChunkResult, Trajectory


class TrajectoryBuilder:
    """Collects the chunks of one rollout of N envs.

    The values that bootstrap chunk t come with the policy's *next* answer: ``bootstrap`` is told apart from ``append``.

    Args:
        env_ids: [N] int64.
        group_ids: [N] int64.
        rollout_epoch: which rollout of the training step this is.
    """

    def __init__(self, env_ids: Tensor, group_ids: Tensor, rollout_epoch: int) -> None:
        self._env_ids, self._group_ids, self._rollout_epoch = env_ids, group_ids, rollout_epoch
        self._chunks: list[ActionChunk] = []
        self._results: list[ChunkResult] = []
        self._bootstrap: list[Tensor] = []

    def append(self, chunk: ActionChunk, result: ChunkResult) -> None:
        """Record what was done and what came of it.

        Raises:
            ValueError: an answer to another stage's request, or one without log-probabilities.
        """
        if not torch.equal(chunk.env_ids, self._env_ids):
            raise ValueError(
                f"got an action chunk for envs {chunk.env_ids.tolist()}, expected one for {self._env_ids.tolist()}"
            )
        if chunk.logprobs is None:
            raise ValueError("the policy gave no log-probabilities; a trajectory for training needs them")
        self._chunks.append(chunk)
        self._results.append(result)

    def bootstrap(self, answer: ActionChunk) -> None:
        """Record, from the policy's next answer, the values of the states that the last appended chunk led to."""
        if self._chunks and answer.bootstrap_values is not None:
            self._bootstrap.append(answer.bootstrap_values)

    def build(self) -> Trajectory:
        """The finished rollout.

        Raises:
            ValueError: nothing was recorded, or a policy with a value head did not value every chunk's end.
        """
        chunks, results = self._chunks, self._results
        if not chunks:
            raise ValueError("a rollout without a single chunk")
        has_values = chunks[0].values is not None
        if has_values and len(self._bootstrap) != len(chunks):
            raise ValueError(f"got {len(self._bootstrap)} bootstrap values for {len(chunks)} chunks")
        return Trajectory(
            env_ids=self._env_ids,
            group_ids=self._group_ids,
            rollout_epoch=self._rollout_epoch,
            rewards=torch.stack([r.rewards for r in results]),
            scores=torch.stack([r.success.any(-1) for r in results]).any(0).float(),
            terminated=torch.stack([r.terminated for r in results]),
            truncated=torch.stack([r.truncated for r in results]),
            valid=torch.stack([r.valid for r in results]),
            logprobs=torch.stack([c.logprobs for c in chunks if c.logprobs is not None]),
            values=torch.stack([c.values for c in chunks if c.values is not None]) if has_values else None,
            bootstrap_values=torch.stack(self._bootstrap) if has_values else None,
            replay_inputs={key: torch.stack([c.replay_inputs[key] for c in chunks]) for key in chunks[0].replay_inputs},
            policy_versions=torch.tensor([c.policy_version for c in chunks]),
            tokens=torch.stack([c.tokens for c in chunks if c.tokens is not None])
            if chunks[0].tokens is not None
            else None,
        )


def select_envs(trajectory: Trajectory, mask: Tensor) -> Trajectory | None:
    """The envs where ``mask`` ([N] bool) is true, or None if there is none."""
    if not mask.any():
        return None
    index = mask.nonzero().squeeze(-1)
    pick = lambda tensor: None if tensor is None else tensor[:, index]  # noqa: E731
    return Trajectory(
        env_ids=trajectory.env_ids[index],
        group_ids=trajectory.group_ids[index],
        rollout_epoch=trajectory.rollout_epoch,
        rewards=trajectory.rewards[:, index],
        scores=trajectory.scores[index],
        terminated=trajectory.terminated[:, index],
        truncated=trajectory.truncated[:, index],
        valid=trajectory.valid[:, index],
        logprobs=trajectory.logprobs[:, index],
        values=pick(trajectory.values),
        bootstrap_values=pick(trajectory.bootstrap_values),
        replay_inputs={key: tensor[:, index] for key, tensor in trajectory.replay_inputs.items()},
        policy_versions=trajectory.policy_versions,
        tokens=pick(trajectory.tokens),
        proximal_logprobs=pick(trajectory.proximal_logprobs),
        reference_logprobs=pick(trajectory.reference_logprobs),
        reference_kl=pick(trajectory.reference_kl),
    )


def split_by_rank(trajectory: Trajectory, world_size: int) -> list[Trajectory | None]:
    """One part per actor rank: whole groups, dealt out by group id, so that no group is ever split."""
    owner = trajectory.group_ids % world_size
    return [select_envs(trajectory, owner == rank) for rank in range(world_size)]
