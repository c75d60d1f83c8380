"""The way of a version of the weights from the actor to the rollout workers.

The actor gathers one tensor at a time and sends buckets of bounded size; a receiver copies each bucket into its policy
at once and drops it. So neither side ever holds the weights a second time. Between the first bucket and the end a
receiver's policy is a mixture of two versions, and :attr:`WeightReceiver.version`, which whoever uses the policy asks
first, raises: what is served is one version, always. Where a sender fails in between, the receiver serves nothing.

After a first whole version only tensors that can change travel: those that are trained, and buffers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from embodied_rl.contracts import TensorLayout, WeightBucket, WeightPiece, WeightsBegin, WeightsEnd
from embodied_rl.errors import WeightSyncError, listed
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.folder import misfits
from embodied_rl.training.sharding import is_distributed

T = TypeVar("T")

Message = WeightsBegin | WeightBucket | WeightsEnd

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
"""Types that ``actor.sync_dtype`` applies to; integers and float64 travel as they are."""
_SHOWN = 8
"""Tensors that a message lists."""


class SendsWeights(Protocol):
    """What a sender needs of a channel."""

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None: ...


class ReceivesWeights(Protocol):
    """What a receiver needs of a channel."""

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any: ...

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T: ...

    def depth(self) -> Mapping[Hashable, int]: ...


class WeightSender:
    """The actor's side: all its ranks have one and call it together.

    Args:
        receivers: keys of those who get each version; none on ranks other than 0.
        bucket_bytes: how much travels at once.
        dtype: what floating-point tensors are converted to on the way; None leaves them as they are.
        device: where a bucket is put together.
        verify: send checksums of the whole state with every version.
        report_progress: told how many tensors have been sent.
    """

    def __init__(
        self,
        policy: Policy,
        channel: SendsWeights,
        receivers: Sequence[Hashable],
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        verify: bool = False,
        report_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        self._policy, self._channel, self._receivers = policy, channel, tuple(receivers)
        self._bucket_bytes, self._dtype, self._device, self._verify = bucket_bytes, dtype, device, verify
        self._report_progress = report_progress
        self._last: int | None = None
        self._frozen: frozenset[str] = frozenset()

    def restart(self) -> None:
        """Send everything with the next version, since frozen weights have changed, too."""
        self._last = None

    async def send(self, version: int) -> int:
        """Give every receiver this version (a collective); returns the bytes that each of them got."""
        state = _tensors(self._policy.state_dict())
        parameters = self._policy.named_parameters(remove_duplicate=False)
        frozen = frozenset(name for name, parameter in parameters if not parameter.requires_grad)
        # What was not frozen at the last version may have been trained since.
        unchanged = self._frozen & frozen if self._last is not None else frozenset[str]()
        layouts = {name: self._layout(tensor) for name, tensor in state.items() if name not in unchanged}
        since, self._last = self._last, None  # a failure from here on leaves receivers without a whole version
        await self._put(WeightsBegin(version=version, since=since, tensors=layouts))
        packer, checksums = _Packer(version, self._bucket_bytes), dict[str, int]()
        for number, (name, tensor) in enumerate(state.items()):
            self._report_progress("weight sync", number, len(state))
            if name in unchanged and not self._verify:
                continue
            whole = _gather(tensor)
            if not self._receivers:
                continue
            values = whole.to(self._device, self._layout(tensor).dtype).contiguous().view(-1)
            if self._verify:
                checksums[name] = _checksum(values.cpu())
            if name not in unchanged:
                for bucket in packer.add(name, values):
                    await self._put(bucket)
        for bucket in packer.rest():
            await self._put(bucket)
        await self._put(
            WeightsEnd(version=version, buckets=packer.buckets, checksums=checksums if self._verify else None)
        )
        self._last, self._frozen = version, frozen
        return packer.nbytes

    def _layout(self, tensor: Tensor) -> TensorLayout:
        dtype = self._dtype if self._dtype is not None and tensor.dtype in _CONVERTED else tensor.dtype
        return TensorLayout(shape=tuple(tensor.shape), dtype=dtype)

    async def _put(self, message: Message) -> None:
        await self._channel.put_all(message, keys=self._receivers)


class _Packer:
    """Cuts tensors into pieces that fill buckets."""

    def __init__(self, version: int, bucket_bytes: int) -> None:
        self._version, self._bucket_bytes = version, bucket_bytes
        self._pieces: list[WeightPiece] = []
        self._filled = 0
        self.buckets = 0
        self.nbytes = 0

    def add(self, name: str, values: Tensor) -> Iterator[WeightBucket]:
        """The buckets that a flat tensor fills up. A bucket is as large as a tensor's element at the least."""
        start = 0
        while start < len(values):
            room = (self._bucket_bytes - self._filled) // values.itemsize
            if room == 0 and self._pieces:
                yield from self.rest()
                continue
            piece = WeightPiece(name=name, start=start, values=values[start : start + max(room, 1)])
            self._pieces.append(piece)
            start += len(piece.values)
            self._filled += piece.values.nbytes
        if self._filled >= self._bucket_bytes:
            yield from self.rest()

    def rest(self) -> Iterator[WeightBucket]:
        """A last bucket of what is left, if anything is."""
        if self._pieces:
            yield WeightBucket(version=self._version, number=self.buckets, pieces=tuple(self._pieces))
            self.buckets += 1
            self.nbytes += self._filled
            self._pieces, self._filled = [], 0


