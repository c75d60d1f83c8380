"""Speed of the LIBERO adapter: ``python -m benchmarks.libero [--quick | --start] [--json FILE]``.

Two envs, chunks of 8 actions, two cameras of 128 by 128 pixels, LIBERO's own picture quality. Compared are

- ``chunked``: ``ChunkedEnv`` over ``LiberoEnv``, as an env worker runs it;
- ``bare``: a plain loop over the same ``LiberoEnv``, rendering as rarely;
- ``two processes``: one process per env, asked over pipes, the way vector envs usually work;
- ``upstream``: LIBERO's ``OffScreenRenderEnv`` as it is, which renders every step.

CPU-ms count all threads of all processes involved and are steadier than wall time on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from embodied_rl.envs.chunked import ChunkedEnv
from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
from embodied_rl.envs.libero.suites import load_suite

SUITE, TASK = "libero_goal", 7
FIRST_STATE = 50 * TASK
CHUNK, ENVS = 8, 2
PARAMS = LiberoParams(task_suite_name=SUITE)

Measured = tuple[float, float]
"""(wall, CPU) seconds."""


def action_chunk(rng: np.random.Generator, envs: int = ENVS) -> NDArray[np.float32]:
    """[envs,CHUNK,7] of small random motions."""
    return rng.uniform(-0.3, 0.3, (envs, CHUNK, 7)).astype(np.float32)


def measure(run: Callable[[], object]) -> Measured:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


class Bare:
    """``envs`` slots in a loop without any chunk machinery."""

    def __init__(self, envs: int) -> None:
        self.env, self.envs = LiberoEnv(envs, PARAMS, seed=0), envs
        self.rng = np.random.default_rng(0)
        self.env.reset(range(envs), range(FIRST_STATE, FIRST_STATE + envs))
        self.env.observe(range(envs))

    def chunk(self) -> None:
        self.play(action_chunk(self.rng, self.envs))

    def play(self, actions: NDArray[np.float32]) -> list[Any]:
        replies = []
        for slot in range(self.envs):
            rewards = [self.env.step([slot], actions[slot, c : c + 1]).rewards for c in range(CHUNK)]
            obs = self.env.observe([slot])
            replies.append((rewards, obs.state, dict(obs.images)))
        return replies


class Chunked:
    """The same through ``ChunkedEnv``."""

    def __init__(self) -> None:
        self.env = ChunkedEnv(
            LiberoEnv(ENVS, PARAMS, seed=0),
            env_ids=range(ENVS),
            num_action_chunks=CHUNK,
            max_episode_steps=10**9,
            auto_reset=False,
            ignore_terminations=True,
            use_rel_reward=True,
            reward_coef=1.0,
        )
        self.rng = np.random.default_rng(0)
        self.env.reset(list(range(FIRST_STATE, FIRST_STATE + ENVS)))

    def chunk(self) -> None:
        self.env.chunk_step(torch.from_numpy(action_chunk(self.rng)))


def _env_process(pipe: Connection) -> None:
    """One env; answers each action chunk with rewards and observation, and ``None`` with its CPU seconds and memory."""
    torch.set_num_threads(1)
    bare = Bare(1)
    pipe.send("ready")
    while True:
        actions = pipe.recv()
        if actions is None:
            pipe.send((time.process_time(), memory_mb()))
        elif isinstance(actions, str):
            return
        else:
            pipe.send(bare.play(actions))


class Processes:
    """One process per env."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.rng = np.random.default_rng(0)
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(ENVS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_env_process, args=(theirs,), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def chunk(self) -> None:
        for pipe, actions in zip(self.pipes, action_chunk(self.rng), strict=True):
            pipe.send(actions[None])
        for pipe in self.pipes:
            pipe.recv()

    def ask(self) -> list[tuple[float, float]]:
        for pipe in self.pipes:
            pipe.send(None)
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send("stop")
            process.join()


def _upstream_process(steps: int, pipe: Connection) -> None:
    task = load_suite(SUITE)[TASK]  # Imports LIBERO quietly.
    from libero.libero.envs import OffScreenRenderEnv

    env = OffScreenRenderEnv(bddl_file_name=task.bddl_file)
    env.seed(0)
    env.reset()
    env.set_init_state(task.init_states[0])
    rng = np.random.default_rng(0)
    env.step(np.zeros(7))
    pipe.send(measure(lambda: [env.step(rng.uniform(-0.3, 0.3, 7)) for _ in range(steps)]))
    env.close()
    os._exit(0)  # Its contexts complain when the interpreter takes them apart.


def _scenes_process(draft: bool, cache: bool, pipe: Connection) -> None:
    """Memory with 1, 2, .. 4 scenes, and the CPU seconds of building one, of its first pictures and of later ones."""
    torch.set_num_threads(1)
    params = LiberoParams(task_suite_name="libero_10", draft=draft, max_cached_scenes=4, cache_scenes=cache)
    env = LiberoEnv(4, params, seed=0)
    memory, build, first = [memory_mb()], 0.0, 0.0
    for slot in range(4):
        build += measure(lambda slot=slot: env.reset([slot], [50 * slot]))[1] / 4
        first += measure(lambda slot=slot: env.observe([slot]))[1] / 4
        memory.append(memory_mb())
    observe = measure(lambda: [env.observe([slot]) for slot in range(4)])[1] / 4
    pipe.send((memory, {"build and settle": build, "first two pictures": first, "observe": observe}))


def in_a_process(target: Callable[..., None], *args: object) -> Any:
    """What ``target(*args, pipe)`` sends, run in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    result = ours.recv()
    process.join()
    return result


def memory_mb() -> float:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


def parts(bare: Bare, rounds: int) -> dict[str, float]:
    """CPU-ms of the pieces."""
    action = np.zeros((1, 7), dtype=np.float32)
    env = bare.env

    def cpu_ms(run: Callable[[], object], times: int) -> float:
        return 1e3 * measure(lambda: [run() for _ in range(times)])[1] / times

    states = iter(range(FIRST_STATE + 10, FIRST_STATE + 50))
    return {
        "step": cpu_ms(lambda: env.step([0], action), 8 * rounds),
        "step, another slot every time": cpu_ms(lambda: [env.step([0], action), env.step([1], action)], 4 * rounds) / 2,
        "observe, two cameras": cpu_ms(lambda: env.observe([0]), 2 * rounds),
        "reset to a new state": cpu_ms(lambda: env.reset([0], [next(states)]), min(rounds, 10)),
        "reset to a state seen before": cpu_ms(lambda: env.reset([0], [FIRST_STATE]), 8 * rounds),
    }


def run(rounds: int) -> dict[str, Any]:
    samples: dict[str, list[Measured]] = {"chunked": [], "bare": [], "two processes": []}
    empty = memory_mb()
    bare = Bare(ENVS)
    shared_mb = memory_mb()
    chunked = Chunked()
    for _ in range(rounds):  # In turn, so that a busy machine hurts all alike.
        samples["chunked"].append(measure(chunked.chunk))
        samples["bare"].append(measure(bare.chunk))
    pieces = parts(bare, rounds)
    processes = Processes()
    for _ in range(rounds):
        before = sum(cpu for cpu, _ in processes.ask())
        wall, own = measure(processes.chunk)
        samples["two processes"].append((wall, own + sum(cpu for cpu, _ in processes.ask()) - before))
    separate_mb = sum(mb for _, mb in processes.ask())
    processes.close()
    steps = {name: ENVS * CHUNK for name in samples} | {"upstream": 2 * rounds}
    samples["upstream"] = [in_a_process(_upstream_process, steps["upstream"])]
    scenes = {"draft false": in_a_process(_scenes_process, False, False)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # The children's.
        for name, cache in (("draft true", False), ("its first run with cache_scenes", True), ("its second", True)):
            scenes[name] = in_a_process(_scenes_process, True, cache)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, MUJOCO_GL={os.environ['MUJOCO_GL']}",
        "rounds": rounds,
        "steps_per_second": {n: steps[n] / median(wall for wall, _ in s) for n, s in samples.items()},
        "cpu_ms_per_step": {n: 1e3 * median(cpu for _, cpu in s) / steps[n] for n, s in samples.items()},
        "parts_cpu_ms": pieces,
        "libero_10": {
            name: {"memory_mb_by_scenes": memory, "cpu_ms": {part: 1e3 * seconds for part, seconds in cpu.items()}}
            for name, (memory, cpu) in scenes.items()
        },
        "memory_mb": {"empty process": empty, "two envs, one process": shared_mb, "two processes": separate_mb},
    }


def start() -> dict[str, float]:
    """CPU time of one of two env workers of ``env=libero_10``: 32 envs on five scenes, until their first step and after
    it. The second start finds compiled scenes of the first."""
    slots, still = range(32), np.zeros((32, 7), dtype=np.float32)
    states = [100 * (slot % 5) + slot // 5 for slot in slots]
    env = LiberoEnv(32, LiberoParams(task_suite_name="libero_10", draft=True, max_cached_scenes=6), seed=0)
    cpu = {"imports, s": time.process_time()}
    cpu["first reset, s"] = measure(lambda: env.reset(slots, states))[1]
    cpu["first pictures, s"] = measure(lambda: env.observe(slots))[1]
    env.step(slots, still)
    cpu["to the first step, s"] = time.process_time()
    cpu["step, ms"] = 1e3 * measure(lambda: [env.step(slots, still + 0.3) for _ in range(4)])[1] / 128
    cpu["two pictures, ms"] = 1e3 * measure(lambda: [env.observe(slots) for _ in range(2)])[1] / 64
    cpu["reset to a new state, ms"] = 1e3 * measure(lambda: env.reset(slots, [s + 10 for s in states]))[1] / 32
    return cpu | {"most memory, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def compared(result: dict[str, Any]) -> dict[str, float]:
    speed = result["steps_per_second"]
    return {
        "a bare loop by LIBERO's own": speed["bare"] / speed["upstream"],
        "env worker's chunks by a bare loop": speed["chunked"] / speed["bare"],
    }


def report(result: dict[str, Any], console: Console) -> None:
    speed, cpu = result["steps_per_second"], result["cpu_ms_per_step"]
    table = Table(title=f"LIBERO, {SUITE} task {TASK}, {ENVS} envs, chunks of {CHUNK}, two cameras 128x128")
    for heading in ("", "env steps/s", "CPU-ms a step", "steps/s ÷ bare", "CPU of bare ÷ its"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in ("chunked", "bare", "two processes", "upstream"):
        table.add_row(
            name,
            f"{speed[name]:.1f}",
            f"{cpu[name]:.1f}",
            f"{speed[name] / speed['bare']:.2f}",
            f"{cpu['bare'] / cpu[name]:.2f}",
        )
    console.print(table)
    for title, values, unit in (("CPU time", result["parts_cpu_ms"], "ms"), ("memory", result["memory_mb"], "MB")):
        console.print(f"{title}: " + "; ".join(f"{name} {value:.4g} {unit}" for name, value in values.items()))
    for name, row in result["libero_10"].items():
        memory = " / ".join(f"{mb:.0f}" for mb in row["memory_mb_by_scenes"])
        cpu_ms = "; ".join(f"{part} {value:.0f}" for part, value in row["cpu_ms"].items())
        console.print(f"libero_10, {name}: {memory} MB with 0 / 1 / 2 / 3 / 4 scenes; CPU-ms: {cpu_ms}")
    console.print(result["machine"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about a minute")
    parser.add_argument("--start", action="store_true", help="only an env worker's start, in CPU time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.start:
        result = start()
        Console().print("; ".join(f"{name} {value:.3g}" for name, value in result.items()))
    else:
        result = run(rounds=4 if arguments.quick else 20)
        report(result, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
