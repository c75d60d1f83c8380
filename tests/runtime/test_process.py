"""Calls, results and failures of workers in processes of their own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from embodied_rl.channel.base import run_blocking
from embodied_rl.errors import UserError
from embodied_rl.runtime.memory import held
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.worker import Abandoned, GroupSpec, StallError, WorkerError, WorkerGroup, WorkerProgress
from tests.runtime.conftest import alive
from tests.runtime.workers import Answerer, Asker, Probe, Unbuildable

pytestmark = [pytest.mark.cold_start, pytest.mark.usefixtures("short_grace")]
PROMPT = 5.0  # seconds within which the driver must know of a failure


def spec(name: str, worker: Any, world_size: int = 1, *, num_threads: int = 1, **arguments: Any) -> GroupSpec:
    return GroupSpec(
        name=name, worker=worker, arguments=arguments, devices=["cpu"] * world_size, num_threads=num_threads
    )


def probes(backend: ProcessBackend, world_size: int = 1, **arguments: Any) -> WorkerGroup:
    """A group of probes that have started."""
    [group] = backend.launch([spec("probe", Probe, world_size, **arguments)])
    group.call(Probe.identity).wait()
    return group


@contextmanager
def promptly() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < PROMPT


def test_results_come_in_rank_order_from_processes_of_their_own(backend: ProcessBackend) -> None:
    group = probes(backend, 3)
    identities = group.call(Probe.identity).wait()
    assert [identity[:4] for identity in identities] == [(f"probe[{rank}]", rank, 3, "cpu") for rank in range(3)]
    assert len({identity[4] for identity in identities}) == 3
    first = group.call(Probe.add, 1)
    second = group.call(Probe.add, 2, b=5)
    assert second.wait() == [7, 107, 207]  # calls run in order, results may be taken in any
    assert first.wait() == [1, 101, 201]


def test_workers_exchange_messages(backend: ProcessBackend) -> None:
    channels: dict[str, Any] = {name: backend.channel(name, range(2), 1) for name in ("questions", "answers")}
    askers, answerers = backend.launch(
        [spec("asker", Asker, 2, **channels), spec("answerer", Answerer, askers=2, **channels)]
    )
    served = answerers.call(Answerer.answer, times=3)
    asked = askers.call(Asker.ask, [1, 2, 3])
    assert served.wait() == ["served"]
    assert asked.wait() == [[10, 20, 30], [11, 21, 31]]


def test_whoever_waits_gives_up_though_others_have_messages_enough(backend: ProcessBackend) -> None:
    """Who does not read its messages waits for none: there is no room for the mark, and nobody misses it."""
    channel = backend.channel("trajectories", range(3), 1)
    run_blocking(channel.put("unread", key=0))
    backend.abandon(channel, range(3))
    assert [run_blocking(channel.get(key=key, timeout=0)) for key in range(3)] == ["unread", Abandoned(), Abandoned()]


def test_a_worker_has_its_number_of_threads_in_whatever_it_imports(backend: ProcessBackend) -> None:
    [group] = backend.launch([spec("probe", Probe, num_threads=2)])
    assert group.call(Probe.threads).wait() == [("2", "passive", False, 2)]  # this process has 1


def test_the_system_shows_workers_by_name(backend: ProcessBackend) -> None:
    [[name, *_, pid]] = probes(backend).call(Probe.identity).wait()
    assert psutil.Process(pid).name() == name == "probe[0]"


def test_progress_reaches_the_callback(backend: ProcessBackend) -> None:
    reports: list[WorkerProgress] = []
    group = probes(backend)
    group.call(Probe.count, 1).wait()  # dropped: nobody listens yet
    backend.on_progress(reports.append)
    group.call(Probe.count, 2).wait()
    assert reports == [
        WorkerProgress(worker="probe[0]", what="count"),
        WorkerProgress(worker="probe[0]", what="probe[0] counts", done=1, total=2),
        WorkerProgress(worker="probe[0]", what="probe[0] counts", done=2, total=2),
        WorkerProgress(worker="probe[0]", what=None),
    ]


def test_a_worker_is_idle_when_it_has_answered_every_call(backend: ProcessBackend) -> None:
    reports: list[WorkerProgress] = []
    group = probes(backend)
    backend.on_progress(reports.append)
    first, second = group.call(Probe.identity), group.call(Probe.identity)
    second.wait()
    first.wait()
    assert [report.what for report in reports] == ["identity", "identity", None]


def test_an_exception_ends_the_run_whoever_is_waited_for(backend: ProcessBackend) -> None:
    channels: dict[str, Any] = {name: backend.channel(name, range(1), 1) for name in ("questions", "answers")}
    asker, sleeper, failing = backend.launch(
        [spec("asker", Asker, **channels), spec("sleeper", Probe), spec("failing", Probe, 2)]
    )
    for group in (sleeper, failing):
        group.call(Probe.identity).wait()
    blocked = asker.call(Asker.wait_for_ever)
    sleeping = sleeper.call(Probe.sleep)
    failed = failing.call(Probe.fail)
    with promptly(), pytest.raises(WorkerError) as caught:
        sleeping.wait()
    message = str(caught.value)
    assert message.startswith("failing[0] failed:\nTraceback (most recent call last):\n")
    assert "failing[1] failed:\n" in message
    assert 'workers.py", line ' in message and "in fail\n" in message
    assert "\nValueError: the gripper is stuck" in message
    assert "asker" not in message and "sleeper" not in message
    for handle in (blocked, failed):  # and nobody waits for ever for what will not come
        with pytest.raises(WorkerError, match="failing\\[0\\] failed"):
            handle.wait()
    with pytest.raises(WorkerError, match="failing\\[0\\] failed"):
        sleeper.call(Probe.identity)


@pytest.mark.parametrize(
    ("method", "args", "cause"),
    [
        (Probe.kill_self, (), "was killed by SIGKILL (signal 9); if nobody did that, the system ran out of memory"),
        (Probe.exit_at_once, (3,), "ended with exit status 3."),
        (Probe.exit_at_once, (0,), "ended with exit status 0."),
    ],
    ids=["kill", "exit 3", "exit 0"],
)
def test_a_death_is_told_with_its_cause(
    backend: ProcessBackend, method: Callable[..., Any], args: tuple[Any, ...], cause: str
) -> None:
    dying, waiting = backend.launch([spec("dying", Probe), spec("waiting", Probe)])
    [[_, _, _, _, pid]] = dying.call(Probe.identity).wait()
    waiting.call(Probe.identity).wait()
    dying.call(method, *args)
    with promptly(), pytest.raises(WorkerError) as caught:
        waiting.call(Probe.sleep).wait()
    assert str(caught.value).startswith(f"dying[0] (process {pid}) {cause}")


def test_a_death_is_noticed_though_a_forked_child_holds_the_pipes_open(backend: ProcessBackend) -> None:
    group = probes(backend)
    group.call(Probe.fork_child).wait()
    group.call(Probe.kill_self)
    with promptly(), pytest.raises(WorkerError, match=r"probe\[0\] \(process \d+\) was killed by SIGKILL"):
        group.call(Probe.sleep).wait()


def test_a_death_between_calls_is_told_at_the_next(backend: ProcessBackend) -> None:
    group = probes(backend)
    group.call(Probe.exit_at_once, 3)
    time.sleep(1)
    with promptly(), pytest.raises(WorkerError, match="ended with exit status 3"):
        group.call(Probe.identity).wait()


def test_a_death_comes_before_the_complaints_of_those_it_left(backend: ProcessBackend) -> None:
    group = probes(backend, 2)
    with promptly(), pytest.raises(WorkerError) as caught:
        group.call(Probe.complain_of_the_dying).wait()
    message = str(caught.value)
    assert message.startswith("probe[1] (process ")
    assert "was killed by SIGKILL" in message.splitlines()[0]
    assert "probe[0] failed:\n" in message and "ConnectionError: peer 1 hung up" in message


def test_a_users_mistake_arrives_as_its_message_only(backend: ProcessBackend) -> None:
    group = probes(backend, 2)
    with promptly(), pytest.raises(UserError, match=r"^got 3 cubes, expected 2; remove one$"):
        group.call(Probe.refuse).wait()


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (Probe.break_pipe, "BrokenPipeError: the simulator's pipe broke"),
        (Probe.exit_politely, "SystemExit: 0"),
        (Probe.return_unpicklable, "pickle"),
    ],
)
def test_no_failure_is_mistaken_for_an_orderly_end(
    backend: ProcessBackend, method: Callable[..., Any], text: str
) -> None:
    group = probes(backend)
    with promptly(), pytest.raises(WorkerError, match=r"^probe\[0\] failed:\nTraceback") as caught:
        group.call(method).wait()
    assert text in str(caught.value).splitlines()[-1]


def test_a_worker_that_cannot_be_built_says_why(backend: ProcessBackend) -> None:
    [group] = backend.launch([spec("broken", Unbuildable)])
    with pytest.raises(WorkerError, match=r"^broken\[0\] failed:\nTraceback[\s\S]*ValueError: no display$"):
        group.call(Unbuildable.close).wait()


def test_a_coroutine_for_an_event_loop_is_refused(backend: ProcessBackend) -> None:
    group = probes(backend)
    with pytest.raises(WorkerError, match="RuntimeError: waited for None outside the serial backend's scheduler"):
        group.call(Probe.sleep_in_event_loop).wait()


def test_a_stall_shows_stacks_and_channels(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = backend.channel("questions", ("left", "right"), 4)
    for number in range(3):
        run_blocking(channel.put(number, key="left"))
    group = probes(backend, 2)
    monkeypatch.setattr(backend, "_stall_timeout", 0.5)
    with promptly(), pytest.raises(StallError) as caught:
        group.call(Probe.sleep).wait()
    message = str(caught.value)
    assert message.startswith("no worker has shown a sign of life for 0.5 s (cluster.stall_timeout)")
    assert "questions: {'left': 3, 'right': 0}" in message
    first, second = capfd.readouterr().err.split("--- stack of probe[1] ---")
    assert first.startswith("--- stack of probe[0] ---")
    for stack in (first, second):
        assert 'workers.py", line ' in stack and "in sleep\n" in stack


def test_a_stall_names_the_worker_that_hangs(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One is in the simulator for ever, the others wait for it."""
    questions, answers = (backend.channel(name, range(2), 4) for name in ("questions", "answers"))
    asking = spec("asker", Asker, 2, questions=questions, answers=answers)
    waiting, hanging = backend.launch([asking, spec("probe", Probe)])
    hanging.call(Probe.identity).wait()
    waiting.call(Asker.ask, []).wait()
    waiting.call(Asker.wait_for_ever)
    monkeypatch.setattr(backend, "_stall_timeout", 2.5)
    with promptly(), pytest.raises(StallError) as caught:
        hanging.call(Probe.sleep).wait()
    message = str(caught.value)
    assert re.search(r"  probe\[0\] HANGS: no sign of life for \d s, since 'sleep'\n", message), message
    for rank in range(2):
        assert f"  asker[{rank}] waits for a message of channel 'answers' with key {rank}" in message, message
    assert "asker" in capfd.readouterr().err


