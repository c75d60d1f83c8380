"""What it takes to decide: ``python -m benchmarks.acting [--models pi0 smolvla ...] [--repeat 10] [--compile]``.

CPU milliseconds of ``act`` for four observations, random weights, one thread, the median of calls that alternate
between the variants in one process. The models have the structure of the published ones at a sixteenth of their width
or less: an expert of 6 layers and width 256 with 10 denoising steps for 50 actions, behind a prefix of pictures and
words; for openvla and openvla_oft their tiny folders.

appended: keys and values of the prefix are copied in front of the actions' at each step, as where gradients are taken.
in place: into buffers that hold the prefix already. compiled: ``rollout.torch_compile=true``, and what compiling took,
in seconds of all processes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import Policy, PolicyOutput, PolicySpec
from embodied_rl.models.compilation import compile_acting
from embodied_rl.models.flow.lerobot_folder import ARCHITECTURE
from embodied_rl.models.registry import build_policy, policy_class

ENVS = 4
CAMERAS = {"agentview": (128, 128), "wrist": (128, 128)}
WIDE: Mapping[str, Mapping[str, Any]] = {
    "paligemma": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 64},
    "expert": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 64},
    "text": {
        "hidden_size": 320,
        "intermediate_size": 640,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 64,
    },
}
"""Parts of a small folder's architecture, as they are here."""
SIZES: Mapping[str, Any] = {"chunk_size": 50, "n_action_steps": 50, "num_vlm_layers": 6}


def folder_of(model: str, folder: Path) -> None:
    """Write a folder of random weights."""
    plain: Any = policy_class(model)
    if not hasattr(plain, "tiny_config"):
        plain.write_tiny(folder)
        return

    class Wide(plain):
        @classmethod
        def tiny_config(cls, vocabulary: int) -> dict[str, Any]:
            config = super().tiny_config(vocabulary)
            parts = config[ARCHITECTURE]
            wide = {name: {**parts[name], **sizes} for name, sizes in WIDE.items() if name in parts}
            if "text" in wide:
                wide["text"]["vocab_size"] = vocabulary
            sizes = {name: size for name, size in SIZES.items() if name in config}
            return {**config, **sizes, "image_resolution": [112, 112], ARCHITECTURE: {**parts, **wide}}

    Wide.write_tiny(folder)


def observation() -> EnvObs:
    generator = torch.Generator().manual_seed(0)
    images = {
        name: torch.randint(0, 256, (ENVS, *size, 3), dtype=torch.uint8, generator=generator)
        for name, size in CAMERAS.items()
    }
    text = ("put the black bowl in the bottom drawer of the cabinet and close it",) * ENVS
    return EnvObs(
        env_ids=torch.arange(ENVS), images=images, state=torch.randn(ENVS, 8, generator=generator), instructions=text
    )


def policy_of(model: str, folder: Path) -> Policy:
    chunk = 1 if model == "openvla" else 8
    spec = PolicySpec(action_dim=7, num_action_chunks=chunk, state_dim=8, image_shapes=CAMERAS, values_per_chunk=1)
    params = {"unnorm_key": "libero_spatial_no_noops"} if model.startswith("openvla") else {}
    torch.manual_seed(0)
    return build_policy(model, spec, params, str(folder)).eval().requires_grad_(False)


def measured(variants: Mapping[str, Policy], repeat: int) -> dict[str, float]:
    """CPU milliseconds of each, after two calls that warm up."""
    obs, spent = observation(), {name: [] for name in variants}
    for number in range(repeat + 2):
        for name, policy in variants.items():
            start = time.process_time()
            decide(policy, obs)
            if number >= 2:
                spent[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(times) for name, times in spent.items()}


@torch.inference_mode()
def decide(policy: Policy, obs: EnvObs) -> PolicyOutput:
    return policy.act(obs, greedy=False, temperature=1.0, generator=torch.Generator().manual_seed(0))


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of this process and of those that it started and that ended."""

    def spent() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    start = spent()
    work()
    return spent() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["pi0", "pi05", "smolvla", "openvla", "openvla_oft"])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("model", "appended", "in place", "compiled", "compiling", "largest difference")
    for model in given.models:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            folder_of(model, folder)
            variants = {"in place": policy_of(model, folder)}
            if hasattr(variants["in place"], "_in_place"):
                appended: Any = policy_of(model, folder)
                appended._in_place = False
                variants["appended"] = appended
            compiling = 0.0
            if given.compile:
                compiled = variants["compiled"] = policy_of(model, folder)
                compile_acting(compiled, "cpu", cuda_graphs=False)
                compiling = cpu_seconds(lambda policy=compiled: decide(policy, observation()))
            found = measured(variants, given.repeat)
            plain = decide(variants["in place"], observation()).actions
            worst = max(float((decide(p, observation()).actions - plain).abs().max()) for p in variants.values())
        cells = [f"{found[name]:.1f} ms" if name in found else "" for name in ("appended", "in place", "compiled")]
        table.add_row(model, *cells, f"{compiling:.0f} s" if compiling else "", f"{worst:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
