"""Memory that a large policy takes to start, and to train: ``python -m benchmarks.start_memory``, tables as Markdown.

A random OpenVLA-OFT with the published image encoders, its language model as large as ``--hidden`` and ``--layers``
say, is written in bfloat16 and trained in float32. Each actor rank builds it whole before it is sharded, or as stored
(:mod:`embodied_rl.models.weights.stored`). Memory is anonymous: pages of the file are shared by all processes, and the
kernel drops them when it wants to. ``--train`` instead makes one training step of LIBERO with adapters, as users do;
``--checkout`` has another version of the project make it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.openvla.files import CONFIG_FILE, PROCESSOR_FILE
from embodied_rl.models.openvla.network import OpenVlaNetwork
from embodied_rl.models.openvla.tiny import write_tiny
from embodied_rl.models.registry import build_policy
from embodied_rl.models.weights.folder import INDEX_FILE, WEIGHTS_FILE
from embodied_rl.models.weights.stored import as_stored
from embodied_rl.training.sharding import init_process_group, shard
from tests.training.learner import training_config

ENCODERS = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
IMAGE_SIZE = 224
GIB = 2**30
SAMPLED_S = 0.02


def write_random(directory: Path, *, hidden: int, layers: int, encoders: list[str], image_size: int) -> int:
    """A folder of random bfloat16 weights in one file a block; returns how many parameters it has."""
    write_tiny(directory, with_l1_head=False)
    (directory / WEIGHTS_FILE).unlink()
    config = json.loads((directory / CONFIG_FILE).read_text())
    config["text_config"] |= {
        "hidden_size": hidden,
        "intermediate_size": hidden * 43 // 16,  # Llama 2's proportions, as are heads of 128
        "num_hidden_layers": layers,
        "num_attention_heads": max(hidden // 128, 1),
    }
    config |= {"timm_model_ids": encoders, "image_sizes": [image_size, image_size], "torch_dtype": "bfloat16"}
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    processor = json.loads((directory / PROCESSOR_FILE).read_text())
    processor["input_sizes"] = [[3, image_size, image_size]] * 2
    (directory / PROCESSOR_FILE).write_text(json.dumps(processor))
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in OpenVlaNetwork(config).state_dict().items()}
    files: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number, names in enumerate(_parts(list(shapes)), 1):
        file = f"model-{number:05}.safetensors"
        tensors = {
            name: (0.02 * torch.randn(shapes[name], generator=generator)).bfloat16()
            if len(shapes[name]) > 1
            else torch.ones(shapes[name], dtype=torch.bfloat16)
            for name in names
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum(shape.numel() for shape in shapes.values())


def _parts(names: list[str], size: int = 40) -> Iterator[list[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def anonymous(pid: int | str = "self") -> int:
    """Bytes of memory that belong to a process alone."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """The most anonymous memory, in bytes, that this process has above what it has now; filled in at the end."""
    found, start, done = [0], anonymous(), threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLED_S):
            found[0] = max(found[0], anonymous() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    yield found
    done.set()
    thread.join()
    found[0] = max(found[0], anonymous() - start)


def start(pipe: Connection, rank: int, ranks: int, rendezvous: str, folder: str, stored: bool) -> None:
    """A rank of the actor, until its policy is sharded."""
    torch.set_num_threads(1)
    mesh = init_process_group(device="cpu", rank=rank, world_size=ranks, rendezvous=rendezvous)
    spec = PolicySpec(
        action_dim=7,
        num_action_chunks=8,
        state_dim=8,
        image_shapes={"agentview": (IMAGE_SIZE, IMAGE_SIZE)},
        values_per_chunk=0,
    )
    torch.empty(1).to_sparse()  # what torch allocates once
    began = time.monotonic()
    with peak() as found:
        with as_stored() if stored else nullcontext():
            policy = build_policy("openvla_oft", spec, {"suite": "libero_10"}, folder)
        shard(policy, mesh, training_config("ppo").actor.fsdp_config)
    pipe.send((found[0], _bytes(policy), time.monotonic() - began))


def _bytes(policy: Policy) -> tuple[int, int]:
    """Of the rank's shards, and of the largest unit whole."""
    from torch.distributed.tensor import DTensor

    own = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in policy.parameters())
    units = [sum(4 * p.numel() for p in unit.parameters()) for unit in policy.shard_units()]
    root = 4 * sum(p.numel() for p in policy.parameters()) - sum(units)
    return own, max(*units, root)


