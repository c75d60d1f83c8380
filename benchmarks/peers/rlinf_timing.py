"""Times RLinf's functions (runs in the peers' environment).

Each line on standard input is ``function<TAB>workload<TAB>repetitions``, each on standard output its
``CPU-ms<TAB>wall-ms``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from rlinf.algorithms import losses  # pyright: ignore[reportMissingImports]
from rlinf.algorithms.registry import calculate_adv_and_returns  # pyright: ignore[reportMissingImports]

from benchmarks.peers.workload import GROUP, Workload, draw, measure


def advantages(w: Workload, adv_type: str) -> object:
    return calculate_adv_and_returns(
        task_type="embodied",
        adv_type=adv_type,
        reward_type=w.level,
        rewards=w.rewards,
        dones=torch.cat((torch.zeros_like(w.ended[:1]), w.ended)),
        values=w.values,
        loss_mask=w.valid,
        gamma=0.99,
        gae_lambda=0.95,
        group_size=GROUP,
        normalize_advantages=False,
    )


def ppo(w: Workload) -> None:
    leaf = w.logprobs.detach().requires_grad_()
    loss, _ = losses.compute_ppo_actor_loss(
        logprobs=leaf,
        old_logprobs=w.old_logprobs,
        advantages=w.advantages,
        loss_mask=w.mask,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )
    loss.backward()


FUNCTIONS: dict[str, Callable[[Workload], object]] = {
    "gae": lambda w: advantages(w, "gae"),
    "grpo": lambda w: advantages(w, "grpo"),
    "ppo loss, forward and backward": ppo,
}


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    workload = cache(draw)
    for line in sys.stdin:
        function, name, repetitions = line.rstrip("\n").split("\t")
        cpu, wall = measure(partial(FUNCTIONS[function], workload(name)), int(repetitions))
        print(cpu, wall, sep="\t", flush=True)


if __name__ == "__main__":
    main()
