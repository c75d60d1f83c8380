"""Workers on several nodes: agents on this machine, each with its own lanes, started without Ray."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embodied_rl import launch
from embodied_rl.channel import wire
from embodied_rl.channel.base import Channel, ChannelClosed, ChannelTimeout
from embodied_rl.envs.base import SimStep
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.errors import UserError
from embodied_rl.runtime.cluster import ClusterHost, Node
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.worker import GroupSpec, Worker, WorkerContext, WorkerError, WorkerGroup
from embodied_rl.schema import Config, EmbodiedConfig
from embodied_rl.tasks.saving import CheckpointSaver
from tests.checkpoints.saved import saved_tensors
from tests.configs import embodied, tiny_run
from tests.logged import accounted
from tests.runtime.agents import LocalNodes
from tests.test_end_to_end import assert_equal, flatten, metrics_of, only_run

NODE_OF = (0, 1, 2)


class Peer(Worker):
    """One on each node. Each reads the lane of its rank, and writes to the next one's, of each channel."""

    def __init__(self, context: WorkerContext, **channels: Channel) -> None:
        super().__init__(context)
        self.channels, self.next = channels, (context.rank + 1) % context.world_size

    async def send(self, sizes: list[int], timeout: float | None = None, channel: str = "narrow") -> None:
        for size in sizes:
            await self.channels[channel].put(
                {"size": size, "data": torch.full((size,), size % 251)}, key=self.next, timeout=timeout
            )

    async def take(self, count: int, channel: str = "narrow") -> list[tuple[int, bool]]:
        found = []
        for _ in range(count):
            message = await self.channels[channel].get(key=self.context.rank)
            found.append((message["size"], bool((message["data"] == message["size"] % 251).all())))
        return found

    async def send_too_much(self) -> str:
        try:
            await self.send([10, 50_000, 10], timeout=0.3)
        except ChannelTimeout as error:
            return str(error)
        return "all were sent"

    async def wait_until_closed(self) -> str:
        try:
            await self.send([10] * 10)
        except ChannelClosed as error:
            return str(error)
        return "all were sent"

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def nodes() -> Iterator[LocalNodes]:
    nodes = LocalNodes(3)
    yield nodes
    for process in nodes.processes:
        if process.exitcode is None:
            process.kill()


def peers(nodes: LocalNodes) -> tuple[ProcessBackend, WorkerGroup]:
    backend = ProcessBackend(60.0, host=ClusterHost(nodes, NODE_OF))
    rooms = {"narrow": 2, "wide": 6}
    channels = {name: backend.channel(name, range(3), capacity, range(3)) for name, capacity in rooms.items()}
    spec = GroupSpec(name="peers", worker=Peer, arguments=channels, devices=["cpu"] * 3, num_threads=1, slots=range(3))
    return backend, backend.launch([spec])[0]


