"""Traces of training steps: by hand, and of whole runs."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.errors import ConfigError
from embodied_rl.launch import run
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.runtime import trace as trace_module
from embodied_rl.runtime.trace import Trace, TracePlan, merge
from tests.configs import tiny_math_run, tiny_run

Spans = dict[str, list[dict[str, Any]]]


def spans_of(file: Path) -> Spans:
    """Process -> its spans, in a file that is as the Trace Event Format wants it, and Perfetto's importer."""
    events = json.loads(file.read_text())["traceEvents"]
    names, rows = dict[int, str](), dict[int, tuple[int, str]]()
    found: Spans = defaultdict(list)
    last: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        number = event["pid"], event["tid"]
        assert all(type(value) is int and value > 0 for value in number), "0 is the idle process"
        if event["ph"] == "M":
            value = event["args"]["sort_index" if event["name"] == "process_sort_index" else "name"]
            if event["name"] == "process_name":
                assert event["pid"] not in names
                names[event["pid"]] = value
            elif event["name"] == "thread_name":
                assert event["tid"] not in rows, "one number for all rows of all processes"
                rows[event["tid"]] = event["pid"], value
            else:
                assert (event["name"], value) == ("process_sort_index", len(names) - 1)
            continue
        assert event["ph"] == "X"
        assert rows[event["tid"]][0] == event["pid"]
        start, end = event["ts"], event["ts"] + event["dur"]
        assert type(start) is type(end) is int and start >= 0 and event["dur"] >= 0
        open_ = last[event["tid"]]
        while open_ and open_[-1][1] <= start:
            open_.pop()
        assert not open_ or (open_[-1][0] <= start and end <= open_[-1][1]), "within another or behind it"
        open_.append((start, end))
        found[names[event["pid"]]].append(event)
    assert not {pid for pid in names} & {tid for tid, (_, title) in rows.items() if title != "calls and phases"}
    return found


def test_only_calls_of_the_steps_are_traced_and_those_that_follow_them(tmp_path: Path) -> None:
    plan = TracePlan(folder=tmp_path / "trace", steps=frozenset({2}))
    trace = Trace("Env[0]", plan)
    timer = PhaseTimer(ended=trace.phase)
    for step in range(3):
        with trace.call("interact", step), timer.phase("env"), timer.phase("video"):
            trace.reported(f"chunk of step {step + 1}", 1, 4)
        with trace.call("sync"):
            pass
    merge(plan)
    spans = spans_of(plan.file)["Env[0]"]
    assert {span["name"] for span in spans} == {"chunk of step 2 1/4", "video", "env", "interact", "sync"}
    chunk, video, env, interact, sync = (
        next(span for span in spans if span["name"].startswith(name))
        for name in ("chunk", "video", "env", "interact", "sync")
    )
    assert interact["args"]["step"] == 2 and interact["args"]["memory_mib"] > 0
    assert [span["tid"] - chunk["tid"] for span in (chunk, video, env, interact)] == [0, -1, -1, -1]
    assert 0 <= video["args"]["cpu_ms"] <= env["args"]["cpu_ms"] <= interact["args"]["cpu_ms"]
    for inner, outer in ((video, env), (env, interact)):
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert sync["ts"] >= interact["ts"] + interact["dur"]
    assert min(span["ts"] for span in spans) == 0


def test_times_that_are_no_whole_microseconds_leave_spans_within_each_other(tmp_path: Path) -> None:
    """A tenth of a microsecond thirty times over: phases side by side, the call around them, reports beside."""
    plan = TracePlan(folder=tmp_path / "trace", steps=frozenset({1}))
    trace = Trace("Env[0]", plan)
    with trace.call("interact", 0):
        begin = time.perf_counter()
        for number in range(30):
            trace.phase(f"phase {number}", begin + number * 1e-7, begin + (number + 1) * 1e-7, 0.0)
            trace.reported("chunk", number, 30)
        time.sleep(1e-4)
    merge(plan)
    spans = spans_of(plan.file)["Env[0]"]
    calls = [span for span in spans if span["tid"] == 1]
    assert calls[0]["name"] == "interact"
    assert {span["name"] for span in calls[1:]} == {f"phase {number}" for number in range(30)}


