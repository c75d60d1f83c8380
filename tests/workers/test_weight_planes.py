from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from embodied_rl.channel.base import ChannelClosed, run_blocking
from embodied_rl.channel.in_process import InProcessChannel, Scheduler
from embodied_rl.cli import config_of
from embodied_rl.contracts import TensorLayout, WeightBucket, WeightPiece, WeightsEnd
from embodied_rl.errors import ConfigError, WeightSyncError
from embodied_rl.launch import carry_out
from embodied_rl.runtime.placement import Placement
from embodied_rl.runtime.worker import WorkerContext
from embodied_rl.tasks.planning import placement_of, plan_of
from embodied_rl.tasks.rules import weight_plane
from embodied_rl.workers.weight_broadcast import host_of
from embodied_rl.workers.weight_buckets import Announcement
from embodied_rl.workers.weight_lending import LendingReceiver, LendingSender, Lent, Taken, answers_to
from embodied_rl.workers.weight_planes import receiving_end, sending_end
from embodied_rl.workers.weight_sync import WeightReceiver, WeightSender
from tests.configs import tiny_run
from tests.gathered import full_state_dict
from tests.test_end_to_end import metrics_of, only_run
from tests.training.ranks import Ranks
from tests.training.rollouts import small_policy
from tests.workers.test_weight_sync import BUCKET, fill, sharded
from tests.workers.weight_receivers import Workers

PLANES = ("collective", "cuda_ipc")
IPC = "actor.sync_backend=cuda_ipc"