Cluster = tuple[LocalNodes, ProcessBackend, WorkerGroup]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nodes, and a peer on each, for tests that do them no harm."""
    nodes = LocalNodes(3)
    backend, group = peers(nodes)
    yield nodes, backend, group
    backend.shutdown()
    assert all(process.exitcode == 0 for process in nodes.processes)


def gone(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_messages_of_all_sizes_cross_nodes_in_order(cluster: Cluster) -> None:
    _, _, group = cluster
    sizes = [1, 3_000_000, 0, 4097, 100_000, 7]
    group.call(Peer.send, sizes, channel="wide").wait()
    assert group.call(Peer.take, len(sizes), channel="wide").wait() == [[(size, True) for size in sizes]] * 3


def test_a_full_lane_holds_its_writer_and_loses_nothing(cluster: Cluster) -> None:
    _, _, group = cluster
    for message in group.call(Peer.send_too_much).wait():
        assert "room for a message" in message
    assert group.call(Peer.take, 2).wait() == [[(10, True), (50_000, True)]] * 3
    group.call(Peer.send, [3_000_000, 9]).wait()  # their places are free again
    assert group.call(Peer.take, 2).wait() == [[(3_000_000, True), (9, True)]] * 3


def test_who_closes_a_channel_closes_it_on_all_nodes(nodes: LocalNodes) -> None:
    backend, group = peers(nodes)
    try:
        waiting = group.call(Peer.wait_until_closed)
        backend._channels[0].close("a peer had enough")
        assert all("a peer had enough" in message for message in waiting.wait())
    finally:
        backend.shutdown()


def test_a_lost_node_ends_the_run_with_its_name_and_leaves_nobody(nodes: LocalNodes) -> None:
    backend, group = peers(nodes)
    try:
        pids = group.call(Peer.pid).wait()
        calls = group.call(Peer.take, 1)
        os.kill(nodes.processes[1].pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"the connection to node 1 .* is gone"):
            calls.wait()
    finally:
        backend.shutdown()
    assert all(gone(pid) for pid in pids)


def test_a_node_that_stands_still_is_lost_within_ten_seconds(nodes: LocalNodes) -> None:
    backend, group = peers(nodes)
    try:
        pids = group.call(Peer.pid).wait()
        calls = group.call(Peer.take, 1)
        os.kill(nodes.processes[1].pid or 0, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"node 1 .* no sign of life for 8 s"):
            calls.wait()
        assert time.monotonic() - began < 20, "on a busy machine"
    finally:
        backend.shutdown()
    assert all(gone(pid) for pid in pids)


def test_strangers_are_not_heard(cluster: Cluster) -> None:
    nodes, _, group = cluster
    with pytest.raises(OSError):
        wire.connect(nodes.addresses[0], b"another token", wire.Hello(0))
    with socket.create_connection(nodes.addresses[0]) as sock:
        sock.sendall(b"x" * 1000)
    assert len(group.call(Peer.pid).wait()) == 3


def test_a_driver_that_stood_still_takes_no_node_for_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, group = cluster
    real = time.monotonic
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: real() + 3600)
        assert len(group.call(Peer.pid).wait()) == 3


def test_other_code_is_refused(nodes: LocalNodes) -> None:
    nodes.facts[2] = replace(nodes.facts[2], code="other")
    with pytest.raises(UserError, match=r"differ from the driver[^$]*node 2 .*: code other"):
        ClusterHost(nodes, NODE_OF)
    assert all(process.exitcode is not None for process in nodes.processes), "none waits for a driver"


def test_another_working_directory_is_refused(nodes: LocalNodes) -> None:
    nodes.facts[1] = replace(nodes.facts[1], folder="/elsewhere")
    with pytest.raises(UserError, match=rf"node 1 .*: folder /elsewhere, here {os.getcwd()}"):
        ClusterHost(nodes, NODE_OF)


@pytest.mark.parametrize("key", ["runner.output_dir", "env.eval.video_cfg.video_base_dir"])
def test_a_folder_that_a_node_does_not_see_is_refused_before_workers_start(
    tmp_path: Path, nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(launch, "_cluster", lambda config: ClusterHost(nodes, launch.placement_of(config).node_of()))
    elsewhere = tmp_path / "elsewhere"
    videos = "env.eval.video_cfg.save_video=true", f"env.eval.video_cfg.video_base_dir={tmp_path / 'videos'}"
    config = tiny_run(tmp_path, *SPREAD, *videos, f"{key}={elsewhere}")
    ask = Node.ask

    def blind(self: Node, method: str, *arguments: Any) -> Any:
        hidden = self.number == 2 and method == "see" and str(elsewhere) in arguments[0]
        return False if hidden else ask(self, method, *arguments)

    monkeypatch.setattr(Node, "ask", blind)
    with pytest.raises(UserError, match=rf"{key}: {elsewhere}\S* is not the same folder on node 2 "):
        launch.run(config)
    assert not list(elsewhere.rglob(".shared-*"))


SPREAD = (
    "cluster=ray",
    "+cluster.node_groups={sim: {nodes: 2, slots: 1}, learn: {nodes: 1, slots: 2}}",
    "cluster.component_placement.env=sim:0-1",
    "cluster.component_placement.rollout=learn:1",
)


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LocalNodes]]:
    """A run's nodes: three new ones each time that it starts workers."""
    started: list[LocalNodes] = []

    def cluster(config: Config) -> ClusterHost:
        started.append(LocalNodes(3))
        return ClusterHost(started[-1], launch.placement_of(config).node_of())

    monkeypatch.setattr(launch, "_cluster", cluster)
    yield started
    for process in [process for nodes in started for process in nodes.processes]:
        if process.exitcode is None:
            process.kill()