def test_clocks_of_two_machines_are_brought_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second machine's clock is 1000 s ahead; workers of one machine keep their common clock."""
    plan = TracePlan(folder=tmp_path / "trace", steps=frozenset({1}))
    clock, machine = 50.0, "a"
    monkeypatch.setattr(trace_module, "perf_counter", lambda: clock)
    monkeypatch.setattr(trace_module, "time", lambda: (clock if machine == "a" else clock - 1000.0) + 1e9)
    monkeypatch.setattr(trace_module, "_machine", lambda: machine)
    for name, machine, ahead in (("Actor[0]", "a", 0.0), ("Env[0]", "b", 1000.0), ("Env[1]", "b", 1000.0)):  # noqa: B007
        clock = 50.0 + ahead
        with Trace(name, plan).call("work", 0):
            clock += 2.0
    merge(plan)
    found = spans_of(plan.file)
    assert found.keys() == {"Actor[0]", "Env[0]", "Env[1]"}
    assert {(span["ts"], span["dur"]) for spans in found.values() for span in spans} == {(0, 2_000_000)}


def test_without_a_plan_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = Trace("Env[0]")
    with trace.call("interact", 0):
        trace.phase("env", 0.0, 1.0, 0.5)
    merge(TracePlan(folder=tmp_path / "trace", steps=frozenset()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_every_worker_of_a_run_is_in_it(tmp_path: Path, backend: str, staleness: int) -> None:
    if backend == "serial" and staleness:
        pytest.skip("rollouts run ahead in processes")
    options = (f"cluster={backend}", "runner.max_steps=3", f"rollout.max_staleness={staleness}")
    directory = run(tiny_run(tmp_path, *options, "runner.trace_steps=[2]", "runner.eval_at_end=false"))
    spans = spans_of(directory / "trace.json")
    workers = {name.partition("[")[0] for name in spans}
    assert workers == {"driver", "EnvGroup", "RolloutGroup", "ActorGroup"}
    assert [span["name"] for span in spans["driver"]] == ["rollout", "update", "sync"]
    assert {"interact", "env", "wait"} <= {span["name"] for span in spans["EnvGroup[0]"]}
    assert {"serve", "inference"} <= {span["name"] for span in spans["RolloutGroup[0]"]}
    assert {"receive", "update", "advantage"} <= {span["name"] for span in spans["ActorGroup[0]"]}
    steps = {span["args"]["step"] for found in spans.values() for span in found if "step" in span.get("args", {})}
    assert steps == {2}
    (update,) = (span for span in spans["driver"] if span["name"] == "update")
    (trained,) = (span for span in spans["ActorGroup[0]"] if span["name"] == "update" and "step" in span["args"])
    assert update["ts"] <= trained["ts"] <= trained["ts"] + trained["dur"] <= update["ts"] + update["dur"], "one clock"


def test_language_models(tmp_path: Path) -> None:
    spans = spans_of(run(tiny_math_run(tmp_path, "runner.trace_steps=[1,2]")) / "trace.json")
    assert {"generate", "load_weights"} <= {span["name"] for span in spans["RolloutGroup[0]"]}
    assert {span["args"]["step"] for span in spans["driver"]} == {1, 2}


def test_steps_that_the_run_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runner\.trace_steps: got \[9\], expected steps of the run's 3"):
        tiny_run(tmp_path, "runner.trace_steps=[1,9]", "runner.max_steps=3")


def test_a_command_that_trained_with_a_trace_evaluates_too(tmp_path: Path) -> None:
    tiny_run(tmp_path, "runner.trace_steps=[9]", "runner.only_eval=true", "runner.max_steps=3")