class WeightReceiver:
    """A rollout worker's side.

    Args:
        target: the policy's state, whose tensors are written to.
        key: this receiver's.

    Raises:
        WeightSyncError: a tensor is not contiguous.
    """

    def __init__(self, target: Mapping[str, Tensor], channel: ReceivesWeights, key: Hashable) -> None:
        self._target, self._channel, self._key = _tensors(target), channel, key
        self._dtypes: dict[str, torch.dtype] = {}
        """In which each tensor travelled last."""
        self._version: int | None = None
        self._arriving: int | None = None
        for name, tensor in self._target.items():
            if not tensor.is_contiguous():
                raise WeightSyncError(f"{name}: got a tensor with strides {tensor.stride()}, expected a contiguous one")

    @property
    def version(self) -> int:
        """Version of the weights in the policy. Raises as :meth:`require_complete`."""
        self.require_complete()
        assert self._version is not None
        return self._version

    def require_complete(self) -> None:
        """Go on only if the policy may be used.

        Raises:
            WeightSyncError: it has no weights yet, or some of two versions.
        """
        if self._arriving is not None:
            raise WeightSyncError(f"version {self._arriving} of the weights is not complete, so there is none to use")
        if self._version is None:
            raise WeightSyncError("the policy has no weights yet; they come with load_weights")

    @property
    def waiting(self) -> bool:
        """Whether a version is on its way, so that :meth:`receive` does not wait for the actor to send one."""
        return self._channel.depth().get(self._key, 0) > 0

    async def receive_until(self, version: int) -> bool:
        """Take versions until this one is there; returns whether that took any. Raises as :meth:`receive`."""
        held = self._version
        while self._version is None or self._version < version:
            await self.receive()
        return self._version != held

    async def receive(self) -> int:
        """Take the next version; returns it.

        Raises:
            WeightSyncError: it does not fit this policy, or is incomplete, or is not what was sent.
        """
        begin = await self._channel.get(key=self._key)
        if not isinstance(begin, WeightsBegin):
            raise WeightSyncError(f"got {_shown(begin)}, expected a version's beginning")
        self._check_begin(begin)
        self._arriving = begin.version
        self._dtypes |= {name: layout.dtype for name, layout in begin.tensors.items()}
        arrival = _Arrival(begin, self._target)
        # Copied straight from the channel's memory into the policy.
        while (end := await self._channel.read(arrival.take, key=self._key)) is None:
            pass
        if end.checksums is not None:
            self._check_sums(end.version, end.checksums)
        self._version, self._arriving = begin.version, None
        return begin.version

    def _check_begin(self, begin: WeightsBegin) -> None:
        """Refuse what does not fit before anything is written."""
        travelling = begin.tensors
        # A version after the first brings a part.
        own = {name: t for name, t in self._target.items() if begin.since is None or name in travelling}
        problems = misfits(
            {name: tensor.shape for name, tensor in own.items()},
            {name: layout.shape for name, layout in travelling.items()},
        )
        if begin.since is not None and begin.since != self._version:
            problems.append(f"it is what changed since version {begin.since}, and this policy has {self._version}")
        problems += [
            f"{name} is {travelling[name].dtype}, which {tensor.dtype} does not hold exactly"
            for name, tensor in own.items()
            if name in travelling and torch.promote_types(travelling[name].dtype, tensor.dtype) != tensor.dtype
        ]
        if problems:
            raise WeightSyncError(
                f"version {begin.version} does not fit this policy: {listed(sorted(problems), _SHOWN)}"
            )

    def _check_sums(self, version: int, checksums: Mapping[str, int]) -> None:
        """Compare what the policy has now, frozen tensors included, with what the actor has."""
        differing = [
            name
            for name, tensor in self._target.items()
            if _checksum(tensor.to("cpu", self._dtypes[name]).view(-1)) != checksums.get(name)
        ]
        if differing:
            raise WeightSyncError(
                f"version {version}: {len(differing)} of {len(self._target)} tensors are not what the actor sent "
                f"(actor.verify_weight_sync): {listed(sorted(differing), _SHOWN)}"
            )


