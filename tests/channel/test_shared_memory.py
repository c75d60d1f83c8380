from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.channel.base import ChannelClosed, ChannelTimeout, run_blocking
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from tests.leftovers import left_since, shared_files

SPAWN = mp.get_context("spawn")
PATIENCE = 60.0  # seconds; only a failing test waits as long


def channel(name: str = "messages", keys: tuple[Any, ...] = (0,), capacity: int = 2) -> SharedMemoryChannel:
    return SharedMemoryChannel(name, keys, capacity, SPAWN)


def put(channel: SharedMemoryChannel, item: Any, **options: Any) -> None:
    run_blocking(channel.put(item, **{"timeout": PATIENCE, **options}))


def get(channel: SharedMemoryChannel, **options: Any) -> Any:
    return run_blocking(channel.get(**{"timeout": PATIENCE, **options}))


def get_batch(channel: SharedMemoryChannel, n: int, **options: Any) -> list[Any]:
    return run_blocking(channel.get_batch(n, **{"timeout": PATIENCE, **options}))


@contextmanager
def processes(*calls: tuple[Callable[..., None], tuple[Any, ...]]) -> Iterator[list[Any]]:
    """Run each call in a process of its own; at the end all must have ended well (or been killed by the test)."""
    started = [SPAWN.Process(target=function, args=args, daemon=True) for function, args in calls]
    for process in started:
        process.start()
    try:
        yield started
        for process in started:
            process.join(PATIENCE)
            assert process.exitcode in (0, -signal.SIGKILL)
    finally:
        for process in started:
            process.kill()
            process.join()


def echo(requests: SharedMemoryChannel, answers: SharedMemoryChannel, count: int) -> None:
    for _ in range(count):
        put(answers, get(requests))


def test_messages_cross_processes_and_slots_grow() -> None:
    requests, answers = channel("requests"), channel("answers")
    sizes = [1, 10_000, 3_000_000, 5, 1_000_000, 0, 4_000_000]
    with processes((echo, (requests, answers, len(sizes)))):
        for size in sizes:
            sent = {"x": torch.arange(size), "b": torch.arange(size).to(torch.bfloat16), "n": np.arange(size)[::3]}
            put(requests, sent)
            received = get(answers)
            assert torch.equal(received["x"], sent["x"]) and torch.equal(received["b"], sent["b"])
            np.testing.assert_array_equal(received["n"], sent["n"])


def test_a_received_message_survives_the_slot() -> None:
    messages = channel(capacity=1)
    put(messages, torch.zeros(100_000))
    first = get(messages)
    put(messages, torch.ones(100_000))
    assert first.sum() == 0
    first += 3
    assert get(messages).sum() == 100_000


def produce_and_consume(messages: SharedMemoryChannel, results: SharedMemoryChannel, rank: int, count: int) -> None:
    def produce() -> None:
        for i in range(count):
            for key in ("a", "b"):
                # Contents that tell a torn or mixed-up message.
                item = {"id": (rank, i), "x": torch.full((2000 * (1 + i % 3),), rank * count + i)}
                put(messages, item, key=key)

    def consume(key: str) -> None:
        received = get_batch(messages, count, key=key)
        assert all((m["x"] == m["x"][0]).all() for m in received)
        put(results, (key, [(*m["id"], int(m["x"][0])) for m in received]))

    in_threads(produce, lambda: consume("a"), lambda: consume("b"))