@pytest.fixture(params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    return request.param


def test_versions_arrive_bit_for_bit(mesh: DeviceMesh, plane: str) -> None:
    """Every tensor of the first version, then only what is trained; both receivers verify the checksums of all."""
    workers, policy = Workers(plane), sharded(mesh)
    frozen = next(iter(policy.parameters()))
    frozen.requires_grad_(False)
    sender = workers.sender(policy, verify=True)
    try:
        sizes = []
        for version in range(3):
            workers.expect()
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.normal_()
            sizes.append(run_blocking(sender.send(version)))
            whole = full_state_dict(policy)
            for held, state in workers.held():
                assert held == version
                assert state.keys() == whole.keys()
                assert all(torch.equal(torch.from_numpy(state[name]), whole[name]) for name in whole)
        assert sizes[1] == sizes[2] == sizes[0] - frozen.nbytes
    finally:
        workers.end()


def test_weights_may_be_rounded(mesh: DeviceMesh, plane: str) -> None:
    workers, policy = Workers(plane, torch.bfloat16), sharded(mesh)
    try:
        workers.expect()
        fill(policy, 1.0 / 3.0)
        run_blocking(workers.sender(policy, dtype=torch.bfloat16).send(0))
        rounded = torch.tensor(1.0 / 3.0).bfloat16().float().item()
        for _, state in workers.held():
            assert {value for array in state.values() for value in array.ravel().tolist()} == {rounded}
    finally:
        workers.end()


def test_a_worker_that_is_gone_ends_the_broadcast(mesh: DeviceMesh) -> None:
    workers, policy = Workers("collective"), sharded(mesh)
    sender = workers.sender(policy)
    try:
        workers.expect()
        run_blocking(sender.send(0))
        workers.held()
        workers.processes[1].kill()
        workers.processes[1].join()
        workers.pipes[0].send(True)
        with pytest.raises(WeightSyncError, match="a worker is gone"):
            run_blocking(sender.send(1))
    finally:
        workers.end()


def test_who_lends_to_a_worker_that_is_gone_waits_until_the_channel_is_closed(mesh: DeviceMesh) -> None:
    """As the driver closes it."""
    workers, policy = Workers("cuda_ipc"), sharded(mesh)
    sender = workers.sender(policy)
    try:
        workers.expect()
        run_blocking(sender.send(0))
        workers.held()
        workers.processes[1].kill()
        workers.processes[1].join()
        workers.pipes[0].send(True)
        driver = threading.Timer(0.3, workers.channel.close, ["RolloutGroup[1] was killed"])
        driver.start()
        with pytest.raises(ChannelClosed, match=r"RolloutGroup\[1\] was killed"):
            run_blocking(sender.send(1))
    finally:
        workers.end()


class Lending:
    """A sender whose messages are looked at, and answered, by hand."""

    def __init__(self, bucket_bytes: int = 60, keys: tuple[int, ...] = (0, 1)) -> None:
        self.channel, self.keys = InProcessChannel("weights", 100), keys
        self.sender = LendingSender(self.channel, device="cpu", rank=0, bucket_bytes=bucket_bytes)
        self.scheduler = Scheduler()

    def put(self, *messages: Any) -> None:
        async def all_of_them() -> None:
            for message in messages:
                await self.sender.put_all(message, keys=self.keys)

        self.scheduler.add("actor", all_of_them())
        self.go_on()

    def go_on(self) -> None:
        """As far as the sender can."""
        for task in self.scheduler.tasks:
            while not task.done and (task.waiting is None or task.waiting.ready()):
                task.advance()
                assert task.error is None

    def taken(self, key: int) -> None:
        run_blocking(self.channel.put(Taken(receiver=key), key=answers_to(0)))
        self.go_on()

    def arrived(self, key: int) -> list[Any]:
        return [run_blocking(self.channel.get(key=key)) for _ in range(self.channel.depth().get(key, 0))]


def bucket(number: int, values: list[float]) -> WeightBucket:
    piece = WeightPiece(name="x", start=0, values=torch.tensor(values))
    return WeightBucket(version=0, number=number, pieces=(piece,))


def test_a_place_is_written_again_when_all_have_copied_what_is_in_it() -> None:
    lending = Lending()
    end = WeightsEnd(version=0, buckets=4, checksums=None)
    lending.put(*(bucket(number, [float(number)]) for number in range(4)), end)
    lent, *first = lending.arrived(0)
    assert isinstance(lent, Lent)
    assert [(message.number, message.at) for message in first] == [(0, 0), (1, 64)]
    receiver = LendingReceiver(lending.channel, device="cpu", lender=0)
    assert receiver._prepares(lent)
    values = [message.bucket(receiver._values(message)).pieces[0].values for message in first]
    assert [tensor.tolist() for tensor in values] == [[0.0], [1.0]]
    lending.taken(0)
    assert not lending.arrived(0), "the other still reads it"
    lending.taken(1)
    assert [(message.number, message.at) for message in lending.arrived(0)] == [(2, 0)]
    assert [tensor.tolist() for tensor in values] == [[2.0], [1.0]], "one memory"
    for key in (0, 1):
        lending.taken(key)
    assert [message.number for message in lending.arrived(0)] == [3]
    for key in (0, 1, 0):
        lending.taken(key)
    assert not lending.arrived(0), "the end comes when all have all of it"
    lending.taken(1)
    assert lending.arrived(0) == [end]


def test_a_bucket_that_is_too_large_gets_other_memory_when_the_old_is_read() -> None:
    """40 elements take 160 bytes, and 60, rounded up to 64, were expected."""
    lending = Lending(keys=(0,))
    lending.put(bucket(0, [1.0]), bucket(1, [0.5] * 40), bucket(2, [2.0]))
    assert [type(message) for message in lending.arrived(0)] == [Lent, Announcement]
    lending.taken(0)
    lent, second, third = lending.arrived(0)
    assert (second.at, third.at) == (160, 0), "bucket 1 is in place 1"
    receiver = LendingReceiver(lending.channel, device="cpu", lender=0)
    assert receiver._prepares(lent)
    assert second.bucket(receiver._values(second)).pieces[0].values.tolist() == [0.5] * 40
    assert third.bucket(receiver._values(third)).pieces[0].values.tolist() == [2.0]


def test_memory_of_another_device_is_refused() -> None:
    receiver = LendingReceiver(InProcessChannel("weights", 2), device="cpu", lender=0)
    with pytest.raises(
        WeightSyncError, match=r"got memory of cuda:0 \(GPU-1\), expected memory of cpu; have actor and"
    ):
        receiver._prepares(Lent(handle=b"", device="cuda:0 (GPU-1)"))
    with pytest.raises(WeightSyncError, match="before the memory that it is in"):
        receiver._values(Announcement(version=0, number=0, pieces=()))


def lent_by_each(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """What the rollout worker beside this actor rank holds, of a policy that two ranks share."""
    rank, channel, scheduler = mesh.get_rank(), InProcessChannel("weights", 2), Scheduler()
    way = LendingSender(channel, device="cpu", rank=rank, bucket_bytes=BUCKET)
    served = small_policy(1, seed=1)
    receiver = WeightReceiver(served.state_dict(), LendingReceiver(channel, device="cpu", lender=rank), rank)
    sender = WeightSender(sharded(mesh), way, (rank,), bucket_bytes=BUCKET, verify=True)
    sent = scheduler.add("actor", sender.send(0))
    scheduler.run_until(scheduler.add("rollout", receiver.receive()))
    scheduler.run_until(sent)
    return {name: tensor.clone() for name, tensor in served.state_dict().items()}


def test_each_actor_rank_lends_to_the_worker_beside_it(two_ranks: Ranks) -> None:
    expected = small_policy(1).state_dict()
    for held in two_ranks.run(lent_by_each):
        assert all(torch.equal(held[name], expected[name]) for name in expected)


def worker_context(group: str, rank: int, device: str) -> WorkerContext:
    return WorkerContext(group=group, rank=rank, world_size=2, device=device, num_threads=1, rendezvous="/nowhere")


class OneDevice(Placement):
    """All workers on one device, which on this machine is the CPU."""

    def accelerator(self, component: str, rank: int) -> tuple[int, str] | None:
        return 0, self.device(component, rank)


def test_a_run_whose_weights_are_lent(tmp_path: Path) -> None:
    """Two rollout workers, a part trained, rounded, and compared with the actor's after every version."""
    config = tiny_run(
        tmp_path,
        "cluster=process",
        "cluster.component_placement.rollout=0-1",
        "rollout.dtype=bfloat16",
        "actor.verify_weight_sync=true",
        "model.trainable={*:false,policy.4.*:true}",
        "runner.max_steps=2",
        "runner.eval_at_end=false",
    )
    plan = plan_of(config)
    placement = OneDevice(slots=plan.placement.slots, num_accelerators=0)
    carry_out(replace(plan, placement=placement, weight_plane="cuda_ipc"))
    assert len(metrics_of(only_run(config))) == 2


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def test_within_a_process_each_receiver_copies_what_the_actor_has(mesh: DeviceMesh) -> None:
    """Two receivers; of a tensor that is whole and not rounded the values are the parameter's own."""
    channel, scheduler, policy = InProcessChannel("weights", 2), Scheduler(), sharded(mesh)
    plan = plan_of(config_of("env=dummy", "cluster=serial", "actor.sync_backend=auto"))
    way = sending_end(channel, plan, worker_context("ActorGroup", 0, "cpu"))
    assert (
        plan.weight_plane == "channel"
        and receiving_end(channel, plan, worker_context("RolloutGroup", 0, "cpu")) is channel
    )
    addresses = {local_part(parameter).data_ptr() for parameter in policy.parameters()}
    lent: list[int] = []
    lend = channel.lend

    async def spied(item: WeightBucket, *, keys: Any) -> None:
        lent.extend(piece.values.data_ptr() for piece in item.pieces if not piece.start)
        await lend(item, keys=keys)

    channel.lend = spied  # type: ignore[method-assign]
    served = [small_policy(1, seed=1 + key) for key in (0, 1)]
    receivers = [WeightReceiver(each.state_dict(), channel, key) for key, each in enumerate(served)]
    sender = WeightSender(policy, way.channel, (0, 1), bucket_bytes=BUCKET, verify=True)
    for version in range(2):
        fill(policy, float(version))
        sent = scheduler.add("actor", sender.send(version))
        for task in [scheduler.add("rollout", receiver.receive()) for receiver in receivers]:
            scheduler.run_until(task)
        scheduler.run_until(sent)
        assert [receiver.version for receiver in receivers] == [version] * 2
        for each in served:
            assert {value for tensor in each.parameters() for value in tensor.flatten().tolist()} == {float(version)}
    assert set(lent) == addresses


def test_places_of_pieces_are_aligned() -> None:
    """1, 16 and 20 bytes: they begin at 0, 16 and 32, and end at 64."""
    layouts = ((1, torch.uint8), (4, torch.float32), (10, torch.bfloat16))
    pieces = tuple((str(n), 0, TensorLayout(shape=(n,), dtype=dtype)) for n, dtype in layouts)
    assert Announcement(version=0, number=0, pieces=pieces).places() == ([0, 16, 32], 64)


def test_where_they_meet() -> None:
    assert host_of("/a/file") == "127.0.0.1"
    assert host_of("tcp://10.0.0.7:1234") == "10.0.0.7"


def test_what_no_collective_joins_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = "actor.sync_backend=collective"
    with pytest.raises(ConfigError, match=r"actor\.sync_backend: got collective, but with cluster=serial there is one"):
        config_of("env=dummy", "cluster=serial", collective)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="NCCL joins no two workers of one accelerator"):
        config_of("env=dummy", "cluster=process", collective)
    config_of("env=dummy", "cluster=process", collective, "cluster.component_placement.rollout=1")


def test_what_shares_no_accelerator_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="got cuda_ipc, but the actor is on a CPU, and only accelerators have memory"):
        config_of("env=dummy", "cluster=process", IPC)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="got cuda_ipc, but with cluster=serial there is one process"):
        config_of("env=dummy", "cluster=serial", IPC)
    apart = "cluster.component_placement.rollout=0-1"
    with pytest.raises(ConfigError, match=r"rollout worker\(s\) 1 share no accelerator .*actor on slots 0, rollout on"):
        config_of("env=dummy", "cluster=process", IPC, apart)
    config_of("env=dummy", "cluster=process", IPC)


