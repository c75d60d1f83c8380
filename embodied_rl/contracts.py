"""Every message between workers.

Letters in shapes: N envs of one pipeline stage, C steps in a chunk, T chunks in a rollout, A action dimensions,
S state dimensions, V values per chunk (1 at chunk level, C at action level), B flat samples.

All messages are frozen. Constructors check shapes and dtypes and say what they got and what they expected; they never
move a tensor to another device and never copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAMPLE_ID_ROOM = 1 << 20
"""Envs, and chunks per rollout, that sample ids have room for."""


class ContractError(ValueError):
    """A message whose shape or dtype is not what its consumer expects."""


def _check(owner: object, name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None) -> None:
    """Raise unless ``tensor`` has ``shape`` (None matches any size) and ``dtype`` (None matches any)."""
    got = tuple(tensor.shape)
    if dtype is None or dtype is tensor.dtype:
        if got == shape:
            return
        if len(got) == len(shape) and all(want in (None, size) for size, want in zip(got, shape, strict=True)):
            return
    expected = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
    raise ContractError(
        f"{type(owner).__name__}.{name}: got shape {list(tensor.shape)} {tensor.dtype}, expected {expected}"
        + (f" {dtype}" if dtype else "")
    )


def _changed(message: Any, change: Callable[[Tensor], Tensor], *, without: Collection[str] = ()) -> dict[str, Any]:
    """The fields of ``message``, but ``without``, with ``change`` applied to their tensors; None stays None."""
    found: dict[str, Any] = {}
    for name in {field.name for field in fields(message)} - set(without):
        value = getattr(message, name)
        if isinstance(value, Mapping):
            found[name] = {key: change(tensor) for key, tensor in value.items()}
        else:
            found[name] = None if value is None else change(value)
    return found


def _check_leading(owner: object, name: str, tensors: Mapping[str, Tensor], *sizes: int) -> None:
    for key, tensor in tensors.items():
        if tuple(tensor.shape[: len(sizes)]) != sizes:
            raise ContractError(
                f"{type(owner).__name__}.{name}[{key!r}]: got shape {list(tensor.shape)}, "
                f"expected it to start with {list(sizes)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvObs:
    """What the policy sees. Producer: env worker. Consumer: rollout worker, then the policy's ``act``.

    Example: four LIBERO envs give ``images={"agentview": [4,128,128,3], "wrist": [4,128,128,3]}``, ``state`` [4,8].
    """

    env_ids: Tensor
    """[N] int64, the env's index over all workers and stages, starting at 0."""
    images: Mapping[str, Tensor]
    """Camera name -> [N,H,W,3] uint8, upright RGB. Empty for state-only envs."""
    state: Tensor
    """[N,S] float32 proprioception (metres, radians), or the whole state for state-only envs."""
    instructions: tuple[str, ...]
    """N task descriptions in natural language."""

    def __post_init__(self) -> None:
        _check(self, "env_ids", self.env_ids, (None,), torch.int64)
        n = len(self.env_ids)
        _check(self, "state", self.state, (n, None), torch.float32)
        for camera, image in self.images.items():
            _check(self, f"images[{camera!r}]", image, (n, None, None, 3), torch.uint8)
        if len(self.instructions) != n:
            raise ContractError(f"EnvObs.instructions: got {len(self.instructions)} texts for {n} envs")

    def __len__(self) -> int:
        return self.env_ids.shape[0]

    def rows(self, which: slice) -> EnvObs:
        """Some of the envs."""
        return EnvObs(
            env_ids=self.env_ids[which],
            images={camera: image[which] for camera, image in self.images.items()},
            state=self.state[which],
            instructions=self.instructions[which],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[EnvObs]) -> EnvObs:
        """The observations of all ``parts``, of which there is at least one."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            env_ids=torch.cat([part.env_ids for part in parts]),
            images={camera: torch.cat([part.images[camera] for part in parts]) for camera in parts[0].images},
            state=torch.cat([part.state for part in parts]),
            instructions=tuple(text for part in parts for text in part.instructions),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStart:
    """One stage's first turn of a rollout. Producer: env worker. Consumer: rollout worker, which answers with an
    :class:`ActionChunk`."""

    obs: EnvObs
    """The first observations to act on."""
    group_ids: Tensor | None = None
    """[E,N] int64, as in :class:`Trajectory`, of the rollout epochs that are played at a stretch; None: nothing is
    recorded, as in evaluations."""
    rollout_epoch: int = 0
    """The first of them, as in :class:`Trajectory`."""

    def __post_init__(self) -> None:
        if self.group_ids is not None:
            _check(self, "group_ids", self.group_ids, (None, len(self.obs)), torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """One stage's further turn: what C simulator steps did, and what to act on next. Producer: ``envs/chunked.py``.
    Consumer: rollout worker, which answers with an :class:`ActionChunk`, unless this turn is the last."""

    rewards: Tensor
    """[N,C] float32; 0 where not valid."""
    terminated: Tensor
    """[N,C] bool: the episode ended at this step by success or failure."""
    truncated: Tensor
    """[N,C] bool: the episode ended at this step by its horizon, not by the task."""
    valid: Tensor
    """[N,C] bool: the step was taken, that is, up to and including the first done of the episode."""
    success: Tensor
    """[N,C] bool: the goal holds after this step; False where not valid."""
    task_ids: Tensor
    """[N] int64: the tasks of the episodes that the steps are of."""
    next_obs: EnvObs | None
    """What the policy sees next; of a new episode where the env was reset at the chunk's end. None: the turn is the
    last, and nobody asks for the value of where it led."""
    final_obs: EnvObs | None
    """Last observations of the episodes that ended and were reset (a subset of the envs), or None."""
    last: bool = False
    """The rollout ends here: no action is wanted."""
    episodes: Tensor | None = None
    """[N] int64: the numbers of the episodes that the steps are of, where envs play several epochs' at a stretch:
    episode ``e N + i`` is that of env i in the e-th epoch, whichever env of the lane plays it. None: each plays its
    own."""

    def __post_init__(self) -> None:
        n = None if self.next_obs is None else len(self.next_obs)
        _check(self, "rewards", self.rewards, (n, None), torch.float32)
        for name in ("terminated", "truncated", "valid", "success"):
            _check(self, name, getattr(self, name), tuple(self.rewards.shape), torch.bool)
        _check(self, "task_ids", self.task_ids, (len(self.rewards),), torch.int64)
        if self.episodes is not None:
            _check(self, "episodes", self.episodes, (len(self.rewards),), torch.int64)
        if self.next_obs is None and not self.last:
            raise ContractError("ChunkResult.next_obs: got None, expected observations unless the turn is the last")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnd:
    """A lane has no turn in this rollout. Producer: env worker. Consumer: rollout worker."""

    final: bool
    """No further rollout either: the rollout worker's ``serve`` ends when every lane has said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionChunk:
    """The policy's answer to a turn. Producer: rollout worker. Consumer: env worker."""

    env_ids: Tensor
    """[N] int64, equal to those of the turn."""
    actions: Tensor
    """[N,C,A] float32 in the policy's convention: [-1, 1], or the numbers of choices."""
    policy_version: int
    """Version of the weights that chose the actions."""

    def __post_init__(self) -> None:
        _check(self, "env_ids", self.env_ids, (None,), torch.int64)
        _check(self, "actions", self.actions, (len(self.env_ids), None, None), torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One stage's finished rollout, or the part of it one actor rank trains on.

    Producer: the worker that has the policy. Consumer: actor.

    Example: 10 chunks of 8 steps in 4 envs give ``rewards`` [10,4,8] and ``logprobs`` [10,4,8,7].
    """

    env_ids: Tensor
    """[N] int64."""
    group_ids: Tensor
    """[N] int64: envs of equal id started from the same state and form one GRPO group; unique in the training step."""
    rollout_epoch: int
    """Which of the training step's ``algorithm.rollout_epoch`` rollouts this is."""
    rewards: Tensor
    """[T,N,C] float32, scaled and shaped as the configuration says."""
    scores: Tensor
    """[N] float32: how well the task says that each member did, whatever its rewards are: 1 where an env's goal held at
    any step of the rollout, else 0; what the reward function gave a completion, without penalties. The group filter and
    imitation of the good look at it alone. NaN where nobody knows: such a member is valid nowhere."""
    terminated: Tensor
    """[T,N,C] bool."""
    truncated: Tensor
    """[T,N,C] bool."""
    valid: Tensor
    """[T,N,C] bool."""
    logprobs: Tensor
    """[T,N,C,A] float32."""
    values: Tensor | None
    """[T,N,V] float32."""
    bootstrap_values: Tensor | None
    """[T,N] float32: the value of the state that follows chunk t in the same episode (used unless it terminated)."""
    replay_inputs: Mapping[str, Tensor]
    """Each [T,N,...]."""
    policy_versions: Tensor
    """[T,N] int64, of the weights that decided on each chunk."""
    tokens: Tensor | None = None
    """[T,N,C,A] int64, the actions of a policy with discrete ones."""
    actions: Tensor | None = None
    """[T,N,C,A] float32, as executed; only for a replay buffer."""
    task_ids: Tensor | None = None
    """[T,N] int64: the task of the env's episode in chunk t; None: there are no tasks, as among prompts."""
    unacted_inputs: Mapping[str, Tensor] | None = None
    """Each [K,N,...], like ``replay_inputs``: states on which nobody acts, for a critic of its own to value, or for a
    replay buffer: the rollout's last and, with auto-reset, those of episodes that ended. Rows that a member lacks
    repeat another."""
    unacted_rows: Tensor | None = None
    """[T,N] int64: the row of ``unacted_inputs`` with the state that follows chunk t in the same episode; -1: chunk
    t + 1 begins with it."""
    proximal_logprobs: Tensor | None = None
    """[T,N,C,A] float32 under the weights that the update starts from. This and what follows is filled in by the
    actor's scoring pass, where the algorithm wants it."""
    reference_logprobs: Tensor | None = None
    """[T,N,C,A] float32 under the reference policy."""
    reference_kl: Tensor | None = None
    """[T,N,C,A] float32, the estimated divergence from the reference policy, for a penalty in the reward."""

    def __post_init__(self) -> None:
        _check(self, "rewards", self.rewards, (None, None, None), torch.float32)
        t, n, c = self.rewards.shape
        _check(self, "env_ids", self.env_ids, (n,), torch.int64)
        _check(self, "group_ids", self.group_ids, (n,), torch.int64)
        _check(self, "scores", self.scores, (n,), torch.float32)
        for name in ("terminated", "truncated", "valid"):
            _check(self, name, getattr(self, name), (t, n, c), torch.bool)
        _check(self, "logprobs", self.logprobs, (t, n, c, None), torch.float32)
        if self.values is not None:
            _check(self, "values", self.values, (t, n, None), torch.float32)
        if self.bootstrap_values is not None:
            _check(self, "bootstrap_values", self.bootstrap_values, (t, n), torch.float32)
        _check_leading(self, "replay_inputs", self.replay_inputs, t, n)
        _check(self, "policy_versions", self.policy_versions, (t, n), torch.int64)
        if self.tokens is not None:
            _check(self, "tokens", self.tokens, tuple(self.logprobs.shape), torch.int64)
        if self.actions is not None:
            _check(self, "actions", self.actions, tuple(self.logprobs.shape), torch.float32)
        if self.task_ids is not None:
            _check(self, "task_ids", self.task_ids, (t, n), torch.int64)
        if self.unacted_rows is not None and self.unacted_inputs is not None:
            _check(self, "unacted_rows", self.unacted_rows, (t, n), torch.int64)
            rows = int(self.unacted_rows.max()) + 1
            for key, tensor in self.unacted_inputs.items():
                if len(tensor) < rows or tensor.shape[1] != n:
                    raise ContractError(
                        f"Trajectory.unacted_inputs[{key!r}]: got shape {list(tensor.shape)}, expected {rows} rows or "
                        f"more of {n} members"
                    )
        for name in ("proximal_logprobs", "reference_logprobs", "reference_kl"):
            tensor = getattr(self, name)
            if tensor is not None:
                _check(self, name, tensor, tuple(self.logprobs.shape), torch.float32)

    def select(self, mask: Tensor) -> Trajectory | None:
        """The members where ``mask`` ([N] bool) is true, or None if there is none."""
        if not mask.any():
            return None
        if mask.all():
            return self
        index = mask.nonzero().squeeze(-1)
        # Indexing would copy pictures byte by byte.
        by_member = {name: getattr(self, name).index_select(0, index) for name in ("env_ids", "group_ids", "scores")}
        unchanged = (*by_member, "rollout_epoch")
        return replace(self, **by_member, **_changed(self, lambda t: t.index_select(1, index), without=unchanged))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A worker's part of a training step for one actor rank. Producer: the worker that has the policy. Consumer: that
    rank."""

    step: int
    """A worker that is ahead of others delivers for a later step before they have for this one."""
    trajectory: Trajectory | None
    """None: nothing of it is this rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Flat samples, one a chunk. Producer: the actor's advantage phase. Consumer: the actor's update and the losses.

    ``L`` is the log-probability level's trailing shape: [C,A] at token level, [C] at action level, [] at chunk level;
    ``advantages`` and ``loss_mask`` already have it, so the loss never broadcasts.
    """

    sample_ids: Tensor
    """[B] int64, the sample's place in the whole training step, the same for any number of actor ranks."""
    replay_inputs: Mapping[str, Tensor]
    """Each [B,...]."""
    logprobs: Tensor
    """[B,*L] float32 under the behaviour policy, summed to the log-probability level."""
    advantages: Tensor
    """[B,*L] float32."""
    loss_mask: Tensor
    """[B,*L] bool."""
    valid: Tensor
    """[B,C] bool: the steps that were taken."""
    values: Tensor | None
    """[B,V] float32 predictions at rollout time."""
    returns: Tensor | None
    """[B,V] float32 targets of the value head."""
    value_mask: Tensor | None
    """[B,V] bool."""
    policy_version: Tensor
    """[B] int64."""
    scores: Tensor
    """[B] float32, ``Trajectory.scores`` of the member that the sample is from."""
    proximal_logprobs: Tensor | None = None
    """[B,*L] float32 under the weights that the update starts from."""
    reference_logprobs: Tensor | None = None
    """[B,C,A] float32 under the reference policy; still a token each, where the divergence is estimated."""

    def __post_init__(self) -> None:
        _check(self, "sample_ids", self.sample_ids, (None,), torch.int64)
        b, shape = len(self.sample_ids), tuple(self.logprobs.shape)
        _check(self, "logprobs", self.logprobs, (b, *shape[1:]), torch.float32)
        _check(self, "advantages", self.advantages, shape, torch.float32)
        _check(self, "loss_mask", self.loss_mask, shape, torch.bool)
        _check(self, "valid", self.valid, (b, None), torch.bool)
        for name, dtype in (("values", torch.float32), ("returns", torch.float32), ("value_mask", torch.bool)):
            tensor = getattr(self, name)
            if tensor is not None:
                _check(self, name, tensor, (b, None), dtype)
        _check(self, "policy_version", self.policy_version, (b,), torch.int64)
        _check(self, "scores", self.scores, (b,), torch.float32)
        if self.proximal_logprobs is not None:
            _check(self, "proximal_logprobs", self.proximal_logprobs, shape, torch.float32)
        if self.reference_logprobs is not None:
            _check(self, "reference_logprobs", self.reference_logprobs, (b, None, None), torch.float32)
        _check_leading(self, "replay_inputs", self.replay_inputs, b)

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    @property
    def sequence_ids(self) -> Tensor:
        """[B] int64: samples of one rollout of an env, or of one completion, have the same."""
        return self.sample_ids // SAMPLE_ID_ROOM

    def trainable(self) -> Tensor:
        """[K] int64: the samples with a unit that counts."""
        return self.loss_mask.reshape(len(self), -1).any(1).nonzero().squeeze(-1)

    def to(self, device: str) -> TrainBatch:
        """The same samples on ``device``."""
        if self.sample_ids.device == torch.device(device):
            return self
        return replace(self, **_changed(self, lambda tensor: tensor.to(device)))

    def select(self, index: Tensor) -> TrainBatch:
        """The samples at ``index`` ([K] int64), in that order."""
        index = index.to(self.sample_ids.device)
        return replace(self, **_changed(self, lambda tensor: tensor.index_select(0, index)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """What the simulator takes and gives. Producer: env worker, once. Consumer: launch, to size the policy."""

    action_dim: int
    state_dim: int
    image_shapes: Mapping[str, tuple[int, int]]
    """Camera -> (height, width)."""
    action_choices: tuple[int, ...] = ()
    """Number of choices in each action dimension; empty: actions are continuous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """What a tensor of the policy's state looks like on its way."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBegin:
    """A version of the policy's weights follows. Producer: actor rank 0. Consumer: each rollout worker.

    Then come :class:`WeightBucket` messages, in order, and :class:`WeightsEnd`.
    """

    version: int
    since: int | None
    """None: everything travels. Else only what may have changed since this version, which the consumer must hold."""
    tensors: Mapping[str, TensorLayout]
    """All that travel, in the order in which they do."""

    def __post_init__(self) -> None:
        if self.version < 0 or (self.since is not None and not self.since >= 0):
            raise ContractError(f"WeightsBegin: got version {self.version} since {self.since}, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """A part of one tensor."""

    name: str
    start: int
    """First of its elements, counted in the flattened tensor."""
    values: Tensor
    """[*], on the CPU."""

    def __post_init__(self) -> None:
        _check(self, "values", self.values, (None,), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """A bounded part of a version of the weights."""

    version: int
    number: int
    """Of the version's buckets, from 0."""
    pieces: tuple[WeightPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsEnd:
    """A version of the weights is complete."""

    version: int
    buckets: int
    checksums: Mapping[str, int] | None
    """CRC-32 of every tensor of the state, as it travels or would travel; None: nobody checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """How one episode went. Producer: ``envs/chunked.py``. Consumer: step metrics and the success table."""

    env_id: int
    task_id: int
    instruction: str
    reset_state_id: int
    success: bool
    """Success at any step of the episode."""
    episode_return: float
    """Sum of the (scaled) rewards."""
    episode_length: int
    """Simulator steps."""
    max_reward: float | None = None
    """Largest (scaled) reward of a step; None: nobody kept it."""
    failed: bool = False
    """The simulator ended it before the horizon, without success."""
    suite: str = ""
    """The group of tasks that its task is of; empty: nobody kept it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEpisode(EpisodeRecord):
    """An episode of an evaluation, and where it can be seen. Producer: env worker. Consumer: ``eval.json``."""

    init_state: int
    """Number of the initial state within its task, from 0."""
    policy_version: int
    """Of the weights that acted."""
    video: Path | None
    """The file that shows it, if one does."""
    tile: int | None
    """Which tile of that video: row by row, from 0 at the top left."""
    box: tuple[int, int, int, int] | None = None
    """Where that tile is in the video's pictures: left, top, right, bottom in pixels, the last two exclusive."""
