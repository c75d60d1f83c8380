"""``tiny_vla`` on one core: ``python -m benchmarks.tiny_vla [--quick] [--json FILE]``.

Speed: CPU milliseconds of an imitation step (forward, backward, AdamW) with 64 samples and of acting in 8 envs, with
two cameras of 128×128 pixels and chunks of 8 actions of 7 dimensions.

What it learns: three coloured blocks lie on a table, and the instruction says which of them to go to. The action is the
way there, at most 0.1 a step. After so many steps on scenes that are never shown twice, the table has the distance of
the most likely action from the right one in unseen scenes, and how often the instruction is followed: the action leads
to the block that was named rather than to one of the others (one in three by chance).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import ActionStatistics, Policy, PolicySpec
from embodied_rl.models.registry import build_policy

CHUNK, ACTIONS, STATE, SIZE = 8, 7, 8, 128
COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 200)}
REACH = 0.1
STATISTICS = ActionStatistics(
    min=(-REACH,) * 6 + (-1.0,),
    max=(REACH,) * 6 + (1.0,),
    mean=(0.0,) * 7,
    std=(0.5 * REACH,) * 6 + (1.0,),
    q01=(-REACH,) * 6 + (-1.0,),
    q99=(REACH,) * 6 + (1.0,),
)


def scenes(n: int, cameras: int, seed: int) -> tuple[EnvObs, Tensor, Tensor]:
    """Observations, the right actions [n,C,A] and all blocks' places [n,3,2] relative to the hand, the named first."""
    generator = torch.Generator().manual_seed(seed)
    hand = torch.rand(n, 2, generator=generator) * 1.6 - 0.8
    blocks = torch.rand(n, 3, 2, generator=generator) * 1.6 - 0.8
    named = torch.randint(3, (n,), generator=generator)
    pixels = (torch.arange(SIZE) + 0.5) / SIZE * 2 - 1
    image = torch.full((n, SIZE, SIZE, 3), 120, dtype=torch.uint8)
    for number, (place, half) in enumerate([*((blocks[:, k], 0.08) for k in range(3)), (hand, 0.05)]):
        rows, columns = ((pixels - place[:, axis, None]).abs() < half for axis in (1, 0))
        inside = rows[:, :, None] & columns[:, None, :]
        image[inside] = torch.tensor([*COLOURS.values(), (20, 20, 20)][number], dtype=torch.uint8)
    state = torch.zeros(n, STATE)
    state[:, :2] = hand
    order = torch.stack([(named + k) % 3 for k in range(3)], 1)
    ways = blocks.gather(1, order[..., None].expand(-1, -1, 2)) - hand[:, None]
    actions, position = [], torch.zeros(n, 2)
    for _ in range(CHUNK):
        step = (ways[:, 0] - position).clamp(-REACH, REACH)
        position = position + step
        near = ((ways[:, 0] - position).norm(dim=-1) < 0.05).float() * 2 - 1
        actions.append(torch.cat([step, torch.zeros(n, 4), near[:, None]], 1))
    obs = EnvObs(
        env_ids=torch.arange(n),
        images={f"camera{k}": image for k in range(cameras)},
        state=state,
        instructions=tuple(f"go to the {list(COLOURS)[int(k)]} block" for k in named),
    )
    return obs, torch.stack(actions, 1), ways


def make(params: dict[str, Any], cameras: int) -> Policy:
    torch.manual_seed(0)
    spec = PolicySpec(
        action_dim=ACTIONS,
        num_action_chunks=CHUNK,
        state_dim=STATE,
        image_shapes={f"camera{k}": (SIZE, SIZE) for k in range(cameras)},
        values_per_chunk=0,
    )
    policy = build_policy("tiny_vla", spec, params)
    policy.set_action_statistics(STATISTICS)
    return policy


def train_step(policy: Policy, optimizer: torch.optim.Optimizer, obs: EnvObs, actions: Tensor) -> float:
    loss = -policy(policy.demonstration(obs, actions), temperature=1.0).logprobs.mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def speed(params: dict[str, Any], rounds: int) -> dict[str, float]:
    """CPU milliseconds, the best of ``rounds``."""
    policy = make(params, 2)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, fused=True)
    obs, actions, _ = scenes(64, 2, 0)
    few, _, _ = scenes(8, 2, 0)
    steps, acts = [], []
    for _ in range(rounds):
        start = time.process_time()
        train_step(policy, optimizer, obs, actions)
        steps.append(time.process_time() - start)
        start = time.process_time()
        policy.act(few, greedy=True, temperature=1.0, generator=None)
        acts.append(time.process_time() - start)
    return {
        "parameters": float(sum(p.numel() for p in policy.parameters())),
        "train_step_ms": 1e3 * min(steps),
        "act_ms": 1e3 * min(acts),
    }


def learning(params: dict[str, Any], steps: int, lr: float, every: int) -> list[dict[str, float]]:
    """One camera, 64 new scenes a step, learning rate up over 20 steps and down to 0."""
    policy = make(params, 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr, fused=True)
    held_out, right, ways = scenes(256, 1, 10**6)
    found = []
    start = time.process_time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 20, 1 - step / steps)
        obs, actions, _ = scenes(64, 1, step)
        loss = train_step(policy, optimizer, obs, actions)
        if (step + 1) % every == 0 or step + 1 == steps:
            spent = time.process_time() - start
            done = policy.act(held_out, greedy=True, temperature=1.0, generator=None).actions
            towards = torch.nn.functional.cosine_similarity(done[:, :, :2].sum(1)[:, None], ways, dim=-1)
            found.append(
                {
                    "steps": float(step + 1),
                    "cpu_s": spent,
                    "loss": loss,
                    "error": (done[..., :2] - right[..., :2]).abs().mean().item(),
                    "followed": (towards.argmax(1) == 0).float().mean().item(),
                }
            )
            start += time.process_time() - start - spent
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny_vla", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, help="of the learning curve")
    parser.add_argument("--params", type=json.loads, default={}, help="model.params, as JSON")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = options.steps or (100 if options.quick else 600)
    console = Console()
    fast = speed(options.params, 3 if options.quick else 8)
    console.print(
        f"{fast['parameters'] / 1e6:.2f} M parameters; one core: {fast['train_step_ms']:.0f} CPU-ms a training step "
        f"with 64 samples, {fast['act_ms']:.0f} CPU-ms to act in 8 envs",
        highlight=False,
    )
    curve = learning(options.params, steps, options.lr, max(steps // 4, 1))
    table = Table(title="going to the block that the instruction names")
    for column in ("steps", "CPU s", "loss", "action error", "instruction followed"):
        table.add_column(column, justify="right")
    for row in curve:
        table.add_row(
            f"{row['steps']:.0f}",
            f"{row['cpu_s']:.0f}",
            f"{row['loss']:.3f}",
            f"{row['error']:.4f}",
            f"{row['followed']:.0%}",
        )
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"speed": fast, "learning": curve}, indent=2) + "\n")


if __name__ == "__main__":
    main()
