"""The pins of vLLM's environment beside those of the project."""

from __future__ import annotations

from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints"
ASKED_BY_VLLM = {"setuptools", "numba", "llvmlite"}
BROKEN = {"torchvision", "torchaudio", "torchcodec", "triton"}


def pins(name: str) -> dict[str, str]:
    lines = (CONSTRAINTS / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {package.lower().replace("_", "-"): version for package, version in pairs}


def test_what_both_have_is_of_the_same_version() -> None:
    project, vllm = pins("pins.txt"), pins("vllm-pins.txt")
    shared = project.keys() & vllm.keys()
    assert {name for name in shared if project[name] != vllm[name]} <= ASKED_BY_VLLM
    assert {"torch", "transformers", "hydra-core", "pydantic", "peft", "pytest"} <= shared


def test_what_breaks_vllm_on_a_cpu_is_left_out() -> None:
    assert not pins("vllm-pins.txt").keys() & BROKEN
