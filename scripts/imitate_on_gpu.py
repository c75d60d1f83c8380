"""Imitation with all demonstrations in a GPU's memory: the loss of ``task=sft`` at several times its speed.

Usage: python scripts/imitate_on_gpu.py FOLDER --data DATASET [DATASET ...] [--minutes 4] [--write-every MINUTES]
           [--init WEIGHTS] [--params '{"hidden_size": 160}'] [--half] [--batch 512] [--lr 1e-3] [--shift 2] [--seed 0]
           [--device cuda]

FOLDER is new and gets the weights, an average over the last thousand steps or so, as ``python train.py export`` writes
them. It prints how to use them. They go on from WEIGHTS, another such folder, or begin with --params, and the range of
actions of the first data set. Data sets that are not there yet join as soon as they are: with --write-every, which
writes FOLDER-1, FOLDER-2 and so on meanwhile, they can be what an expert shows these weights on the machine's other
cores (``collect.takeover_after``). The learning rate falls as a cosine over the minutes, after 3 % of them, so a faster
machine takes more steps. A frame takes 96 KiB with two cameras of 128 by 128. Nothing is evaluated, and there are no
checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.cli import config_of
from embodied_rl.commands.export import describe, exported_policy, use_of
from embodied_rl.commands.terminal import new_folder, refuse_existing
from embodied_rl.demonstrations.augmentation import jitter, shift
from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.demonstrations.lerobot import metadata
from embodied_rl.evaluation.views import Views, spread
from embodied_rl.models.base import ActionStatistics, Policy, PolicySpec
from embodied_rl.models.registry import build_policy
from embodied_rl.models.tiny_vla import TinyVlaParams, TinyVlaPolicy
from embodied_rl.schema import EmbodiedSftConfig
from embodied_rl.training.optimizer import build_optimizer, set_learning_rates

JITTER = 0.2
"""Largest relative change of brightness, contrast and saturation."""
WARM_UP = 0.03
AVERAGED = 0.999
"""Decay of the average of the weights, a step; less in the first steps."""
READ_AT_ONCE = 2048
READERS = 4
"""Processes that decode videos."""


@dataclass(frozen=True, slots=True)
class Frames:
    """F demonstrated frames, on the device."""

    inputs: dict[str, Tensor]
    """The policy's, each [F,...]."""
    valid: Tensor
    """[F,C] bool, False beyond an episode's end."""

    def __len__(self) -> int:
        return len(self.valid)

    @classmethod
    def read(cls, data: Demonstrations, policy: Policy, device: str) -> Frames:
        parts: list[dict[str, Tensor]] = []
        for rows in torch.arange(data.num_frames).split(READ_AT_ONCE):
            obs, actions, valid = data.sample(rows)
            found = {**policy.demonstration(obs, actions), "valid": valid}
            parts.append({name: tensor.to(device) for name, tensor in found.items()})
        joined = {name: torch.cat([part.pop(name) for part in parts]) for name in [*parts[0]]}
        return cls(inputs=joined, valid=joined.pop("valid"))

    def and_those(self, other: Frames) -> Frames:
        """These, then the others. Both are used up: one tensor after the other is moved, as both have no room twice."""
        joined = {name: torch.cat([self.inputs.pop(name), other.inputs.pop(name)]) for name in [*self.inputs]}
        return Frames(joined, torch.cat([self.valid, other.valid]))

    def take(self, rows: Tensor) -> Frames:
        """Those of ``rows`` [N] int64."""
        return Frames({name: tensor[rows] for name, tensor in self.inputs.items()}, self.valid[rows])


@dataclass(slots=True)
class Passes:
    """Where in a pass over the frames training is; pass follows pass, each in an order of its own."""

    generator: torch.Generator
    left: Tensor = field(init=False)
    """int64, of the pass."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Let a new pass begin."""
        self.left = torch.empty(0, dtype=torch.int64, device=self.generator.device)

    def draw(self, size: int, of: int) -> Tensor:
        """[size] int64, rows of ``of``."""
        while len(self.left) < size:
            again = torch.randperm(of, device=self.generator.device, generator=self.generator)
            self.left = torch.cat([self.left, again])
        rows, self.left = self.left[:size], self.left[size:]
        return rows


def decode(path: Path) -> None:
    """In a process of its own, so that the data set can be opened at once from then on."""
    Demonstrations(path, chunk=1)


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


