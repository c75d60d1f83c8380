from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from embodied_rl.errors import UserError
from embodied_rl.models.weights.folder import read, write, write_tensors
from embodied_rl.params import NOT_OF_WEIGHTS


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


@dataclass(frozen=True)
class Params:
    width: int = 4
    noise: float = field(default=0.0, metadata=NOT_OF_WEIGHTS)


@dataclass(frozen=True)
class LaterParams(Params):
    depth: int = 1
    """An option that older folders do not have."""


def test_weights_of_another_model_are_refused_but_not_for_how_it_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, wanted = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    write(made, Params(noise=0.5), Params(), tmp_path / "folder")
    for params in (Params(), Params(noise=0.9), LaterParams()):
        torch.nn.init.zeros_(wanted.weight)
        read(wanted, params, tmp_path / "folder")
        assert torch.equal(made.weight, wanted.weight)
    for params in (Params(width=5), LaterParams(depth=2)):
        with pytest.raises(UserError, match=r"config.json says params .*choose the model and model.params"):
            read(wanted, params, tmp_path / "folder")
