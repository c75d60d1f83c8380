from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from embodied_rl.models.weights.folder import write_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_what_the_umask_lets_them(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        write_tensors(path, {"w": torch.ones(2)})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_the_format_is_named(tmp_path: Path) -> None:
    """transformers 4, which OpenVLA's code pins, refuses a file that does not say that it is torch's."""
    write_tensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
