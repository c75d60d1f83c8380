"""Traces of training steps: by hand, and of whole runs."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.errors import ConfigError
from embodied_rl.launch import run
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.runtime.trace import Trace, TracePlan, merge
from tests.configs import tiny_math_run, tiny_run

Spans = dict[str, list[dict[str, Any]]]


def spans_of(file: Path) -> Spans:
    """Process -> its spans."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: Spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"]]].append(event)
    return found


def test_only_calls_of_the_steps_are_traced_and_those_that_follow_them(tmp_path: Path) -> None:
    plan = TracePlan(folder=tmp_path / "trace", steps=frozenset({2}))
    trace = Trace("Env[0]", plan)
    timer = PhaseTimer(ended=trace.phase)
    for step in range(3):
        with trace.call("interact", step), timer.phase("env"), timer.phase("video"):
            trace.reported(f"chunk of step {step + 1}")
        with trace.call("sync"):
            pass
    merge(plan)
    spans = spans_of(plan.file)["Env[0]"]
    assert [span["name"] for span in spans] == ["chunk of step 2", "video", "env", "interact", "sync"]
    chunk, video, env, interact, sync = spans
    assert interact["args"]["step"] == 2 and interact["args"]["memory_mib"] > 0
    assert (chunk["tid"], video["tid"], interact["tid"]) == (1, 0, 0)
    assert 0 <= video["args"]["cpu_ms"] <= env["args"]["cpu_ms"] <= interact["args"]["cpu_ms"]
    for inner, outer in ((video, env), (env, interact)):
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert sync["ts"] >= interact["ts"] + interact["dur"]
    assert min(span["ts"] for span in spans) == 0


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
    with pytest.raises(ConfigError, match="trains nothing"):
        tiny_run(tmp_path, "runner.trace_steps=[1]", "runner.only_eval=true")
