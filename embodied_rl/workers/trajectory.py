"""Recording one lane's rollouts, and sharing them out among the actor's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, RolloutStart, Trajectory
from embodied_rl.models.base import PolicyOutput


@dataclass(slots=True)
class _Round:
    """What the policy decided on a lane's observations, and what came of it."""

    decision: PolicyOutput
    version: int
    """Of the weights."""
    result: ChunkResult | None = None
    next_values: Tensor | None = None


class TrajectoryBuilder:
    """Collects what the policy decided, chunk by chunk, and what came of it, in rollout epochs that N envs play at a
    stretch.

    An env that has ended an episode may go on with that of another env, and of the next epoch: a trajectory has each
    episode where it belongs, from its own first chunk on.

    Args:
        start: the first turn, with group ids, and env ids that ascend.
        with_actions: record executed actions, too.
        with_unacted: and states on which nobody acts.
    """

    def __init__(self, start: RolloutStart, *, with_actions: bool = False, with_unacted: bool = False) -> None:
        assert start.group_ids is not None
        self._with_actions, self._with_unacted = with_actions, with_unacted
        self._env_ids, self._group_ids, self._first_epoch = start.obs.env_ids, start.group_ids, start.rollout_epoch
        self._rounds: dict[int, _Round] = {}
        """Those that an epoch to come needs."""
        self._count = 0
        """Of all rounds."""
        self._built = 0
        """Epochs that were given."""
        epochs, n = self._group_ids.shape
        self._own = torch.arange(n)
        # Of each episode.
        self._slot, self._begun, self._ended = (torch.full((epochs * n,), -1) for _ in range(3))
        """The env that plays it, by its place, and the rounds of its first and of its last chunk; -1: not yet."""
        self._unacted: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._env_ids]
        """Of each env, round -> the replay inputs of the state that follows it, where nobody acts on that."""

    def decided(self, decision: PolicyOutput, version: int) -> None:
        """Record the policy's decision for the next chunk, and the version of its weights.

        Raises:
            ValueError: nobody knows what came of the one before.
        """
        if self._count and self._rounds[self._count - 1].result is None:
            raise ValueError(f"got decision {self._count} without a result of the one before, expected one for each")
        self._rounds[self._count] = _Round(decision, version)
        self._count += 1

    def happened(self, result: ChunkResult, next_values: Tensor | None, final_values: Tensor | None) -> None:
        """Record what came of the last decision.

        Args:
            next_values: [N] float32, the values of the states that follow (``result.next_obs``); None without a value
                head.
            final_values: those of ``result.final_obs``, which follow in the episodes that ended.

        Raises:
            ValueError: there is no such decision, or it has values and what followed has none.
        """
        last = self._rounds.get(self._count - 1)
        if last is None or last.result is not None:
            raise ValueError(f"got a result more than the {self._count} decisions, expected one for each")
        if (last.decision.values is None) != (next_values is None):
            raise ValueError("got values of a decision or of what followed, expected both or neither")
        if next_values is not None and result.final_obs is not None:
            assert final_values is not None
            next_values = next_values.clone()
            next_values[torch.searchsorted(self._env_ids, result.final_obs.env_ids)] = final_values
        last.result, last.next_values = result, next_values
        if result.episodes is None:  # each env's chunks are its trajectory, from the first one to the rollout's last
            if self._count == 1:
                self._slot[:], self._begun[:] = self._own, 0
            if result.last:
                self._ended[:] = self._count - 1
            return
        playing = result.episodes
        fresh = self._begun[playing] < 0
        self._slot[playing[fresh]], self._begun[playing[fresh]] = self._own[fresh], self._count - 1
        over = result.last | (result.terminated | result.truncated).any(-1)
        self._ended[playing[over & (self._ended[playing] < 0)]] = self._count - 1

    def led_to(self, env_ids: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """Record states that follow what happened last and on which nobody acts, in the place of any recorded before.

        Args:
            inputs: each [n,...], their replay inputs.
        """
        for row, place in enumerate(torch.searchsorted(self._env_ids, env_ids).tolist()):
            self._unacted[place][self._count - 1] = {key: tensor[row] for key, tensor in inputs.items()}

    def complete(self) -> list[Trajectory]:
        """The epochs whose episodes have all ended, each given once, in their order. To be asked when the decision on
        what followed is recorded."""
        n, found = len(self._env_ids), []
        if self._ended[-1] < 0 and len(self._group_ids) == 1:
            return []
        while self._built < len(self._group_ids) and bool((self._ended[self._built * n :][:n] >= 0).all()):
            found.append(self._build(self._built))
            self._built += 1
        if found:
            left = self._begun[self._built * n :]
            needed = int(left[left >= 0].min()) if bool((left >= 0).any()) else self._count
            # Also the newest: what was decided there is what some ended episode led to.
            needed = min(needed, self._count - 1)
            self._rounds = {number: it for number, it in self._rounds.items() if number >= needed}
            self._unacted = [{r: it for r, it in states.items() if r >= needed} for states in self._unacted]
        return found

    def _build(self, epoch: int) -> Trajectory:
        n = len(self._env_ids)
        episodes = slice(epoch * n, (epoch + 1) * n)
        slots, first, last = self._slot[episodes], self._begun[episodes], self._ended[episodes]
        chunks = int((last - first).max()) + 1
        within = torch.arange(chunks)[:, None]
        own = within <= last - first  # [T,N]
        low = int(first.min())
        rounds = [self._rounds[number] for number in range(low, int(last.max()) + 1)]
        results = [it.result for it in rounds if it.result is not None]
        straight = chunks == len(rounds) and bool((slots == self._own).all()) and not bool((first - low).any())
        # Beyond an episode's end its last chunk is repeated.
        rows = ((first - low + within).minimum(last - low) * n + slots).flatten()

        def placed(tensors: Sequence[Tensor]) -> Tensor:
            """[T,N,...] from each round's [N,...]."""
            stacked = torch.stack(tuple(tensors))
            if straight:
                return stacked
            # Indexing would copy pictures byte by byte.
            return stacked.flatten(0, 1).index_select(0, rows).unflatten(0, (chunks, n))

        def of_steps(tensors: Sequence[Tensor]) -> Tensor:
            """As :func:`placed`; nothing where the episode has ended."""
            return placed(tensors).mul_(own[..., None])

        decisions = [it.decision for it in rounds]
        values = [it.decision.values for it in rounds if it.decision.values is not None]
        next_values = [it.next_values for it in rounds if it.next_values is not None]
        tokens = [it.decision.tokens for it in rounds if it.decision.tokens is not None]
        versions = torch.tensor([it.version for it in rounds])[:, None].expand(-1, n)
        unacted_inputs, unacted_rows = self._followed(slots, first, last, chunks)
        return Trajectory(
            env_ids=self._env_ids,
            group_ids=self._group_ids[epoch],
            rollout_epoch=self._first_epoch + epoch,
            rewards=of_steps([r.rewards for r in results]),
            scores=of_steps([r.success for r in results]).any(-1).any(0).float(),
            terminated=of_steps([r.terminated for r in results]),
            truncated=of_steps([r.truncated for r in results]),
            valid=of_steps([r.valid for r in results]),
            logprobs=placed([d.logprobs for d in decisions]),
            values=placed(values) if values else None,
            bootstrap_values=placed(next_values) if next_values else None,
            replay_inputs={
                name: placed([d.replay_inputs[name] for d in decisions]) for name in decisions[0].replay_inputs
            },
            policy_versions=placed(list(versions)),
            tokens=placed(tokens) if tokens else None,
            actions=placed([d.actions for d in decisions]) if self._with_actions else None,
            task_ids=placed([r.task_ids for r in results]),
            unacted_inputs=unacted_inputs,
            unacted_rows=unacted_rows,
        )

    def _followed(
        self, slots: Tensor, first: Tensor, last: Tensor, chunks: int
    ) -> tuple[dict[str, Tensor] | None, Tensor | None]:
        """``unacted_inputs`` and ``unacted_rows`` of an epoch's episodes: of those that have one, the state that each
        chunk led to and nobody acted on, and for each the state that it ended in."""
        if not self._with_unacted:
            return None, None
        rows, columns = torch.full((chunks, len(slots)), -1), []
        for place, (slot, begun, ended) in enumerate(zip(slots.tolist(), first.tolist(), last.tolist(), strict=True)):
            led_to = {number: it for number, it in self._unacted[slot].items() if begun <= number <= ended}
            if ended not in led_to:  # the env was idle then, and the policy was shown where
                shown = self._rounds[ended + 1].decision.replay_inputs
                led_to[ended] = {name: tensor[slot] for name, tensor in shown.items()}
            rows[[number - begun for number in led_to], place] = torch.arange(len(led_to))
            columns.append([*led_to.values()])
        most = max(map(len, columns))
        padded = [[*states, *[states[-1]] * (most - len(states))] for states in columns]
        return {
            name: torch.stack([torch.stack([state[name] for state in column]) for column in padded], 1)
            for name in padded[0][0]
        }, rows


def split_by_rank(trajectory: Trajectory, world_size: int) -> list[Trajectory | None]:
    """One part per actor rank: whole groups, dealt out by group id, so that no group is ever split."""
    owner = trajectory.group_ids % world_size
    return [trajectory.select(owner == rank) for rank in range(world_size)]