class Imitation:
    """A policy that imitates the data sets that are there, and an average of its weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        given = None if args.init is None else exported_policy(args.init)
        if not isinstance(given, TinyVlaPolicy | None):
            raise SystemExit(f"--init {args.init}: got a {type(given).__name__}, expected the weights of a tiny_vla")
        chunk = [] if given is None else [f"model.num_action_chunks={given.spec.num_action_chunks}"]
        config = config_of(
            "task=sft", "env=dummy", "model=tiny_vla", f"data.path={args.data[0]}", f"actor.optim.lr={args.lr}", *chunk
        )
        assert isinstance(config, EmbodiedSftConfig)
        self.config = config
        self.opened: list[Demonstrations] = []
        self.step = 0
        data = self._open(args.data[0])
        self.policy = (given or self._fresh(data)).to(args.device).train()
        self.average = copy.deepcopy(self.policy)
        self.weights: list[Tensor] = [*self.policy.parameters()]
        self.averages: list[Tensor] = [*self.average.parameters()]
        self.optimizer = build_optimizer(self.policy, config.actor.optim)
        self.noise = torch.Generator(args.device).manual_seed(args.seed)
        self.passes = Passes(torch.Generator(args.device).manual_seed(args.seed + 1))
        self.frames = self._read(args.data[0], data)

    def _fresh(self, data: Demonstrations) -> TinyVlaPolicy:
        spec = PolicySpec(
            action_dim=data.action_dim,
            num_action_chunks=self.config.model.num_action_chunks,
            state_dim=data.state_dim,
            image_shapes=data.cameras,
            values_per_chunk=0,
        )
        policy = build_policy("tiny_vla", spec, self.args.params)
        assert isinstance(policy, TinyVlaPolicy)
        policy.set_action_statistics(ActionStatistics(**{k: tuple(v) for k, v in data.action_statistics.items()}))
        return policy

    def _open(self, path: Path) -> Demonstrations:
        return Demonstrations(path, chunk=self.config.model.num_action_chunks)

    def _read(self, path: Path, data: Demonstrations) -> Frames:
        self.opened.append(data)
        print(f"{path}: {data.num_episodes} episodes, {data.num_frames} frames", flush=True)
        return Frames.read(data, self.policy, self.args.device)

    def add(self, path: Path) -> None:
        """Take a data set's frames, too, from now on."""
        self.frames = self.frames.and_those(self._read(path, self._open(path)))
        self.passes.begin()

    def train(self, part: float) -> Tensor:
        """A training step at ``part`` of the time; returns its loss."""
        set_learning_rates(self.optimizer, min(1.0, part / WARM_UP) * 0.5 * (1 + math.cos(math.pi * part)))
        frames = self.frames.take(self.passes.draw(self.args.batch, len(self.frames)))
        scores = self.policy.evaluate(augmented(frames.inputs, self.args.shift, self.noise), temperature=1.0).logprobs
        mask = frames.valid.unsqueeze(-1).expand_as(scores)
        loss = -(scores * mask).sum() / mask.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.config.actor.optim.clip_grad or math.inf)
        self.optimizer.step()
        self.step += 1
        decay = min(AVERAGED, (self.step - 1) / (self.step + 8))
        get_ema_multi_avg_fn(decay)(self.averages, self.weights, None)
        return loss.detach()

    def write(self, folder: Path) -> None:
        """The average, as a folder of weights."""
        fresh = asdict(TinyVlaParams())
        given = {name: value for name, value in asdict(self.policy.params).items() if value != fresh[name]}
        self.config.model.params.update(given)
        with new_folder(folder) as scratch:
            stored = copy.deepcopy(self.average).cpu()
            (stored.half() if self.args.half else stored).save_pretrained(scratch)
            describe(scratch, PolicyRecord.of(self.config.model, self.policy.spec), base=None, step=self.step)
            if (shown := views(self.opened)) is not None:
                shown.write(scratch)
        print(f"{folder}: after {self.step} steps of {self.args.batch} of {len(self.frames)} frames", flush=True)


def views(parts: Sequence[Demonstrations]) -> Views | None:
    """What the episodes begin with."""
    shown = [part.sample(torch.from_numpy(spread(part.first_frames)))[0].images for part in parts]
    return Views.merged(Views.of({camera: tensor.numpy() for camera, tensor in images.items()}) for images in shown)


def run(imitation: Imitation, args: argparse.Namespace) -> None:
    """Train until the minutes are over; data sets join as they come."""
    begin, said, written, seconds = time.monotonic(), 0.0, 0, 60 * args.minutes
    missing, reading = [*args.data[1:]], dict[Path, Future[None]]()
    with ProcessPoolExecutor(READERS, mp_context=get_context("spawn")) as readers:
        while (now := time.monotonic() - begin) < seconds:
            for path in [path for path in missing if (path / metadata.INFO).is_file()]:
                missing.remove(path)
                reading[path] = readers.submit(decode, path)
            for path in [path for path, ready in reading.items() if ready.done()]:
                reading.pop(path).result()
                imitation.add(path)
            loss = imitation.train(now / seconds)
            if now - said > 10:
                said, passes = now, imitation.step * args.batch / len(imitation.frames)
                print(f"{now:.0f} s: step {imitation.step}, {passes:.1f} passes, loss {loss.item():.3f}", flush=True)
            if args.write_every and now > 60 * args.write_every * (written + 1):
                written += 1
                imitation.write(args.folder.with_name(f"{args.folder.name}-{written}"))
        for path in [*missing, *reading]:
            print(f"{path}: came too late", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--write-every", type=float, default=0.0)
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--init", type=Path)
    begin.add_argument("--params", type=json.loads, default={})
    parser.add_argument("--half", action="store_true", help="store float16, which is loaded as float32")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--shift", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    refuse_existing(args.folder)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    imitation = Imitation(args)
    run(imitation, args)
    imitation.write(args.folder)
    print(f"use it with: {use_of(args.folder)}")


if __name__ == "__main__":
    main()