@pytest.mark.slow
def test_actor_ranks_on_two_nodes_train_as_two_on_one(tmp_path: Path, clusters: list[LocalNodes]) -> None:
    options = ("runner.max_steps=2", "cluster.component_placement.actor=0-1", "runner.save_interval=2")
    spread = (
        "cluster=ray",
        "+cluster.node_groups={node: {nodes: 2, slots: 1}}",
        "cluster.component_placement.env=0-1",
        "cluster.component_placement.rollout=0",
    )
    ends = []
    for name, how in (("one", ("cluster=process", "cluster.component_placement.env=0-1")), ("two", spread)):
        config = tiny_run(tmp_path / name, *how, *options)
        launch.run(config)
        ends.append((metrics_of(only_run(config)), saved_tensors(only_run(config) / "checkpoints/global_step_2")))
    assert ends[0][0] == ends[1][0]
    assert_equal(ends[0][1], ends[1][1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_on_two_nodes_train_as_one_sharded_over_four_ranks(tmp_path: Path, clusters: list[LocalNodes]) -> None:
    """Ranks count through the nodes, so that a replica of as many ranks as a node has lies inside one; and either goes
    on from the other's checkpoint."""
    one = ("cluster=process", "cluster.component_placement.actor=0-3")
    two = (
        "cluster=ray",
        "+cluster.node_groups={node: {nodes: 2, slots: 2}}",
        "cluster.component_placement.actor=0-3",
        "actor.fsdp_config.sharding_strategy=hybrid_shard",
        "actor.fsdp_config.fsdp_size=2",
    )

    def ends(name: str, *ways: Sequence[str]) -> Mapping[str, object]:
        """The weights and the optimizer's state after a step in each of these ways."""
        for step, how in enumerate(ways, 1):
            options = (f"runner.max_steps={step}", "runner.save_interval=1", "runner.resume_dir=auto")
            config = tiny_run(tmp_path / name, *how, *options)
            launch.run(config)
        return saved_tensors(only_run(config) / f"checkpoints/global_step_{len(ways)}")

    whole = ends("whole", one, one)
    for name, ways in {"hybrid": (two, two), "to hybrid": (one, two), "from hybrid": (two, one)}.items():
        assert_close(whole, ends(name, *ways))


def assert_close(left: object, right: object) -> None:
    """To float32 rounding: sums over ranks are made in another order."""
    one, other = flatten(left), flatten(right)
    assert one.keys() == other.keys()
    tensors = [name for name, value in one.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    assert len(tensors) > 10
    for name in tensors:
        torch.testing.assert_close(
            one[name], other[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.xdist_group("simulator")
@pytest.mark.timeout(900)
def test_libero_with_simulators_on_two_nodes_and_the_actor_on_a_third(
    tmp_path: Path, clusters: list[LocalNodes]
) -> None:
    pytest.importorskip("libero", reason="the libero extra is not installed")

    def go(steps: int) -> EmbodiedConfig:
        config = embodied(
            "env=libero_spatial",
            "model=mlp",
            "env.init_params.cameras=[]",
            "env.task_ids=[0]",
            "env.init_params.num_steps_wait=2",
            "env.train.total_num_envs=4",
            "env.train.max_episode_steps=8",
            "rollout.pipeline_stage_num=1",
            "algorithm.group_size=2",
            f"runner.output_dir={tmp_path}",
            f"runner.max_steps={steps}",
            "runner.save_interval=1",
            "runner.resume_dir=auto",
            "runner.report=false",
            "runner.eval_at_end=false",
            "runner.val_before_train=false",
            "runner.logger.logger_backends=[jsonl]",
            *SPREAD,
            "cluster.component_placement.actor=learn:0",
        )
        launch.run(config)
        return config

    for steps in (1, 2):
        config = go(steps)
        run = max(Path(config.runner.output_dir, config.runner.experiment_name).iterdir())
        assert (run / f"checkpoints/global_step_{steps}/state.json").is_file()
        assert metrics_of(run)[-1]["step"] == steps
    assert len(clusters) == 2


class Once(DummyEnv):
    """Its worker dies, once in the run."""

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        marker = Path(os.environ["ONCE"])
        if not marker.exists() and list(marker.parent.glob("results/*/*/metrics.jsonl")):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(slots, actions)


@pytest.mark.slow
def test_an_env_worker_that_dies_is_replaced_on_its_node(
    tmp_path: Path, clusters: list[LocalNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name, dies in (("calm", False), ("dies", True)):
        marker = tmp_path / name / "died"
        monkeypatch.setenv("ONCE", str(marker))
        marker.parent.mkdir()
        if not dies:
            marker.touch()
        config = tiny_run(tmp_path / name, f"env.env_type={__name__}:Once", "runner.max_steps=3", *SPREAD)
        launch.run(config)
        assert marker.exists()
        runs.append([{k: v for k, v in line.items() if k != "env/restarts"} for line in metrics_of(only_run(config))])
    assert runs[0] == runs[1]
    assert len(clusters) == 2, "no run began anew"


@pytest.mark.slow
def test_a_run_that_loses_a_node_goes_on_with_others(
    tmp_path: Path, clusters: list[LocalNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its newest checkpoint, to what it would have come to; and a run that was stopped, likewise."""
    whole = tiny_run(tmp_path / "whole", *SPREAD, "runner.max_steps=3", "runner.save_interval=1")
    launch.run(whole)
    lost = tiny_run(tmp_path / "lost", *SPREAD, "runner.max_steps=3", "runner.save_interval=1", "runner.recover=auto")
    saver = CheckpointSaver.save

    def then_kill(self: CheckpointSaver) -> None:
        saver(self)
        if len(clusters) == 2 and self.finished == 1:
            os.kill(clusters[-1].processes[0].pid or 0, signal.SIGKILL)

    monkeypatch.setattr(CheckpointSaver, "save", then_kill)
    launch.run(lost)
    assert len(clusters) == 3
    for steps in (1, 3):
        part = tiny_run(
            tmp_path / "part", *SPREAD, f"runner.max_steps={steps}", "runner.save_interval=1", "runner.resume_dir=auto"
        )
        launch.run(part)
    expected = saved_tensors(only_run(whole) / "checkpoints/global_step_3")
    for config in (lost, part):
        assert_equal(expected, saved_tensors(only_run(config) / "checkpoints/global_step_3"))


def test_a_run_over_three_nodes_equals_one_in_processes(
    tmp_path: Path, nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_cluster", lambda config: ClusterHost(nodes, launch.placement_of(config).node_of()))
    options = ["runner.max_steps=2", "cluster.component_placement.actor=2"]
    configs: list[Config] = [
        tiny_run(tmp_path, "cluster=process", "runner.experiment_name=process", *options),
        tiny_run(tmp_path, "runner.experiment_name=nodes", *SPREAD, *options),
    ]
    runs = []
    for config in configs:
        launch.run(config)
        runs.append(only_run(config))
    assert metrics_of(runs[0]) == metrics_of(runs[1])
    assert_equal(*[saved_tensors(r / "checkpoints/global_step_2") for r in runs])
    steps = accounted(runs[1])
    assert len(steps) == 2 and all(step["cpu/env"] > 0 for step in steps)
    for row, number in itertools.product(steps, range(3)):
        assert 0 < row[f"node{number}/cpu"] <= 1
        assert row[f"node{number}/memory_gb"] > 0.1
    assert "(sim, no accelerator), ranks 0-0: env 0" in launch.placement_of(configs[1]).drawn()
    assert not list(runs[1].glob(".shared-*"))
