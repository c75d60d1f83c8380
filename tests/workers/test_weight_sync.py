from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.channel.base import run_blocking
from embodied_rl.channel.in_process import InProcessChannel, Scheduler
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from embodied_rl.contracts import ContractError, WeightBucket, WeightPiece, WeightsBegin, WeightsEnd
from embodied_rl.errors import WeightSyncError
from embodied_rl.runtime import signals
from embodied_rl.training.sharding import shard
from embodied_rl.workers.weight_sync import WeightReceiver, WeightSender
from tests.gathered import full_state_dict
from tests.training.learner import training_config
from tests.training.ranks import Ranks
from tests.training.rollouts import small_policy

BUCKET = 300
"""Bytes: some tensors fit in with others, some need several buckets."""


def sharded(mesh: DeviceMesh, *, seed: int = 0) -> Any:
    policy = small_policy(1, seed=seed)
    shard(policy, mesh, training_config("ppo").actor.fsdp_config)
    return policy


def fill(policy: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)


class Pair:
    """An actor's policy and a rollout worker's, in this process."""

    def __init__(self, mesh: DeviceMesh, *, intercept: Callable[[Any], Any] = lambda message: message, **options: Any):
        self.policy, self.served = sharded(mesh), small_policy(1, seed=1)
        self.messages: list[Any] = []
        self.channel = channel = InProcessChannel("weights", 2)
        put = channel.put

        async def spied(item: Any, **where: Any) -> None:
            self.messages.append(item)
            if (item := intercept(item)) is not None:
                await put(item, **where)

        channel.put = spied  # type: ignore[method-assign]
        self.progress: list[tuple[str, int, int]] = []
        options = {"report_progress": lambda *report: self.progress.append(report), "bucket_bytes": BUCKET, **options}
        self.sender = WeightSender(self.policy, channel, (0,), **options)
        self.receiver = WeightReceiver(self.served.state_dict(), channel, 0)
        self.scheduler = Scheduler()

    def sync(self, version: int) -> int:
        """Returns the bytes that travelled."""
        sent = self.scheduler.add("actor", self.sender.send(version))
        self.scheduler.run_until(self.scheduler.add("rollout", self.receiver.receive()))
        self.scheduler.run_until(sent)
        return sent.result

    def equal(self, dtype: torch.dtype = torch.float32) -> bool:
        served = self.served.state_dict()
        whole = full_state_dict(self.policy)
        assert whole.keys() == served.keys()
        return all(torch.equal(whole[name].to(dtype).float(), served[name]) for name in whole)

    @property
    def lane(self) -> Any:
        """What is on its way."""
        return self.channel._lanes[0]

    @property
    def buckets(self) -> list[WeightBucket]:
        return [message for message in self.messages if isinstance(message, WeightBucket)]