@pytest.mark.parametrize(
    ("accelerators", "options", "expected"),
    [
        ("", (), "channel"),
        ("0,1", (), "cuda_ipc"),
        ("0,1", ("cluster=serial",), "channel"),
        ("0,1", ("rollout.enable_offload=true",), "channel"),
        ("0,1", ("cluster.component_placement.rollout=1",), "collective"),
        ("0,1", ("cluster.component_placement.rollout=0-1",), "channel"),
        ("0,1", ("cluster.component_placement.rollout=0-1", "cluster.component_placement.actor=0-1"), "cuda_ipc"),
        ("0,1", ("task=math",), "cuda_ipc"),
        ("0,1", ("actor.sync_backend=channel",), "channel"),
    ],
    ids=str,
)
def test_the_placement_chooses(
    monkeypatch: pytest.MonkeyPatch, accelerators: str, options: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", accelerators)
    task = () if "task=math" in options else ("env=dummy",)
    config = config_of(*task, "cluster=process", "actor.sync_backend=auto", *options)
    assert weight_plane(config, placement_of(config)) == expected


def test_ranks_lend_to_the_workers_of_their_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two actor ranks and two rollout workers on two accelerators."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    both = ("cluster.component_placement.actor=0-1", "cluster.component_placement.rollout=0-1")
    plan = plan_of(config_of("env=dummy", "cluster=process", IPC, *both))
    channel = InProcessChannel("weights", 2)

    for rank in range(2):
        way = sending_end(channel, plan, worker_context("ActorGroup", rank, f"cuda:{rank}"))
        assert isinstance(way.channel, LendingSender)
        assert (tuple(way.receivers), way.device) == ((rank,), f"cuda:{rank}")
        end = receiving_end(channel, plan, worker_context("RolloutGroup", rank, f"cuda:{rank}"))
        assert isinstance(end, LendingReceiver) and end._lender == rank