class _Arrival:
    """A version on its way into the policy."""

    def __init__(self, begin: WeightsBegin, target: Mapping[str, Tensor]) -> None:
        self._begin, self._target = begin, target
        self._done = dict.fromkeys(begin.tensors, 0)
        """Elements of each tensor that are there."""
        self._buckets = 0

    def take(self, message: object) -> WeightsEnd | None:
        """Write a bucket; the end is returned.

        Raises:
            WeightSyncError: it is not the message that must come now.
        """
        if getattr(message, "version", None) != self._begin.version:
            raise WeightSyncError(f"got {_shown(message)} in the middle of version {self._begin.version}")
        if isinstance(message, WeightBucket) and message.number == self._buckets:
            for piece in message.pieces:
                self._write(piece)
            self._buckets += 1
            return None
        if not isinstance(message, WeightsEnd) or message.buckets != self._buckets:
            raise WeightSyncError(f"got {_shown(message)} after {self._buckets} buckets: something was lost on the way")
        layouts = self._begin.tensors
        lacking = [name for name, count in self._done.items() if count != torch.Size(layouts[name].shape).numel()]
        if lacking:
            raise WeightSyncError(f"version {message.version} ended without parts of {listed(sorted(lacking), _SHOWN)}")
        return message

    def _write(self, piece: WeightPiece) -> None:
        name, end = piece.name, piece.start + len(piece.values)
        dtype = self._begin.tensors[name].dtype if name in self._done else None
        if dtype != piece.values.dtype or piece.start != self._done[name]:
            raise WeightSyncError(
                f"version {self._begin.version}: got {name}[{piece.start}:{end}] in {piece.values.dtype}, expected "
                + (f"it from {self._done[name]} on, in {dtype}" if dtype else "no such tensor")
            )
        self._target[name].view(-1)[piece.start : end].copy_(piece.values)
        self._done[name] = end


def _tensors(state: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _gather(tensor: Tensor) -> Tensor:
    """The whole tensor, from all ranks. With one rank it is the parameter itself."""
    if not is_distributed(tensor):
        return tensor
    if tensor.device_mesh.size() == 1:  # some microseconds of bookkeeping less for each tensor
        return tensor.to_local()
    mesh_device = tensor.device_mesh.device_type
    if tensor.device.type != mesh_device:  # offloaded
        tensor = tensor.to(mesh_device)
        assert is_distributed(tensor)
    return tensor.full_tensor()


def _checksum(values: Tensor) -> int:
    """CRC-32 of a flat tensor's bytes."""
    return zlib.crc32(values.view(torch.uint8).numpy().data)


def _shown(message: object) -> str:
    version = getattr(message, "version", None)
    number = f" {message.number}" if isinstance(message, WeightBucket) else ""
    return f"{type(message).__name__}{number}" + ("" if version is None else f" of version {version}")
