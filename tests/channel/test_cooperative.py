from __future__ import annotations

import pytest

from embodied_rl.channel.base import run_blocking
from embodied_rl.channel.in_process import DeadlockError, Scheduler, until


class Turns:
    """Coroutines that log what they do."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.flags: set[str] = set()

    async def step(self, name: str, waits: list[str], sets: list[str]) -> str:
        """Log a letter, wait for a flag, set a flag, and so on."""
        try:
            for number, (wait, flag) in enumerate(zip(waits, sets, strict=True)):
                self.log.append(f"{name}{number}")
                if wait:
                    await until(lambda wait=wait: wait in self.flags, f"flag {wait}")
                self.flags.add(flag)
        finally:
            self.log.append(f"{name} ends")
        return f"{name}'s result"


def exchange() -> list[str]:
    turns, scheduler = Turns(), Scheduler()
    scheduler.add("a", turns.step("a", ["b0", "b1"], ["a0", "a1"]))
    last = scheduler.add("b", turns.step("b", ["", "a0"], ["b0", "b1"]))
    scheduler.add("c", turns.step("c", ["a1"], ["c0"]))
    scheduler.run_until(last)
    assert last.result == "b's result"
    log = list(turns.log)  # closing the others logs, too
    scheduler.cancel()
    return log


def test_tasks_go_on_in_the_order_they_were_added_each_as_far_as_it_can() -> None:
    # Pass 1: all start. Pass 2: a may go on (b set b0). Pass 3: b, since a set a0 after pass 2 began.
    assert exchange() == ["a0", "b0", "b1", "c0", "a1", "b ends"]


def test_the_order_is_the_same_every_time() -> None:
    assert exchange() == exchange()


def test_a_run_stops_when_its_task_is_done_and_others_go_on_later() -> None:
    turns, scheduler = Turns(), Scheduler()
    first = scheduler.add("a", turns.step("a", [""], ["go"]))
    second = scheduler.add("b", turns.step("b", ["go"], ["b"]))
    scheduler.run_until(first)
    assert first.done and not second.done
    scheduler.run_until(second)
    assert second.result == "b's result"


def test_before_is_called_each_time_a_task_goes_on() -> None:
    turns, scheduler = Turns(), Scheduler()
    scheduler.add("a", turns.step("a", ["b"], ["a"]), before=lambda: turns.log.append("before a"))
    last = scheduler.add("b", turns.step("b", ["", "a"], ["b", "c"]), before=lambda: turns.log.append("before b"))
    scheduler.run_until(last)
    assert turns.log == [
        *("before a", "a0", "before b", "b0", "b1"),
        *("before a", "a ends", "before b", "b ends"),
    ]


def test_a_deadlock_says_who_waits_for_what() -> None:
    turns, scheduler = Turns(), Scheduler()
    scheduler.add("env[0]", turns.step("a", ["x"], ["y"]))
    scheduler.add("rollout[0]", turns.step("b", ["y"], ["x"]))
    stuck = scheduler.add("actor[0]", turns.step("c", ["", "z"], ["c", "d"]))
    with pytest.raises(DeadlockError) as caught:
        scheduler.run_until(stuck)
    assert str(caught.value).splitlines() == [
        "no worker can go on:",
        "  env[0] waits for flag x",
        "  rollout[0] waits for flag y",
        "  actor[0] waits for flag z",
    ]


def test_the_first_failure_reaches_the_waiter_unchanged() -> None:
    turns, scheduler = Turns(), Scheduler()
    error = KeyError("the very same object")

    async def fail() -> None:
        await until(lambda: "a" in turns.flags, "a")
        raise error

    async def fail_too() -> None:
        await until(lambda: "a" in turns.flags, "a")
        raise AssertionError("too late to be heard")

    waited = scheduler.add("waited", turns.step("w", ["never"], ["w"]))
    failing = scheduler.add("failing", fail())
    scheduler.add("failing too", fail_too())
    scheduler.add("a", turns.step("a", [""], ["a"]))
    with pytest.raises(KeyError) as caught:
        scheduler.run_until(waited)
    assert caught.value is error
    with pytest.raises(KeyError) as again:  # and not a result of None
        scheduler.run_until(failing)
    assert again.value is error
    scheduler.cancel()


def test_after_a_failure_the_failed_task_is_not_run_again() -> None:
    turns, scheduler = Turns(), Scheduler()

    async def fail() -> None:
        raise ValueError("once")

    scheduler.add("failing", fail())
    other = scheduler.add("other", turns.step("o", [""], ["o"]))
    with pytest.raises(ValueError, match="once"):
        scheduler.run_until(other)
    scheduler.run_until(other)
    assert other.result == "o's result"


def test_cancel_closes_every_coroutine_even_if_one_objects() -> None:
    turns, scheduler = Turns(), Scheduler()

    async def object_to_closing() -> None:
        try:
            await until(lambda: False, "never")
        finally:
            raise RuntimeError("not now")

    scheduler.add("a", turns.step("a", ["never"], ["x"]))
    scheduler.add("objects", object_to_closing())
    scheduler.add("b", turns.step("b", ["never"], ["x"]))
    last = scheduler.add("c", turns.step("c", [""], ["c"]))
    scheduler.run_until(last)
    with pytest.raises(RuntimeError, match="not now"):
        scheduler.cancel()
    assert set(turns.log) >= {"a ends", "b ends"}
    scheduler.cancel()


@pytest.mark.filterwarnings("error")
def test_cancel_closes_coroutines_that_never_started() -> None:
    scheduler = Scheduler()
    scheduler.add("a", Turns().step("a", [], []))
    scheduler.cancel()


def test_blocking_run_gives_the_result() -> None:
    assert run_blocking(Turns().step("a", [""], ["a"])) == "a's result"


def test_blocking_run_refuses_to_suspend_and_closes_the_coroutine() -> None:
    turns = Turns()
    with pytest.raises(RuntimeError, match=r"^waited for flag x outside the serial backend's scheduler$"):
        run_blocking(turns.step("a", ["x"], ["y"]))
    assert turns.log == ["a0", "a ends"]


def test_blocking_run_passes_errors_on() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_blocking(fail())
