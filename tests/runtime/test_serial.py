from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.channel.base import ChannelClosed, run_blocking
from embodied_rl.channel.in_process import DeadlockError
from embodied_rl.errors import UserError
from embodied_rl.runtime.serial import SerialBackend
from embodied_rl.runtime.worker import GroupSpec, Worker, WorkerContext, WorkerGroup, WorkerProgress
from tests.runtime.workers import Answerer, Asker, Probe, Unbuildable


@pytest.fixture
def backend() -> Iterator[SerialBackend]:
    backend = SerialBackend()
    yield backend
    backend.shutdown()


def spec(name: str, worker: Any, world_size: int = 1, *, num_threads: int = 1, **arguments: Any) -> GroupSpec:
    return GroupSpec(
        name=name, worker=worker, arguments=arguments, devices=["cpu"] * world_size, num_threads=num_threads
    )


def probes(backend: SerialBackend, world_size: int = 1, **arguments: Any) -> WorkerGroup:
    return backend.launch([spec("probe", Probe, world_size, **arguments)])[0]


def test_results_come_in_rank_order(backend: SerialBackend) -> None:
    group = probes(backend, 3)
    assert group.world_size == 3
    assert group.call(Probe.add, 5, b=2).wait() == [7, 107, 207]
    assert [identity[:4] for identity in group.call(Probe.identity).wait()] == [
        (f"probe[{rank}]", rank, 3, "cpu") for rank in range(3)
    ]


def test_workers_exchange_messages(backend: SerialBackend) -> None:
    channels: dict[str, Any] = {name: backend.channel(name, range(2), 1) for name in ("questions", "answers")}
    askers, answerers = backend.launch(
        [spec("asker", Asker, 2, **channels), spec("answerer", Answerer, askers=2, **channels)]
    )
    served = answerers.call(Answerer.answer, times=3)
    asked = askers.call(Asker.ask, [1, 2, 3])
    assert served.wait() == ["served"]
    assert asked.wait() == [[10, 20, 30], [11, 21, 31]]


def test_a_deadlock_names_workers_and_channels(backend: SerialBackend) -> None:
    channels: dict[str, Any] = {name: backend.channel(name, range(1), 1) for name in ("questions", "answers")}
    askers, _ = backend.launch([spec("asker", Asker, **channels), spec("answerer", Answerer, askers=1, **channels)])
    with pytest.raises(DeadlockError, match=r"asker\[0\] waits for a message in channel 'answers' for key 0"):
        askers.call(Asker.ask, [1]).wait()


class Threads(Worker):
    async def around_a_wait(self, channel: Any, mine: str, others: str) -> list[int]:
        """torch's threads before and after another worker had its turn."""
        counts = [torch.get_num_threads()]
        await channel.put("done", key=mine)
        await channel.get(key=others)
        return [*counts, torch.get_num_threads()]


def test_each_worker_has_its_number_of_threads_whenever_it_runs() -> None:
    before = torch.get_num_threads()
    backend = SerialBackend()
    channel = backend.channel("turns", ("a", "b"), 1)
    small, large = backend.launch([spec("small", Threads, num_threads=2), spec("large", Threads, num_threads=3)])
    first = small.call(Threads.around_a_wait, channel, "a", "b")
    second = large.call(Threads.around_a_wait, channel, "b", "a")
    assert first.wait() == [[2, 2]]
    assert second.wait() == [[3, 3]]
    backend.shutdown()
    assert torch.get_num_threads() == before


def test_progress_reaches_the_callback(backend: SerialBackend) -> None:
    reports: list[WorkerProgress] = []
    backend.on_progress(reports.append)
    probes(backend).call(Probe.count, 2).wait()
    assert reports == [WorkerProgress(worker="probe[0]", what="probe[0] counts", done=done, total=2) for done in (1, 2)]


def test_progress_without_a_callback_is_dropped(backend: SerialBackend) -> None:
    assert probes(backend).call(Probe.count, 2).wait() == [None]


def test_an_exception_surfaces_as_it_is(backend: SerialBackend) -> None:
    group = probes(backend)
    with pytest.raises(ValueError, match=r"^the gripper is stuck$") as caught:
        group.call(Probe.fail).wait()
    assert caught.traceback[-1].name == "fail"  # so a debugger stops there
    with pytest.raises(UserError, match=r"^got 3 cubes"):
        group.call(Probe.refuse).wait()


def closed(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


def test_shutdown_closes_workers_and_channels_after_an_error(backend: SerialBackend, tmp_path: Path) -> None:
    channels: dict[str, Any] = {name: backend.channel(name, range(1), 1) for name in ("questions", "answers")}
    askers, group = backend.launch([spec("asker", Asker, **channels), spec("probe", Probe, 2, folder=tmp_path)])
    askers.call(Asker.wait_for_ever)
    with pytest.raises(ValueError, match="the gripper is stuck"):
        group.call(Probe.fail).wait()
    assert not closed(tmp_path)
    backend.shutdown()
    assert closed(tmp_path) == {"probe[0]", "probe[1]"}
    with pytest.raises(ChannelClosed):
        run_blocking(channels["answers"].get())
    backend.shutdown()


class Unclosable(Worker):
    def close(self) -> None:
        raise OSError("the window is gone")


def test_shutdown_closes_the_others_when_one_cannot_be_closed(tmp_path: Path) -> None:
    backend = SerialBackend()
    backend.launch(
        [spec("probe", Probe, folder=tmp_path), spec("bad", Unclosable), spec("last", Probe, folder=tmp_path)]
    )
    with pytest.raises(OSError, match="the window is gone"):
        backend.shutdown()
    assert closed(tmp_path) == {"probe[0]", "last[0]"}
    backend.shutdown()


def test_workers_built_before_one_that_fails_are_closed(backend: SerialBackend, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no display"):
        backend.launch([spec("probe", Probe, folder=tmp_path), spec("bad", Unbuildable)])
    backend.shutdown()
    assert closed(tmp_path) == {"probe[0]"}


def test_a_worker_knows_who_it_is() -> None:
    context = WorkerContext(group="EnvGroup", rank=3, world_size=4, device="cpu", num_threads=1, rendezvous="/nowhere")
    assert context.name == "EnvGroup[3]"
    context.report_progress("nothing", 0, 1)
