"""Runs to which faults happen one after the other, at random moments, and the verdict on each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.faults.driven import Driven
from benchmarks.faults.library import Family, Fault, faults
from benchmarks.faults.nodes import Nodes, nodes_of
from benchmarks.faults.victims import BORN, FOLDER, PLANNED, STRUCK
from embodied_rl.checkpoints.store import complete_checkpoints, verify
from embodied_rl.errors import CheckpointError

LIMIT_S: Final = 150.0
"""Seconds without the end of a training step, or of the run, after which it counts as hung."""
NAMED_S: Final = 30.0
"""Seconds in which a run over nodes is to name a fault, or to end."""
_DISK_MIB: Final = 8
_COMMON: Final = (
    "runner.report=false",
    "runner.eval_at_end=false",
    "runner.val_before_train=false",
    "runner.val_check_interval=-1",
    "runner.max_steps=1000000",
    "runner.save_interval=1",
    "runner.logger.logger_backends=[jsonl]",
    "cluster.num_threads.actor=1",
    "cluster.num_threads.rollout=1",
)
FAMILIES: Final = {
    "dummy": (
        "env=dummy",
        "env.env_type=benchmarks.faults.victims:FaultyDummy",
        "model.model_type=benchmarks.faults.victims:FaultyPolicy",
        "env.train.total_num_envs=16",
        "env.train.max_episode_steps=16",
        "env.eval.video_cfg.save_video=false",
    ),
    "libero": (
        "env=libero_spatial",
        "env.env_type=benchmarks.faults.victims:FaultyLibero",
        "model=mlp",
        "env.init_params.cameras=[]",
        "env.task_ids=[0]",
        "env.init_params.num_steps_wait=2",
        "env.train.total_num_envs=4",
        "env.train.max_episode_steps=20",
        "env.eval.video_cfg.save_video=false",
        "rollout.pipeline_stage_num=1",
        "algorithm.group_size=2",
    ),
    "math": (
        "task=math",
        "model=tiny_lm",
        "model.params.architecture={type: qwen2, hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64}",
        "data.params.digits=1",
        "data.rollout_batch_size=6",
        "data.eval_size=8",
        "data.max_prompt_length=8",
        "rollout.max_new_tokens=8",
        "algorithm.group_size=4",
        "reward.function=benchmarks.faults.victims:score",
    ),
}
_RECOVERING: Final = ("runner.recover=auto", "runner.max_recoveries=100000", "cluster.stall_timeout=40")
_PROCESS: Final = ("cluster=process", *_RECOVERING)
_REPLACING: Final = ("env.max_restarts=100000", "env.worker_timeout=6")


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What became of a fault."""

    case: int
    family: str
    backend: str
    fault: str
    file: str = ""
    """The one that is damaged."""
    delay: float = 0.0
    """Seconds into the run, or since the last fault, at which it was planned."""
    outcome: str = ""
    """``goes on``, ``ended``, ``hang`` or ``not met``: the run ended before."""
    status: int | None = None
    """Exit status of a run that ended."""
    replaced_s: float | None = None
    """Until a new env worker had its simulators."""
    named_s: float | None = None
    """Until the run named it, or ended; only where it has nodes."""
    ended_s: float | None = None
    """Until the run ended."""
    next_step_s: float | None = None
    """Until a later training step was finished."""
    wrong: list[str] = field(default_factory=list)
    """All that must not be."""


