"""Imitation with all demonstrations in a GPU's memory: the loss of ``task=sft`` at several times its speed.

Usage: python scripts/imitate_on_gpu.py FOLDER --data DATASET [DATASET ...] [--minutes 4]
           [--params '{"hidden_size": 160}'] [--batch 512] [--lr 1e-3] [--shift 2] [--seed 0] [--device cuda]

FOLDER is new and gets the weights, as ``python train.py export`` writes them. It prints how to use them. The
learning rate falls as a cosine over the minutes, after 3 % of them, so a faster machine takes more steps. A frame takes
96 KiB with two cameras of 128 by 128. Nothing is evaluated, and there are no checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.cli import config_of
from embodied_rl.commands.export import describe, use_of
from embodied_rl.commands.terminal import new_folder, refuse_existing
from embodied_rl.demonstrations.augmentation import jitter, shift
from embodied_rl.demonstrations.dataset import Aggregate, Demonstrations
from embodied_rl.evaluation.views import Views, spread
from embodied_rl.models.base import ActionStatistics, Policy, PolicySpec
from embodied_rl.models.registry import build_policy
from embodied_rl.schema import EmbodiedSftConfig, OptimConfig
from embodied_rl.training.optimizer import build_optimizer, set_learning_rates

JITTER = 0.2
"""Largest relative change of brightness, contrast and saturation."""
WARM_UP = 0.03
READ_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Frames:
    """F demonstrated frames, on the device."""

    inputs: Mapping[str, Tensor]
    """The policy's, each [F,...]."""
    valid: Tensor
    """[F,C] bool, False beyond an episode's end."""

    @classmethod
    def read(cls, data: Aggregate, policy: Policy, device: str) -> Frames:
        parts: list[dict[str, Tensor]] = []
        for rows in torch.arange(data.num_frames).split(READ_AT_ONCE):
            obs, actions, valid = data.sample(rows)
            parts.append({**policy.demonstration(obs, actions), "valid": valid})
        joined = {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}
        return cls(inputs=joined, valid=joined.pop("valid"))

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """[size] int64, pass after pass in an order of its own."""
        device, order = self.valid.device, torch.empty(0, dtype=torch.int64, device=self.valid.device)
        while True:
            while len(order) < size:
                again = torch.randperm(len(self.valid), device=device, generator=generator)
                order = torch.cat([order, again])
            yield order[:size]
            order = order[size:]


def augmented(inputs: Mapping[str, Tensor], pixels: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The inputs with pictures shifted by up to ``pixels`` and in other colours, as ``data.augmentation`` does."""
    images = {name: tensor for name, tensor in inputs.items() if name.startswith("images/")}
    some = next(iter(images.values()))
    factors = 1 + JITTER * (2 * torch.rand(len(some), 3, device=some.device, generator=generator) - 1)
    changed = {}
    for name, tensor in images.items():
        offsets = torch.randint(-pixels, pixels + 1, (len(tensor), 2), device=tensor.device, generator=generator)
        changed[name] = jitter(shift(tensor, offsets), factors)
    return {**inputs, **changed}


def imitate(policy: Policy, frames: Frames, optim: OptimConfig, args: argparse.Namespace) -> int:
    """Train until the minutes are over.

    Returns:
        The optimiser's steps.
    """
    optimizer = build_optimizer(policy, optim)
    generator = torch.Generator(frames.valid.device).manual_seed(args.seed)
    batches, begin, step, said = frames.batches(args.batch, generator), time.monotonic(), 0, 0.0
    while (part := (time.monotonic() - begin) / (60 * args.minutes)) < 1:
        set_learning_rates(optimizer, min(1.0, part / WARM_UP) * 0.5 * (1 + math.cos(math.pi * part)))
        rows = next(batches)
        inputs = {name: tensor[rows] for name, tensor in frames.inputs.items()}
        scores = policy.evaluate(augmented(inputs, args.shift, generator), temperature=1.0).logprobs
        mask = frames.valid[rows].unsqueeze(-1).expand_as(scores)
        loss = -(scores * mask).sum() / mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), optim.clip_grad or math.inf)
        optimizer.step()
        step += 1
        if time.monotonic() - said > 10:
            said = time.monotonic()
            passes = step * args.batch / len(frames.valid)
            print(f"{said - begin:.0f} s: step {step}, {passes:.1f} passes, loss {loss.item():.3f}", flush=True)
    return step


def views(parts: Sequence[Demonstrations]) -> Views | None:
    """What the episodes begin with."""
    shown = [part.sample(torch.from_numpy(spread(part.first_frames)))[0].images for part in parts]
    return Views.merged(Views.of({camera: tensor.numpy() for camera, tensor in images.items()}) for images in shown)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--params", type=json.loads, default={})
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--shift", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    refuse_existing(args.folder)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    config = config_of(
        "task=sft", "env=dummy", "model=tiny_vla", f"data.path={args.data[0]}", f"actor.optim.lr={args.lr}"
    )
    assert isinstance(config, EmbodiedSftConfig)
    parts = [Demonstrations(path, chunk=config.model.num_action_chunks) for path in args.data]
    data = Aggregate(parts)
    spec = PolicySpec(
        action_dim=parts[0].action_dim,
        num_action_chunks=config.model.num_action_chunks,
        state_dim=parts[0].state_dim,
        image_shapes=parts[0].cameras,
        values_per_chunk=0,
    )
    policy = build_policy("tiny_vla", spec, args.params)
    policy.set_action_statistics(ActionStatistics(**{k: tuple(v) for k, v in data.action_statistics.items()}))
    frames = Frames.read(data, policy, args.device)
    step = imitate(policy.to(args.device).train(), frames, config.actor.optim, args)
    config.model.params.update(args.params)
    with new_folder(args.folder) as scratch:
        policy.cpu().save_pretrained(scratch)
        describe(scratch, PolicyRecord.of(config.model, spec), base=None, step=step)
        if (shown := views(parts)) is not None:
            shown.write(scratch)
    print(f"{args.folder}: after {step} steps of {args.batch} of {data.num_frames} frames")
    print(f"use it with: {use_of(args.folder)}")


if __name__ == "__main__":
    main()