def starts(folder: Path, ranks: int, *, stored: bool) -> tuple[int, int, int, float]:
    """(peak, shards, largest unit) in bytes of the rank with the highest peak, and seconds."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = theirs, rank, ranks, str(Path(place) / "rendezvous"), str(folder), stored
            processes.append(context.Process(target=start, args=arguments))
            processes[-1].start()
            pipes.append(ours)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    highest, (own, unit), seconds = max(found)
    return highest, own, unit, seconds


def trains(folder: Path, checkout: Path, options: list[str]) -> dict[str, int]:
    """Process -> most bytes that it had in memory, in one training step; ``all``: most that all had together, with
    what they share counted once."""
    with tempfile.TemporaryDirectory() as place:
        command = [
            *(sys.executable, "train.py", "env=libero_10", "model=openvla_oft", f"model.path={folder}"),
            *("algorithm=ppo", "algorithm.sampling_params.temperature=1.6", "model.lora.rank=32"),
            *("env.task_ids=[0]", "env.train.total_num_envs=4", "algorithm.group_size=2"),
            *("env.train.max_episode_steps=16", "env.eval.total_num_envs=2", "env.eval.max_episode_steps=16"),
            *("env.eval.episodes_per_task=1", "runner.max_steps=1", "runner.save_interval=1"),
            *("rollout.pipeline_stage_num=1", "actor.micro_batch_size=2", f"runner.output_dir={place}", *options),
        ]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "2"}
        run = subprocess.Popen(command, cwd=checkout, env=environment)
        most: dict[str, int] = {}
        while run.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                driver = psutil.Process(run.pid)
                together = 0
                for process in [driver, *driver.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess, OSError):
                        memory: Any = process.memory_full_info()
                        name = "driver" if process.pid == run.pid else process.name()
                        most[name] = max(most.get(name, 0), memory.rss)
                        together += memory.pss
                most["all"] = max(most.get("all", 0), together)
            time.sleep(0.3)
        if run.returncode:
            raise SystemExit(f"the training step failed with {run.returncode}")
        return most


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_memory", description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the language model (7B: 4096)")
    parser.add_argument("--layers", type=int, default=4, help="its layers (7B: 32)")
    parser.add_argument("--small", action="store_true", help="small image encoders, too")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="keep the weights there, or take those that are")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--checkout", type=Path, default=Path())
    parser.add_argument("options", nargs="*", help="more overrides of the training step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder: Path = options.folder or Path(place) / "weights"
        if not folder.exists():
            encoders = ["vit_tiny_test_dinov2", "vit_tiny_test_siglip"] if options.small else ENCODERS
            size = 56 if options.small else IMAGE_SIZE
            count = write_random(
                folder, hidden=options.hidden, layers=options.layers, encoders=encoders, image_size=size
            )
            print(f"{count / 1e9:.3f} B parameters, {2 * count / GIB:.2f} GiB in the file\n")
        if options.train:
            print("| process | most, GiB |\n|---|---|")
            for name, most in trains(folder.resolve(), options.checkout.resolve(), options.options).items():
                print(f"| {name} | {most / GIB:.2f} |")
            return
        print("| ranks | built | peak of a rank, GiB | its shards | largest unit | peak, of both | seconds |")
        print("|---|---|---|---|---|---|---|")
        for ranks in options.ranks:
            for stored in (False, True):
                most, own, unit, seconds = starts(folder, ranks, stored=stored)
                print(
                    f"| {ranks} | {'as stored' if stored else 'whole'} | {most / GIB:.2f} | {own / GIB:.2f} | "
                    f"{unit / GIB:.2f} | {most / (own + unit):.2f} | {seconds:.1f} |"
                )


if __name__ == "__main__":
    main()
