"""Shards come back bit for bit, whatever tensors there are and however many ranks hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from embodied_rl.checkpoints.shards import _DTYPES, ShardWriter, read_index
from embodied_rl.errors import CheckpointError
from tests.checkpoints.saved import saved_tensors
from tests.training.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(state: dict[str, Any], directory: Path) -> None:
    save(state, storage_writer=ShardWriter(directory / "actor"))


@pytest.mark.usefixtures("mesh")
def test_tensors_of_all_types_sizes_and_strides_come_back(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    tied = torch.randn(3, 5)
    state: dict[str, Tensor] = {
        "a.tied": tied,
        "b.tied": tied,
        "transposed": whole.t(),
        "column": whole[:, 1],
        "number": torch.tensor(0.1, dtype=torch.float64),
        "nothing": torch.zeros(0, 3),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        **{str(dtype): torch.tensor([1, 0, 1]).to(dtype) for dtype in _DTYPES},
    }
    write(state, tmp_path)
    back = saved_tensors(tmp_path)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(as_bytes(back[name]), as_bytes(tensor)), name
    [file] = (tmp_path / "actor").iterdir()
    assert torch.equal(load_file(file)["transposed"], whole.t()), "one rank's file is an ordinary one"


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.1, 0.2], "rate.*: only tensors can be saved"),
        (torch.zeros(2, dtype=torch.complex64), "rate: torch.complex64"),
    ],
)
def test_what_the_format_does_not_have_is_refused(value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=message):
        write({"rate": value}, tmp_path)


ROWS = {"one": 1, "three": 3, "none": 0}


def write_rows(mesh: DeviceMesh, directory: Path) -> None:
    write({name: distribute_tensor(rows(name), mesh, [Shard(0)]) for name in ROWS} | {"same": torch.ones(2)}, directory)


def rows(name: str) -> Tensor:
    return torch.arange(ROWS[name] * 4.0).view(-1, 4)


def read_rows(mesh: DeviceMesh, directory: Path) -> bool:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {name: distribute_tensor(torch.full_like(rows(name), -1), mesh, [Shard(0)]) for name in ROWS}
    load(dict(state), storage_reader=HuggingFaceStorageReader(str(directory / "actor")))
    return all(isinstance(t, DTensor) and torch.equal(t.full_tensor(), rows(name)) for name, t in state.items())


def test_more_ranks_than_rows(two_ranks: Ranks, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Parts of unequal size, and ranks that hold nothing of a tensor, or nothing at all."""
    two_ranks.run(write_rows, tmp_path / "two")
    write_rows(mesh, tmp_path / "one")
    for saved in (tmp_path / "two", tmp_path / "one"):
        back = saved_tensors(saved)
        assert all(torch.equal(back[name], rows(name)) for name in ROWS)
        assert read_rows(mesh, saved)
        assert two_ranks.run(read_rows, saved) == [True, True]
        assert {name: list(entry.size) for name, entry in read_index(saved / "actor").items()} == {
            "one": [1, 4],
            "three": [3, 4],
            "none": [0, 4],
            "same": [2],
        }


def test_a_gap_between_shards_is_noticed(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write_rows, tmp_path)
    first, *_ = sorted((tmp_path / "actor").iterdir())
    first.unlink()
    with pytest.raises(CheckpointError, match=r"not whole: parts of .*three"):
        read_index(tmp_path / "actor")
