"""Simulators, a policy and a reward to which something happens when the campaign says so.

The campaign leaves ``<place> <fault>`` in a file of the folder ``$EMBODIED_RL_FAULTS``. Whoever comes to that place
first takes the file away and suffers the fault.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embodied_rl.envs.base import SimObs, SimStep
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.models.mlp import MlpPolicy

FOLDER: Final = "EMBODIED_RL_FAULTS"
PLANNED, STRUCK, BORN = "planned", "struck", "born"
SLOWDOWN: Final = 20
_SLOW_S: Final = 2.0
"""For so long a simulator is slow."""


def _raise() -> None:
    raise RuntimeError("a fault of the campaign")


def _exhaust_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    try:
        bytearray(2**33)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _exhaust_descriptors() -> None:
    held = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SUFFERED: Final[Mapping[str, Callable[[], object]]] = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(10_000),
    "memory": _exhaust_memory,
    "descriptors": _exhaust_descriptors,
}
"""Faults that can happen anywhere."""


def met(place: str) -> str | None:
    """The fault planned for here, if it is this one's; a common one has happened by then."""
    planned = Path(os.environ[FOLDER]) / PLANNED
    try:
        where, fault = planned.read_text().split()
        if where != place:
            return None
        planned.rename(planned.with_name(STRUCK))
    except (OSError, ValueError):  # there is none, or another one was faster
        return None
    if fault in SUFFERED:
        SUFFERED[fault]()
    return fault


class _Faulty:
    """What happens to a simulator, in front of an adapter."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._slow_until = 0.0
        with (Path(os.environ[FOLDER]) / BORN).open("a") as file:
            file.write(f"{time.time()}\n")

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        met("reset")
        super().reset(slots, reset_state_ids)  # type: ignore[misc]

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        fault, began = met("step"), time.monotonic()
        done: SimStep = super().step(slots, actions)  # type: ignore[misc]
        if fault == "slow":
            self._slow_until = began + _SLOW_S
        if began < self._slow_until:
            time.sleep((SLOWDOWN - 1) * (time.monotonic() - began))
        if fault == "nan":
            done.rewards[0] = np.nan
        if fault == "shape":
            return SimStep(rewards=done.rewards[:0], success=done.success)
        return None if fault == "none" else done  # type: ignore[return-value]

    def observe(self, slots: Sequence[int]) -> SimObs:
        fault = met("observe")
        seen: SimObs = super().observe(slots)  # type: ignore[misc]
        if fault == "nan":
            seen.state[0] = np.nan
        if fault == "shape":
            return SimObs(images=seen.images, state=seen.state[:, :1])
        return None if fault == "none" else seen  # type: ignore[return-value]


class FaultyDummy(_Faulty, DummyEnv):
    """``env=dummy`` with faults."""


def __getattr__(name: str) -> Any:
    """``FaultyLibero``, made when it is asked for: its module imports a simulator."""
    if name != "FaultyLibero":
        raise AttributeError(name)
    from embodied_rl.envs.libero.adapter import LiberoEnv

    return type(name, (_Faulty, LiberoEnv), {"__module__": __name__, "__doc__": "LIBERO with faults."})


class FaultyPolicy(MlpPolicy):
    """``mlp`` with faults: ``act`` in the rollout worker, ``update`` in the actor."""

    def act(self, *arguments: Any, **options: Any) -> Any:
        met("act")
        return super().act(*arguments, **options)

    def evaluate(self, replay_inputs: Mapping[str, Tensor], **options: Any) -> Any:
        fault = met("update") if self.training else None
        found = super().evaluate(replay_inputs, **options)
        if fault == "nan":
            found.logprobs.register_hook(lambda gradient: gradient * float("nan"))
        return found


def score(*, prompt: str, completion: str, answer: str) -> float | None:
    """A reward with faults."""
    del prompt
    fault = met("reward")
    if fault == "nan":
        return float("nan")
    if fault == "shape":
        return "a text"  # type: ignore[return-value]
    return float(completion.strip() == answer) + len(completion) % 7 / 100