def test_every_tensor_is_a_sign_of_life(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    pair.sync(0)
    count = len(pair.served.state_dict())
    assert pair.progress == [("weight sync", number, count) for number in range(count)]


def test_a_version_arrives_in_buckets_of_bounded_size(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    assert not pair.equal()
    total = pair.sync(3)
    assert pair.equal()
    assert pair.receiver.version == 3
    sizes = [sum(piece.values.nbytes for piece in bucket.pieces) for bucket in pair.buckets]
    assert total == sum(sizes) == sum(t.nbytes for t in pair.served.state_dict().values())
    assert max(sizes) <= BUCKET
    assert len(sizes) == -(-total // BUCKET), "full ones, and the rest"
    assert [bucket.number for bucket in pair.buckets] == list(range(len(sizes)))


@pytest.mark.parametrize("bucket_bytes", [1, 4, 7, 1000, 10**9])
def test_any_bucket_size_gives_the_same_weights(mesh: DeviceMesh, bucket_bytes: int) -> None:
    pair = Pair(mesh, bucket_bytes=bucket_bytes)
    pair.sync(1)
    assert pair.equal()


def test_what_is_served_is_never_a_mixture(mesh: DeviceMesh) -> None:
    """A reader that looks after every message finds one whole version, or is told that there is none."""
    pair = Pair(mesh)
    fill(pair.policy, 0.0)
    pair.sync(0)
    seen, refused = set(), 0
    for version in range(1, 4):
        fill(pair.policy, float(version))
        sent = pair.scheduler.add("actor", pair.sender.send(version))
        received = pair.scheduler.add("rollout", pair.receiver.receive())
        while not received.done:
            for task in pair.scheduler.tasks:
                if task.waiting is None or task.waiting.ready():
                    task.advance()
                assert task.error is None
                if pair.receiver._arriving is not None:
                    with pytest.raises(WeightSyncError, match=f"version {version} of the weights is not complete"):
                        pair.receiver.require_complete()
                    refused += 1
                else:
                    served = pair.receiver.version
                    values = torch.cat([tensor.flatten() for tensor in pair.served.state_dict().values()])
                    assert values.unique().tolist() == [float(served)]
                    seen.add(served)
            pair.scheduler.tasks = [task for task in pair.scheduler.tasks if not task.done]
        assert sent.done
    assert seen == {0, 1, 2, 3}
    assert refused > 3, "it did look in between"


def test_a_sender_that_fails_leaves_nothing_to_serve_until_a_whole_version_comes(mesh: DeviceMesh) -> None:
    failing = True

    def intercept(message: Any) -> Any:
        if failing and isinstance(message, WeightBucket) and message.version == 1 and message.number == 2:
            raise RuntimeError("the actor died")
        return message

    pair = Pair(mesh, intercept=intercept)
    pair.sync(0)
    with pytest.raises(RuntimeError, match="the actor died"):
        pair.sync(1)
    with pytest.raises(WeightSyncError, match="version 1 of the weights is not complete, so there is none to use"):
        pair.receiver.require_complete()
    pair.scheduler.cancel()
    pair.lane.clear()
    failing = False
    pair.sync(2)
    assert pair.messages[-1].version == 2
    assert next(m for m in reversed(pair.messages) if isinstance(m, WeightsBegin)).since is None
    assert pair.receiver.version == 2


def test_a_policy_without_weights_is_not_used(mesh: DeviceMesh) -> None:
    with pytest.raises(WeightSyncError, match="has no weights yet"):
        _ = Pair(mesh).receiver.version


def corrupted(message: Any) -> Any:
    """One bit of the third bucket is wrong."""
    if not isinstance(message, WeightBucket) or message.number != 2:
        return message
    [first, *rest] = message.pieces
    values = first.values.clone()
    values.view(torch.uint8)[0] ^= 1
    return replace(message, pieces=(replace(first, values=values), *rest))


def test_checksums_find_a_corrupted_bucket(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, verify=True, intercept=corrupted)
    with pytest.raises(WeightSyncError, match=r"version 5: 1 of \d+ tensors are not what the actor sent"):
        pair.sync(5)
    with pytest.raises(WeightSyncError, match="version 5 of the weights is not complete"):
        _ = pair.receiver.version
    unnoticed = Pair(mesh, intercept=corrupted)
    unnoticed.sync(5)
    assert not unnoticed.equal()
    sound = Pair(mesh, verify=True)
    sound.sync(5)
    assert sound.equal()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_on_their_way(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    pair, plain = Pair(mesh, dtype=dtype, verify=True), Pair(mesh)
    assert pair.sync(1) == plain.sync(1) // 2
    assert pair.equal(dtype)
    assert not pair.equal()


def test_a_policy_that_cannot_hold_what_travels_refuses_it(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    half = {name: tensor.bfloat16() for name, tensor in pair.served.state_dict().items()}
    pair.receiver = WeightReceiver(half, pair.channel, 0)
    with pytest.raises(WeightSyncError, match=r"is torch.float32, which torch.bfloat16 does not hold exactly"):
        pair.sync(1)


def test_another_policy_is_refused_before_anything_is_written(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    other = small_policy(0, hidden_size=8)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    pair.receiver = WeightReceiver(other.state_dict(), pair.channel, 0)
    with pytest.raises(WeightSyncError, match=r"version 1 does not fit this policy: .*log_std|policy.0.bias is \[16\]"):
        pair.sync(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_after_the_first_version_only_what_is_trained_travels(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, verify=True)
    parameters = dict(pair.policy.named_parameters())
    trained = "policy.2.weight"
    pair.policy.requires_grad_(False)
    parameters[trained].requires_grad_(True)
    whole = pair.sync(0)
    with torch.no_grad():
        parameters[trained].fill_(0.25)
    begin = len(pair.messages)
    part = pair.sync(1)
    assert pair.equal()
    assert pair.receiver.version == 1
    assert list(pair.messages[begin].tensors) == [trained]
    assert part == dict(pair.served.named_parameters())[trained].nbytes < whole
    fill(pair.policy, 3.0)  # as a checkpoint that is loaded does
    pair.sender.restart()
    assert pair.sync(2) == whole
    assert pair.equal()


def test_a_tensor_that_was_trained_until_now_travels_once_more(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    pair.sync(0)
    fill(pair.policy, 2.0)
    pair.policy.requires_grad_(False)
    pair.sync(1)
    assert pair.equal()
    assert pair.sync(2) == 0
    assert pair.receiver.version == 2


def test_frozen_weights_that_changed_all_the_same_are_found(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, verify=True)
    pair.policy.requires_grad_(False)
    pair.sync(0)
    fill(pair.policy, 7.0)
    with pytest.raises(WeightSyncError, match="are not what the actor sent"):
        pair.sync(1)


def test_a_partial_version_needs_the_one_before(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    pair.policy.requires_grad_(False)
    pair.sync(0)
    sent = pair.scheduler.add("actor", pair.sender.send(1))
    pair.scheduler.run_until(sent)
    pair.lane.clear()  # version 1 is lost
    with pytest.raises(WeightSyncError, match="what changed since version 1, and this policy has 0"):
        pair.sync(2)
    assert pair.receiver.version == 0, "refused before anything was written"


@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (lambda m: isinstance(m, WeightBucket) and m.number == 1, "got WeightBucket 2 of version 1 after 1 buckets"),
        (lambda m: isinstance(m, WeightsBegin), "got WeightBucket 0 of version 1, expected a version's beginning"),
    ],
)
def test_lost_messages_are_noticed(mesh: DeviceMesh, lose: Callable[[Any], bool], message: str) -> None:
    pair = Pair(mesh, intercept=lambda m: None if lose(m) else m)
    with pytest.raises(WeightSyncError, match=message):
        pair.sync(1)


def test_pieces_and_versions_are_checked_where_they_are_made() -> None:
    with pytest.raises(ContractError, match=r"WeightPiece.values: got shape \[2, 2\]"):
        WeightPiece(name="x", start=0, values=torch.zeros(2, 2))
    with pytest.raises(ContractError, match="got version -1"):
        WeightsBegin(version=-1, since=None, tensors={})


def gathered(mesh: DeviceMesh) -> dict[str, Tensor] | None:
    """What rank 0 sends of a policy that two ranks share."""
    policy = sharded(mesh)
    sent: list[Any] = []

    class Channel:
        async def put_all(self, item: Any, *, keys: Sequence[Any]) -> None:
            sent.extend((key, item) for key in keys)

    receivers = (0, 1) if mesh.get_rank() == 0 else ()
    run_blocking(WeightSender(policy, Channel(), receivers, bucket_bytes=BUCKET, verify=True).send(0))  # type: ignore[arg-type]
    if not receivers:
        assert not sent
        return None
    assert [key for key, _ in sent] == [0, 1] * (len(sent) // 2), "each message goes to both, from one gather"
    pieces: dict[str, list[Tensor]] = {}
    for key, message in sent:
        if key == 1 and isinstance(message, WeightBucket):
            for piece in message.pieces:
                pieces.setdefault(piece.name, []).append(piece.values.clone())
    assert isinstance(sent[-1][1], WeightsEnd)
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def test_two_ranks_gather_what_each_has(two_ranks: Ranks) -> None:
    whole, nothing = two_ranks.run(gathered)
    expected = small_policy(1).state_dict()
    assert nothing is None
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name].flatten()) for name in whole)


def serve(channel: SharedMemoryChannel, pipe: Connection) -> None:
    """A rollout worker's process: says what it holds after every version."""
    torch.set_num_threads(1)
    policy = small_policy(1, seed=1)
    receiver = WeightReceiver(policy.state_dict(), channel, 0)
    while pipe.recv():
        version = run_blocking(receiver.receive())
        values = torch.cat([tensor.flatten() for tensor in policy.state_dict().values()])
        pipe.send((version, values.unique().tolist()))
    signals.leave()


def test_versions_cross_processes(mesh: DeviceMesh) -> None:
    spawn = mp.get_context("spawn")
    channel = SharedMemoryChannel("weights", (0,), 2, spawn)
    ours, theirs = spawn.Pipe()
    worker = spawn.Process(target=serve, args=(channel, theirs), daemon=True)
    worker.start()
    try:
        policy = sharded(mesh)
        sender = WeightSender(policy, channel, (0,), bucket_bytes=BUCKET, verify=True)
        for version in range(20):
            ours.send(True)
            fill(policy, float(version))
            run_blocking(sender.send(version))
            assert ours.recv() == (version, [float(version)])
        ours.send(False)
        worker.join(30)
        assert worker.exitcode == 0
    finally:
        worker.kill()
