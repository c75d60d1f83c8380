"""The replay buffer: chunks of rollouts in a ring of fixed size, and batches of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from embodied_rl.algorithms.soft_q import chunk_outcomes
from embodied_rl.contracts import Trajectory
from embodied_rl.errors import CheckpointError, first_line
from embodied_rl.files import with_usual_mode

FILE: Final = "replay.safetensors"
"""In a checkpoint."""
_INPUTS: Final = "inputs/"
_TOTAL: Final = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """B decisions and what came of them."""

    inputs: Mapping[str, Tensor]
    """Each [B,...]: what the policy saw."""
    actions: Tensor
    """[B,C,A] float32 in [-1, 1], as executed."""
    rewards: Tensor
    """[B] float32, as :func:`~embodied_rl.algorithms.soft_q.chunk_outcomes` gives them."""
    discounts: Tensor
    """[B] float32, from the same function."""
    next_inputs: Mapping[str, Tensor]
    """Each [B,...]: what it saw next, in the same episode; anything where the discount is 0."""

    def to(self, device: str) -> Transitions:
        return self._joined([self], lambda parts: parts[0].to(device))

    @classmethod
    def concatenate(cls, parts: Sequence[Transitions]) -> Transitions:
        return cls._joined(parts, torch.cat)

    @classmethod
    def _joined(cls, parts: Sequence[Transitions], join: Callable[[list[Tensor]], Tensor]) -> Transitions:
        names = parts[0].inputs
        return cls(
            inputs={name: join([part.inputs[name] for part in parts]) for name in names},
            actions=join([part.actions for part in parts]),
            rewards=join([part.rewards for part in parts]),
            discounts=join([part.discounts for part in parts]),
            next_inputs={name: join([part.next_inputs[name] for part in parts]) for name in names},
        )


class ReplayBuffer:
    """A ring of states in host memory, each with the chunk that was decided there, if any.

    What follows a chunk is the next state of the ring: a rollout of an env lies there in one piece, and ends with the
    state that nobody acted on. So every state is held once, in the type that it came in (images stay uint8), and since
    the oldest go first, no chunk ever lacks what follows.

    Args:
        capacity: states, whether or not a chunk was decided there.
        gamma: discount a simulator step.
        left_out: names of those that record its decision.
    """

    def __init__(self, capacity: int, *, gamma: float, left_out: Sequence[str] = ()) -> None:
        self._capacity, self._gamma, self._left_out = capacity, gamma, left_out
        self._rows: dict[str, Tensor] = {}
        """Name -> [capacity,...]; nothing before the first rollout, which tells the shapes."""
        self._head = self._filled = 0
        self._acted = torch.zeros(0, dtype=torch.int64)
        """Rows with a chunk, the oldest first."""
        self.total = 0
        """Chunks that ever came."""

    def __len__(self) -> int:
        """Chunks that can be drawn."""
        return len(self._acted)

    def add(self, trajectory: Trajectory) -> None:
        """Append a rollout's chunks, env by env, each with the state that follows it.

        Raises:
            ValueError: executed actions, or what followed, were not recorded.
        """
        self._append(self._pieces(trajectory))
        self.total += int(trajectory.valid.any(-1).sum())

    def sample(self, index: Tensor) -> Transitions:
        """The chunks with these numbers ([B] int64), 0 being the oldest."""
        rows = self._acted[index]
        following = (rows + 1) % self._capacity
        names = [name for name in self._rows if name.startswith(_INPUTS)]
        return Transitions(
            inputs={name.removeprefix(_INPUTS): self._rows[name].index_select(0, rows) for name in names},
            actions=self._rows["actions"][rows],
            rewards=self._rows["rewards"][rows],
            discounts=self._rows["discounts"][rows],
            next_inputs={name.removeprefix(_INPUTS): self._rows[name].index_select(0, following) for name in names},
        )

    def snapshot(self) -> Callable[[Path], None]:
        """Copy what it holds; returns what writes that into a checkpoint's directory."""
        order = self._order()
        rows = {name: tensor[order] for name, tensor in self._rows.items()}
        total = {_TOTAL: str(self.total)}

        def write(directory: Path) -> None:
            with with_usual_mode(directory / FILE):
                save_file(rows, directory / FILE, metadata=total)
            with (directory / FILE).open("rb") as file:
                os.fsync(file.fileno())

        return write

    def load(self, directory: Path) -> None:
        """Read what was written; where this buffer is smaller, the newest part of it.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        path = directory / FILE
        if not path.is_file():
            raise CheckpointError(
                f"{directory}: holds no replay buffer ({FILE}), so no run can resume it; start from its weights with "
                "runner.init_from, or use another checkpoint"
            )
        try:
            with safe_open(path, framework="pt") as file:
                rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
                total = int(file.metadata()[_TOTAL])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {first_line(error)}. Use another checkpoint.") from error
        self._rows, self._head, self._filled, self.total = {}, 0, 0, total
        if rows:
            self._append(rows)

    def _pieces(self, t: Trajectory) -> dict[str, Tensor]:
        """The rows that a rollout adds."""
        if t.actions is None or t.unacted_inputs is None or t.unacted_rows is None:
            raise ValueError("a replay buffer needs trajectories with executed actions and the states that follow")
        steps, members, _ = t.valid.shape
        taken = t.valid.any(-1).T  # [N,T], as all below
        unacted = t.unacted_rows.T
        goes_on = torch.cat([taken[:, 1:], torch.zeros(members, 1, dtype=torch.bool)], 1)
        chunk, member = torch.arange(steps), torch.arange(members)[:, None]
        here = (chunk * members + member).expand(members, steps)
        later = torch.where(unacted < 0, here + members, (steps + unacted) * members + member)
        # A chunk's state, and after it the state that follows, unless the next chunk begins with it.
        kept = torch.stack([taken, taken & ((unacted >= 0) | ~goes_on)], -1)
        index = torch.stack([here, later], -1)[kept]
        acted = torch.stack([taken, torch.zeros_like(taken)], -1)[kept]
        rewards, discounts = chunk_outcomes(t.rewards, t.valid, t.terminated, gamma=self._gamma)
        # Rows without a chunk have those of some other.
        decided = torch.where(acted, index, 0)
        rows = {
            _INPUTS + name: torch.cat([tensor.flatten(0, 1), t.unacted_inputs[name].flatten(0, 1)]).index_select(
                0, index
            )
            for name, tensor in t.replay_inputs.items()
            if name not in self._left_out
        }
        for name, tensor in {"actions": t.actions, "rewards": rewards, "discounts": discounts}.items():
            rows[name] = tensor.flatten(0, 1)[decided]
        return rows | {"acted": acted}

    def _append(self, rows: Mapping[str, Tensor]) -> None:
        count = len(rows["acted"])
        kept = min(count, self._capacity)
        if not self._rows:
            self._rows = {name: t.new_zeros((self._capacity, *t.shape[1:])) for name, t in rows.items()}
        places = (self._head + torch.arange(kept)) % self._capacity
        for name, tensor in rows.items():
            self._rows[name][places] = tensor[count - kept :]
        self._head = (self._head + kept) % self._capacity
        self._filled = min(self._filled + kept, self._capacity)
        order = self._order()
        self._acted = order[self._rows["acted"][order]]

    def _order(self) -> Tensor:
        """[filled] int64: the rows that are in use, the oldest first."""
        return (self._head - self._filled + torch.arange(self._filled)) % self._capacity
