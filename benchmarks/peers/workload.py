"""One rollout to time advantages and losses on, and the clock. Both environments use it; it imports only torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

GROUP = 8
ROLLOUT = 64
ENVS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``ENVS`` envs for ``ROLLOUT`` chunks of C steps, with decisions of one level."""

    level: str
    """``chunk_level`` or ``action_level``."""
    rewards: Tensor
    """[T,N,C]."""
    ended: Tensor
    """[T,N,C] bool: the last step of the episode; most end within the rollout."""
    valid: Tensor
    """[T,N,C] bool."""
    values: Tensor
    """[T+1,N,V]."""
    logprobs: Tensor
    """[T*N] at chunk level, [T*N,C] at action level."""
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


WORKLOADS = {
    "C=1": (1, "chunk_level"),
    "C=8, chunk level": (8, "chunk_level"),
    "C=8, action level": (8, "action_level"),
}
FUNCTIONS = ("gae", "grpo", "ppo loss, forward and backward")


def draw(name: str) -> Workload:
    steps, level = WORKLOADS[name]
    generator = torch.Generator().manual_seed(0)
    total = ROLLOUT * steps
    end = torch.randint(total // 4, total * 5 // 4, (ENVS,), generator=generator)
    step = torch.arange(total)[:, None]

    def in_chunks(x: Tensor) -> Tensor:
        return x.view(ROLLOUT, steps, ENVS).transpose(1, 2).contiguous()

    valid = in_chunks(step <= end)
    units = (ROLLOUT * ENVS, steps) if level == "action_level" else (ROLLOUT * ENVS,)
    logprobs = -torch.rand(units, generator=generator)
    return Workload(
        level=level,
        rewards=torch.rand((ROLLOUT, ENVS, steps), generator=generator),
        ended=in_chunks(step == end),
        valid=valid,
        values=torch.randn((ROLLOUT + 1, ENVS, steps if level == "action_level" else 1), generator=generator),
        logprobs=logprobs,
        old_logprobs=logprobs - 0.2 * torch.randn(units, generator=generator),
        advantages=torch.randn(units, generator=generator),
        mask=valid.flatten(0, 1) if level == "action_level" else valid.any(-1).flatten(),
    )


def measure(run: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Median CPU-ms and wall-ms of a call."""
    cpu, wall = [], []
    for _ in range(repetitions):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        run()
        cpu.append(1e3 * (time.process_time() - cpu_start))
        wall.append(1e3 * (time.perf_counter() - wall_start))
    return median(cpu), median(wall)
