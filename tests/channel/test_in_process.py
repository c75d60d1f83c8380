from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied_rl.channel.base import ChannelClosed
from embodied_rl.channel.in_process import DeadlockError, InProcessChannel, Scheduler


def test_fifo_per_key_and_bounded() -> None:
    channel = InProcessChannel("numbers", capacity=2)
    most, got = 0, []

    async def produce() -> None:
        nonlocal most
        for i in range(10):
            for key in ("even", "odd"):
                await channel.put(2 * i + (key == "odd"), key=key)
                most = max(most, *channel.depth().values())

    async def consume() -> None:
        got.extend(await channel.get_batch(5, key="odd"))
        for _ in range(5):
            got.append(await channel.get(key="odd"))

    async def consume_even() -> list[Any]:
        return await channel.get_batch(10, key="even")

    scheduler = Scheduler()
    scheduler.add("producer", produce())
    odd = scheduler.add("odd", consume())
    even = scheduler.add("even", consume_even())
    scheduler.run_until(odd)
    scheduler.run_until(even)
    assert got == list(range(1, 20, 2)) and even.result == list(range(0, 20, 2))
    assert most == 2 and channel.depth() == {"even": 0, "odd": 0}


def test_two_producers_waiting_for_the_same_room_stay_within_the_capacity() -> None:
    channel = InProcessChannel("numbers", capacity=1)
    depths = []

    async def produce(item: int) -> None:
        await channel.put(item)
        depths.append(channel.depth()[0])

    async def consume() -> list[int]:
        return [await channel.get() for _ in range(3)]

    scheduler = Scheduler()
    for item in range(3):
        scheduler.add(f"producer {item}", produce(item))
    assert scheduler_result(scheduler, consume()) == [0, 1, 2]
    assert depths == [1, 1, 1]


def scheduler_result(scheduler: Scheduler, coroutine: Any) -> Any:
    task = scheduler.add("consumer", coroutine)
    scheduler.run_until(task)
    return task.result


def test_the_message_is_what_it_was_when_it_was_put() -> None:
    channel = InProcessChannel("weights", capacity=1)
    weights = torch.tensor([1.0, 2.0])

    async def work() -> torch.Tensor:
        await channel.put({"w": weights})
        weights.zero_()
        return (await channel.get())["w"]

    assert scheduler_result(Scheduler(), work()).tolist() == [1, 2]


def test_what_is_lent_is_not_copied_and_stays_until_all_have_read_it() -> None:
    channel, scheduler = InProcessChannel("lanes", 2), Scheduler()
    item = torch.zeros(10_000)
    log: list[str] = []

    async def lend() -> None:
        await channel.lend({"x": item}, keys=("a", "b"))
        log.append("lent")

    async def read(key: str) -> torch.Tensor:
        found = await channel.read(lambda message: message["x"], key=key)
        log.append(key)
        return found

    async def get(key: str) -> torch.Tensor:
        return (await channel.get(key=key))["x"]

    lending = scheduler.add("actor", lend())
    assert scheduler_result(scheduler, read("a")) is item
    assert not lending.done
    copy = scheduler_result(scheduler, get("b"))
    assert copy.data_ptr() != item.data_ptr() and torch.equal(copy, item)
    scheduler.run_until(lending)
    assert log == ["a", "lent"]


def test_a_loan_ends_with_its_lane_or_the_channel() -> None:
    channel, scheduler = InProcessChannel("lanes", 2), Scheduler()
    lending = scheduler.add("actor", channel.lend(0, keys=("a",)))
    lending.advance()
    channel.reset(["a"])
    scheduler.run_until(lending)
    lending = scheduler.add("actor", channel.lend(0, keys=("a",)))
    lending.advance()
    channel.close("gone")
    with pytest.raises(ChannelClosed, match="gone"):
        scheduler.run_until(lending)


def test_deadlock_names_who_waits_for_what() -> None:
    requests, actions = InProcessChannel("requests", capacity=1), InProcessChannel("actions", capacity=1)

    async def env() -> None:
        await requests.put(1, key="stage 0")
        await requests.put(2, key="stage 0")

    async def rollout() -> None:
        await actions.get(key="stage 1")

    scheduler = Scheduler()
    scheduler.add("env 0", env())
    task = scheduler.add("rollout 0", rollout())
    with pytest.raises(DeadlockError) as error:
        scheduler.run_until(task)
    text = str(error.value)
    assert "env 0 waits for room in channel 'requests' for key 'stage 0' (messages waiting: 'stage 0': 1)" in text
    assert (
        "rollout 0 waits for a message in channel 'actions' for key 'stage 1' (messages waiting: 'stage 1': 0)" in text
    )
    scheduler.cancel()


@pytest.mark.parametrize("blocked", ["get", "put"])
def test_close_reaches_whoever_waits(blocked: str) -> None:
    channel = InProcessChannel("requests", capacity=1)

    async def wait() -> None:
        if blocked == "get":
            await channel.get()
        else:
            await channel.put(1)
            await channel.put(2)

    async def close() -> None:
        channel.close("simulator crashed")
        channel.close("a later error")

    scheduler = Scheduler()
    task = scheduler.add("waiting", wait())
    scheduler.add("closing", close())
    with pytest.raises(ChannelClosed, match="channel 'requests' was closed because of an error:\nsimulator crashed"):
        scheduler.run_until(task)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="channel 'x': got capacity 0, expected 1 to inf"):
        InProcessChannel("x", capacity=0)
    with pytest.raises(ValueError, match=r"channel 'x': got get_batch\(0\), expected at least 1"):
        scheduler_result(Scheduler(), InProcessChannel("x", capacity=1).get_batch(0))