def test_signs_of_life_put_a_stall_off(backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    group = probes(backend)
    monkeypatch.setattr(backend, "_stall_timeout", 1.5)
    assert group.call(Probe.live, 2.5).wait() == [None]


def test_time_in_which_all_stood_still_does_not_count(backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, or a job that is suspended: as if it had been in the call that looks at the workers."""
    group = probes(backend)
    receive, stopped = backend._receive, [2.5]

    def stop(timeout: float) -> bool:
        if not stopped:
            return receive(timeout)
        time.sleep(stopped.pop())
        return False

    monkeypatch.setattr(backend, "_stall_timeout", 1.5)
    monkeypatch.setattr("embodied_rl.runtime.process._FROZEN_S", 0.5)
    monkeypatch.setattr(backend, "_receive", stop)
    assert group.call(Probe.sleep, 2.7).wait() == [None]
    assert not stopped


def test_data_that_moves_is_a_sign_of_life(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = probes(backend)
    monkeypatch.setattr(backend, "_stall_timeout", 2.0)
    assert group.call(Probe.write, tmp_path / "checkpoint", 4.0, 2**20).wait() == [None]
    with promptly(), pytest.raises(StallError):
        group.call(Probe.write, tmp_path / "log", 60.0, 100).wait()


def test_a_stall_is_not_what_the_driver_takes_between_calls(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = probes(backend)
    monkeypatch.setattr(backend, "_stall_timeout", 0.5)
    time.sleep(1)
    assert group.call(Probe.add, 1).wait() == [1]


def test_what_a_worker_has_started_counts_as_its_memory(backend: ProcessBackend) -> None:
    group = probes(backend, 2)
    [(*_, small), (*_, large)] = group.call(Probe.identity).wait()
    most = held(small).resident + 2**27
    assert group.retire(most) == []
    children = group.call(Probe.start_large_child, 2**28, rank=1).wait()
    assert held(large).resident < most
    [words] = group.retire(most)
    assert re.fullmatch(r"probe\[1\] held 0\.\d\d GiB", words)
    assert not alive(children[1], patience=PROMPT), "it ends with its worker"
    assert alive(small)


def test_processes_by_name(backend: ProcessBackend) -> None:
    """Also where Linux cuts names short."""
    [group] = backend.launch([spec("a_group_of_probes", Probe, 2)])
    identities = group.call(Probe.identity).wait()
    assert backend.pids() == {name: pid for name, *_, pid in identities}
    backend.shutdown()
    assert backend.pids() == {}