class Campaign:
    """A seeded sequence of cases.

    Args:
        folder: for the runs' files.
        per_run: faults that happen to a run of several processes, one after the other.
        keep: keep the folders of cases without anything wrong.
    """

    def __init__(self, folder: Path, seed: int, *, per_run: int = 12, keep: bool = False) -> None:
        self.folder, self._random, self._per_run, self._keep = folder, random.Random(seed), per_run, keep
        self._case = 0
        self._nodes: Nodes | None = None
        self._steps_before = 0
        """Training steps that the experiment had before the present run."""

    def draw(self, family: Family, backend: str) -> Fault:
        choices = faults(family, backend)
        return self._random.choices(choices, [fault.weight for fault in choices])[0]

    def cases(self, family: Family, backend: str, count: int) -> Iterator[Verdict]:
        """So many faults, and perhaps some more to end the last run."""
        done = 0
        self._nodes = nodes_of(backend)
        try:
            while done < count:
                size = 1 if backend == "serial" else min(self._per_run, count - done)
                for verdict in self.run(family, backend, [self.draw(family, backend) for _ in range(size)]):
                    done += verdict.outcome != "not met"
                    yield verdict
        finally:
            if self._nodes is not None:
                self._nodes.close()

    def run(self, family: Family, backend: str, planned: list[Fault]) -> list[Verdict]:
        """One run, or more where faults end it, which resume it, until all faults have happened."""
        folder = self.folder / f"run_{self._case:05d}"
        verdicts: list[Verdict] = []
        disk = any(fault.place == "disk" for fault in planned)
        results = folder / "disk"
        results.mkdir(parents=True)
        if disk:
            size = f"size={_DISK_MIB}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(results)], check=True)
        try:
            while planned:
                before = len(planned)
                verdicts += self._one_run(family, backend, folder, planned)
                if len(planned) == before:
                    break
        finally:
            if disk:
                subprocess.run(["umount", "-l", str(results)], check=True)
        if not self._keep and not any(v.wrong for v in verdicts):
            shutil.rmtree(folder, ignore_errors=True)
        return verdicts

    def _one_run(self, family: Family, backend: str, folder: Path, planned: list[Fault]) -> list[Verdict]:
        arguments = [*FAMILIES[family], *_COMMON, f"runner.output_dir={folder / 'disk'}", "runner.resume_dir=auto"]
        arguments += [f"runner.experiment_name={family}"]
        if self._nodes is not None:
            arguments += [*self._nodes.arguments(str(folder)), *_RECOVERING, "cluster.stall_timeout=120"]
        else:
            arguments += _PROCESS if backend == "process" else ["cluster=serial"]
        if backend != "serial" and family != "math":
            arguments += _REPLACING
        self._steps_before = last_step(folder / "disk" / family)
        run = Driven(arguments, folder, {FOLDER: str(folder), "OMP_NUM_THREADS": "1"}, self._nodes)
        verdicts: list[Verdict] = []
        try:
            while planned and run.poll() is None:
                fault = planned.pop(0)
                verdict = Verdict(case=self._case, family=family, backend=backend, fault=fault.name, delay=0.0)
                self._case += 1
                verdicts.append(verdict)
                self._strike(run, folder / "disk" / family, fault, verdict)
            if run.poll() is None:
                os.kill(run.pid, signal.SIGTERM)
                if run.wait(60) is None and verdicts:
                    verdicts[-1].wrong.append("did not end within 60 s of SIGTERM")
            if run.poll() is None:
                run.kill()
        finally:
            left = run.leftovers()
        if verdicts:
            verdicts[-1].wrong += [f"left behind: {name}" for name in left]
            verdicts[-1].wrong += _checkpoint_problems(folder / "disk" / family)
        return verdicts

    def _strike(self, run: Driven, experiment: Path, fault: Fault, verdict: Verdict) -> None:
        """Let the fault happen at a random moment, and wait for what comes of it."""
        folder = run.folder
        if not _until(run, lambda: last_step(experiment) > self._steps_before and _saved(experiment), LIMIT_S):
            if self._nodes is not None:
                verdict.outcome, verdict.status = "not met", run.poll()
                verdict.wrong.append(f"no step within {LIMIT_S:g} s, before the fault: {run.said()[-1000:]}")
                return
            raise SystemExit(f"no step within {LIMIT_S:g} s, before any fault: {run.said()[-2000:]}")
        verdict.delay = round(self._random.uniform(0.0, 1.0), 3)
        run.wait(verdict.delay)
        said = len(run.said())
        struck = self._happens(run, folder, fault)
        if struck is None:
            verdict.outcome, verdict.status = "not met", run.poll()
            return
        step = last_step(experiment)
        more = 10**9 if _ends(fault, verdict.backend) else 0
        # It may have done its part of the present step, and get ready for the next.
        more += fault.place in ("EnvGroup", "reset", "observe")
        if self._nodes is not None:
            _until(run, lambda: bool(fault.words and re.search(fault.words, run.said()[said:])), LIMIT_S)
            verdict.named_s = round(time.time() - struck, 2)
            step = last_step(experiment)  # others may have finished a step without the one who is lost
            if verdict.named_s > NAMED_S:
                verdict.wrong.append(f"took {verdict.named_s} s to be named")
        goes_on = _until(run, lambda: last_step(experiment) > step + more, LIMIT_S)
        verdict.status = run.poll()
        if verdict.status is not None:
            verdict.outcome, verdict.ended_s = "ended", round(time.time() - struck, 2)
        elif goes_on:
            verdict.outcome, verdict.next_step_s = "goes on", round(time.time() - struck, 2)
        else:
            verdict.outcome = "hang"
            verdict.wrong.append(f"no step and no end for {LIMIT_S:g} s")
        born = folder / BORN
        if fault.place in ("step", "reset", "observe", "EnvGroup") and born.exists():
            after = [at - struck for at in map(float, born.read_text().split()) if at > struck]
            verdict.replaced_s = round(min(after), 2) if after and verdict.outcome == "goes on" else None
        text = run.said()[said:]
        if fault.words and not re.search(fault.words, text):
            verdict.wrong.append(f"not named: expected {fault.words!r} in {text[-600:]!r}")
        if verdict.status is not None and verdict.status not in _statuses(fault):
            verdict.wrong.append(f"exit status {verdict.status}, expected one of {_statuses(fault)}")

    def _happens(self, run: Driven, folder: Path, fault: Fault) -> float | None:
        """Time at which the fault struck; None: the run ended before."""
        if fault.place == "driver":
            os.kill(run.pid, signal.Signals[fault.kind])
            return time.time()
        if fault.place == "raylet":
            assert self._nodes is not None
            self._nodes.kill_machine(self._random)
            return time.time()
        if fault.place == "disk":
            return self._fill_disk(folder)
        if fault.place.endswith("Group") or fault.place == "agent":
            place = self._nodes.agent if self._nodes and fault.place == "agent" else fault.place
            if not _until(run, lambda: bool(run.workers(place)), LIMIT_S):
                return None
            try:
                self._random.choice(run.workers(place)).send_signal(signal.Signals[fault.kind])
            except (IndexError, OSError):  # it ended just now
                return None
            return time.time()
        struck = folder / STRUCK
        struck.unlink(missing_ok=True)
        scratch = folder / "planning"
        scratch.write_text(fault.name)
        began = time.time()
        scratch.rename(folder / PLANNED)
        if not _until(run, struck.exists, LIMIT_S) and not struck.exists():
            return None
        return max(began, struck.stat().st_ctime)

    def _fill_disk(self, folder: Path) -> float:
        with contextlib.suppress(OSError), (folder / "disk" / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        return time.time()


def _ends(fault: Fault, backend: str) -> bool:
    """Whether nothing else may come of the fault than the run's end."""
    return fault.place in ("driver", "disk") or (backend == "serial" and bool(fault.words))


def _statuses(fault: Fault) -> tuple[int, ...]:
    """Exit statuses that a run may have that the fault ends."""
    if fault.place == "driver":
        return {"SIGTERM": (143,), "SIGINT": (130,), "SIGHUP": (129,), "SIGKILL": (-9,)}[fault.kind]
    return (1, 2, 3)


def last_step(experiment: Path) -> int:
    """Training steps that the experiment's newest run has logged."""
    for run in sorted(experiment.glob("*"), reverse=True):
        file = run / "metrics.jsonl"
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in reversed(lines):
                try:
                    return int(json.loads(line)["step"])
                except (ValueError, KeyError):
                    continue
    return 0


def _saved(experiment: Path) -> bool:
    """Whether there is a checkpoint: a run's first one comes some time after its first step, and faults before it would
    leave none."""
    return any(complete_checkpoints(run / "checkpoints") for run in experiment.glob("*"))


def _checkpoint_problems(experiment: Path) -> list[str]:
    """What is wrong with the newest checkpoint."""
    for run in sorted(experiment.glob("*"), reverse=True):
        if found := complete_checkpoints(run / "checkpoints"):
            try:
                verify(found[-1])
            except CheckpointError as error:
                return [f"checkpoint: {error}"]
            return []
    return ["checkpoint: there is none"]


def _until(run: Driven, condition: Callable[[], object], seconds: float) -> bool:
    """Wait until the condition holds (True), or the run has ended or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        if run.poll() is not None:
            return bool(condition())
        time.sleep(0.02)
    return False


def record(verdict: Verdict) -> str:
    return json.dumps(asdict(verdict))


def unlimited_core() -> None:
    """No core files: a campaign has many crashes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