def in_threads(*functions: Callable[[], None]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_fifo_per_key_with_several_producers_and_consumers() -> None:
    count, ranks = 60, 3
    messages, results = channel(keys=("a", "b"), capacity=3), channel("results", capacity=2 * ranks)
    with processes(*((produce_and_consume, (messages, results, rank, count)) for rank in range(ranks))):
        received = get_batch(results, 2 * ranks)
    for key in ("a", "b"):
        lists = [items for k, items in received if k == key]
        everything = sorted(item for items in lists for item in items)
        assert everything == [(rank, i, rank * count + i) for rank in range(ranks) for i in range(count)]
        for items in lists:
            for producer in range(ranks):
                indices = [i for rank, i, _ in items if rank == producer]
                assert indices == sorted(indices)
    assert messages.depth() == {"a": 0, "b": 0}


def test_put_waits_for_room_and_names_the_wait() -> None:
    messages = channel("requests", keys=("stage 0", "stage 1"), capacity=2)
    put(messages, 1, key="stage 0")
    put(messages, 2, key="stage 0")
    started = time.monotonic()
    with pytest.raises(ChannelTimeout) as error:
        put(messages, 3, key="stage 0", timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 5
    assert str(error.value) == (
        "channel 'requests': waited 0.3 s for room for a message with key 'stage 0' (messages waiting: 'stage 0': 2, "
        "'stage 1': 0). The consumer is slow, stuck or dead: look at its log and stack, or allow a longer timeout."
    )
    timer = threading.Timer(0.2, get, (messages,), {"key": "stage 0"})
    timer.start()
    put(messages, 3, key="stage 0")
    timer.join()
    assert get_batch(messages, 2, key="stage 0") == [2, 3]


def test_get_waits_and_names_the_wait() -> None:
    with pytest.raises(
        ChannelTimeout, match=r"channel 'messages': waited 0\.2 s for a message with key 0 .* producer is"
    ):
        get(channel(), timeout=0.2)


def test_waiting_does_not_use_the_processor() -> None:
    messages = channel()
    started = time.thread_time()
    with pytest.raises(ChannelTimeout):
        get(messages, timeout=1.0)
    assert time.thread_time() - started < 0.1


def test_only_where_waits_are_short_others_are_let_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling asleep and waking up takes longer than they do; where they are long it would use the processor."""
    yields = 0
    messages, begin = channel(), os.sched_yield

    def counted() -> None:
        nonlocal yields
        yields += 1
        begin()

    monkeypatch.setattr(os, "sched_yield", counted)

    def wait(seconds: float) -> int:
        before, timer = yields, threading.Timer(seconds, put, (messages, 0))
        timer.start()
        get(messages)
        timer.join()
        return yields - before

    assert wait(0.02) and not wait(0.02) and not wait(0.02)
    put(messages, 0)
    get(messages)
    assert wait(0.02), "the wait before was none at all"


def test_get_batch_loses_nothing_when_it_times_out() -> None:
    messages = channel(capacity=3)
    for i in range(3):
        put(messages, i)
    with pytest.raises(ChannelTimeout):
        get_batch(messages, 5, timeout=0.1)
    put(messages, 3)
    assert get(messages) == 0 and get_batch(messages, 3) == [1, 2, 3]


def wait_until_closed(reports: SharedMemoryChannel, blocked: SharedMemoryChannel) -> None:
    def wait(call: Callable[[], None]) -> None:
        put(reports, "waiting")
        try:
            call()
        except ChannelClosed as error:
            put(reports, (time.monotonic(), error.error, str(error)))

    in_threads(
        lambda: wait(lambda: get(blocked, key="empty", timeout=None)),
        lambda: wait(lambda: put(blocked, 1, key="full", timeout=None)),
    )


def test_close_ends_the_waits_in_other_processes() -> None:
    reports, blocked = channel("reports"), channel("blocked", keys=("full", "empty"), capacity=1)
    put(blocked, 0, key="full")
    error = "Traceback\n" + "line\n" * 50_000 + "RuntimeError: simulator crashed"
    with processes((wait_until_closed, (reports, blocked))):
        assert get_batch(reports, 2) == ["waiting", "waiting"]
        time.sleep(0.1)  # they report before they wait
        closed_at = time.monotonic()
        blocked.close(error)
        ends = get_batch(reports, 2)
    for at, text, message in ends:
        assert at - closed_at < 0.5
        assert text.endswith("simulator crashed") and len(text) < len(error)
        assert message.startswith("channel 'blocked' was closed because of an error:\n")
    blocked.close("another error")
    with pytest.raises(ChannelClosed, match="simulator crashed"):
        get(blocked, key="full")
    with pytest.raises(ChannelClosed, match="simulator crashed"):
        put(blocked, 1, key="empty")


def close_with(messages: SharedMemoryChannel, error: str) -> None:
    messages.close(error)


def test_a_child_closes_what_its_parent_waits_for() -> None:
    messages = channel()
    with processes((close_with, (messages, "child failed"))), pytest.raises(ChannelClosed, match="child failed"):
        get(messages)


def test_close_without_an_error() -> None:
    messages = channel()
    messages.close()
    with pytest.raises(ChannelClosed) as error:
        get(messages)
    assert error.value.error is None and str(error.value) == "channel 'messages' was closed"
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.name, copy.error) == ("messages", None)


def shared_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]


def put_for_ever(messages: SharedMemoryChannel) -> None:
    while True:
        put(messages, torch.ones(1_000_000))


def test_a_killed_peer_leaves_nothing_behind_and_blocks_nobody() -> None:
    names = shared_files()
    messages = channel("doomed", capacity=2)
    with processes((put_for_ever, (messages,))) as (process,):
        for _ in range(5):
            assert get(messages).sum() == 1_000_000
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        # A producer that is killed in the middle of a put takes that slot along, and no more.
        while messages.depth()[0]:
            assert get(messages).sum() == 1_000_000
        put(messages, "still works", timeout=1)
        assert get(messages) == "still works"
        with pytest.raises(ChannelTimeout):
            get(messages, timeout=0.05)
    assert not left_since(names)
    ours = [line for line in shared_mappings() if "doomed" in line]
    assert 0 < len(ours) <= 3  # the closed flag and two slots
    del messages
    assert not [line for line in shared_mappings() if "doomed" in line]


def test_a_channel_frees_its_descriptors_and_memory() -> None:
    gc.collect()  # or what earlier tests left behind goes in between
    fds, mapped = os.listdir("/proc/self/fd"), len(shared_mappings())
    messages = channel(keys=tuple(range(10)))
    put(messages, torch.zeros(1_000_000))
    assert len(os.listdir("/proc/self/fd")) == len(fds) + 4 + 6 * 10 and len(shared_mappings()) == mapped + 2
    del messages
    assert len(os.listdir("/proc/self/fd")) == len(fds) and len(shared_mappings()) == mapped


@pytest.mark.parametrize("capacity", [2049, SharedMemoryChannel.MAX_CAPACITY])
def test_a_lane_of_many_messages_is_full_at_its_capacity_and_not_before(capacity: int) -> None:
    gc.collect()  # or what earlier tests left behind goes in between
    fds, mapped = len(os.listdir("/proc/self/fd")), len(shared_mappings())
    messages = channel(capacity=capacity)
    count = 2049
    for number in range(count):
        put(messages, number)
    assert messages.depth() == {0: count}
    if count == capacity:
        with pytest.raises(ChannelTimeout):
            put(messages, count, timeout=0.01)
    assert get_batch(messages, count) == list(range(count))
    assert len(os.listdir("/proc/self/fd")) == fds + 4 + 6, "however many slots were used"
    del messages
    assert len(shared_mappings()) == mapped


def test_memory_is_that_of_the_messages_that_waited_at_once() -> None:
    gc.collect()
    mapped = len(shared_mappings())
    messages = channel(capacity=2049)
    for number in range(300):
        put(messages, torch.full((1000,), number))
        put(messages, -number)
        assert get(messages)[0] == number
        assert get(messages) == -number
    assert len(shared_mappings()) == mapped + 1 + 2, "the closed flag and two slots"


def put_all(channel: SharedMemoryChannel, item: Any, keys: Sequence[Any], timeout: float = PATIENCE) -> None:
    run_blocking(channel.put_all(item, keys=keys, timeout=timeout))


def test_a_message_for_all_is_written_once() -> None:
    gc.collect()
    mapped = len(shared_mappings())
    messages = channel(keys=tuple(range(8)), capacity=2)
    for number in range(5):
        put_all(messages, torch.full((100_000,), number), range(8))
        put_all(messages, {"and": number}, [3, 5])
        assert messages.depth() == {key: 2 if key in (3, 5) else 1 for key in range(8)}
        for key in (*range(8),):
            seen = run_blocking(messages.read(lambda message: float(message.sum()), key=key))
            assert seen == 100_000 * number
        assert [get(messages, key=key) for key in (3, 5)] == [{"and": number}] * 2
    assert len(shared_mappings()) <= mapped + 4, "the closed flag, two slots, and who reads which"


def test_a_message_for_all_waits_for_the_slowest() -> None:
    messages = channel(keys=("a", "b", "c"), capacity=2)
    for number in range(2):
        put_all(messages, number, ["a", "b"])
    assert get_batch(messages, 2, key="a") == [0, 1]
    with pytest.raises(ChannelTimeout, match="room for a message with key 'b'"):
        put_all(messages, 2, ["a", "b"], timeout=0.05)
    assert get_batch(messages, 2, key="b") == [0, 1]
    put_all(messages, "not b's", ["c", "a"], timeout=0.05)
    put_all(messages, 3, ["b", "a"], timeout=0.05)
    assert get_batch(messages, 2, key="a") == ["not b's", 3]
    assert get(messages, key="b") == 3
    assert get(messages, key="c") == "not b's"
    for number in range(10):  # nothing was lost
        put_all(messages, number, ["a", "b", "c"], timeout=0.05)
        assert [get(messages, key=key) for key in "abc"] == [number] * 3


def test_a_message_for_all_that_cannot_be_sent_takes_no_room() -> None:
    messages = channel(keys=(0, 1), capacity=1)
    with pytest.raises(TypeError, match="cannot be sent"):
        put_all(messages, lambda: None, [0, 1])
    with pytest.raises(KeyError, match="got key 2"):
        put_all(messages, "nobody's", [0, 1, 2])
    put_all(messages, "fine", [0, 1], timeout=0.05)
    assert [get(messages, key=key) for key in (0, 1)] == ["fine", "fine"]


def tell_all(messages: SharedMemoryChannel, rank: int, count: int) -> None:
    for i in range(count):
        put_all(messages, {"id": (rank, i), "x": torch.full((3000 * (1 + i % 4),), 1000 * rank + i)}, ["a", "b", "c"])
        put(messages, {"id": (rank, -i), "x": torch.full((10,), i)}, key="b")


def listen(messages: SharedMemoryChannel, key: str, results: SharedMemoryChannel, count: int) -> None:
    seen: list[tuple[int, int]] = []

    def look(message: Any) -> None:
        assert (message["x"] == message["x"][0]).all()
        rank, i = message["id"]
        assert int(message["x"][0]) == 1000 * rank + i or key == "b"
        seen.append(message["id"])

    for _ in range(count):
        run_blocking(messages.read(look, key=key, timeout=PATIENCE))
    put(results, (key, seen))


def test_what_several_tell_all_comes_whole_and_in_order() -> None:
    count, ranks = 60, 2
    messages, results = channel(keys=("a", "b", "c"), capacity=3), channel("results", capacity=3)
    tellers = [(tell_all, (messages, rank, count)) for rank in range(ranks)]
    listeners = [
        (listen, (messages, key, results, count * ranks * (2 if key == "b" else 1))) for key in ("a", "b", "c")
    ]
    with processes(*tellers, *listeners):
        received = dict(get_batch(results, 3))
    for rank in range(ranks):
        told = [(rank, i) for i in range(count)]
        assert [seen for seen in received["a"] if seen[0] == rank] == told
        assert [seen for seen in received["c"] if seen[0] == rank] == told
        both = [each for i in range(count) for each in ((rank, i), (rank, -i))]
        assert [seen for seen in received["b"] if seen[0] == rank] == both


def die_reading(messages: SharedMemoryChannel) -> None:
    run_blocking(messages.read(lambda _: os.kill(os.getpid(), signal.SIGKILL), key="b", timeout=PATIENCE))


def test_a_reset_finds_what_a_killed_reader_shared() -> None:
    messages = channel(keys=("a", "b"), capacity=2)
    put_all(messages, torch.ones(100_000), ["a", "b"])
    with processes((die_reading, (messages,))) as (process,):
        process.join(PATIENCE)
        assert get(messages, key="a").sum() == 100_000
        put_all(messages, "before", ["a", "b"], timeout=0.05)
        with pytest.raises(ChannelTimeout):
            put_all(messages, "no room", ["a", "b"], timeout=0.05)
        messages.reset(["b"])
        assert get(messages, key="a") == "before", "it was a's, too"
        for number in range(5):
            for part in range(2):
                put_all(messages, (number, part), ["a", "b"], timeout=0.05)
            assert get_batch(messages, 2, key="a") == get_batch(messages, 2, key="b") == [(number, 0), (number, 1)]


def test_undeclared_keys_are_listed() -> None:
    messages = channel("requests", keys=("stage 0", ("env", 1)))
    expected = r"channel 'requests': got key 0, expected one of those it was created with: 'stage 0', \('env', 1\)"
    with pytest.raises(KeyError, match=expected):
        put(messages, 1)
    with pytest.raises(KeyError, match=expected):
        get(messages)


def test_pickling_outside_spawning_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="can only be pickled while a process is being spawned: pass it in the args"):
        pickle.dumps(channel())


def test_wrong_arguments() -> None:
    for capacity in (0, 65281):
        with pytest.raises(ValueError, match=f"got capacity {capacity}, expected 1 to 65280 messages a key"):
            channel(capacity=capacity)
    for keys in ((), (1, 1)):
        with pytest.raises(ValueError, match="expected one or more, each once"):
            channel(keys=keys)
    with pytest.raises(ValueError, match="got a context that starts processes by 'fork', expected"):
        SharedMemoryChannel("x", [0], 1, mp.get_context("fork"))


def test_a_failed_creation_says_what_it_needed_and_keeps_no_descriptors() -> None:
    gc.collect()  # or what earlier tests left behind goes in between
    fds = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 30, hard))
    try:
        with pytest.raises(
            OSError, match="channel 'messages' needs 604 file descriptors for 100 keys, got 'Too many open"
        ):
            channel(keys=tuple(range(100)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == fds


def test_an_item_that_cannot_be_sent_takes_no_room() -> None:
    messages = channel(capacity=1)
    with pytest.raises(TypeError, match="cannot be sent"):
        put(messages, lambda: None)
    put(messages, "fine")
    assert get(messages) == "fine"


def test_reading_in_place_frees_the_slot_afterwards() -> None:
    messages = channel(capacity=1)
    for number in range(3):  # with one slot, the next put needs the last one's
        put(messages, {"large": torch.full((100_000,), float(number)), "small": torch.tensor([number])})
        read = messages.read(lambda m: (m["large"].sum().item(), m["small"].item(), m["large"]), timeout=PATIENCE)
        total, small, borrowed = run_blocking(read)
        assert (total, small) == (number * 100_000.0, number)
    put(messages, {"large": torch.full((100_000,), 9.0), "small": torch.tensor([9])})
    assert borrowed[-1] == 9.0, "it was the slot itself, not a copy"
    with pytest.raises(ZeroDivisionError):
        run_blocking(messages.read(lambda _: 1 / 0, timeout=PATIENCE))
    put(messages, 1)  # the slot is free again
    assert get(messages) == 1
