"""The stand-in accelerator refuses what a GPU refuses, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.stand_in import DEVICE, stand_in_accelerator

ON_CPU = torch.arange(1.0, 4.0)
MIXTURES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + ON_CPU,
    "stack": lambda x: torch.stack([x, ON_CPU]),
    "stack of numbers": lambda x: torch.stack([x[0], ON_CPU[0]]),
    "where": lambda x: torch.where(ON_CPU > 1, x, 0.0),
    "mask of a CPU tensor": lambda x: ON_CPU[x > 1],
    "into a CPU number": lambda x: torch.tensor(0.0).add_(x[0]),
    "product": lambda x: ON_CPU @ x,
    "index_add": lambda x: x.index_add_(0, torch.arange(3), x),
    "generator": lambda x: torch.randn(3, device=DEVICE, generator=torch.Generator()),
    "layer": lambda x: nn.Linear(3, 2)(x),
}
ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "a CPU number": lambda x: x + torch.tensor(1.0),
    "a CPU index": lambda x: x[torch.tensor([0, 2])],
    "a CPU mask": lambda x: x[ON_CPU > 1],
    "copy": lambda x: x.clone().copy_(ON_CPU),
    "assignment": lambda x: x.clone().__setitem__(slice(0, 2), torch.ones(2)),
    "constants": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=DEVICE),
    "its generator": lambda x: torch.randn(3, device=DEVICE, generator=torch.Generator(DEVICE)),
}


@pytest.fixture
def x() -> Iterator[Tensor]:
    with stand_in_accelerator() as device:
        yield ON_CPU.to(device)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", MIXTURES)
def test_mixtures_are_refused(x: Tensor, case: str, inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match=r"on the same device|result's device"):
        MIXTURES[case](x)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", ALLOWED)
def test_what_a_gpu_takes(x: Tensor, case: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        result = ALLOWED[case](x)
    assert result is None or result.device.type == DEVICE


def test_numbers_have_to_be_fetched(x: Tensor) -> None:
    with pytest.raises((RuntimeError, TypeError), match="numpy"):
        x.numpy()
    assert x.cpu().tolist() == x.tolist() == [1.0, 2.0, 3.0]
    assert x.cpu().device.type == "cpu"


def test_views_share_memory_and_gradients_are_on_the_device(x: Tensor) -> None:
    x[1:].zero_()
    assert x.tolist() == [1.0, 0.0, 0.0]
    layer = nn.Linear(3, 1).to(DEVICE)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device.type == DEVICE
    assert layer.weight.grad.tolist() == [[1.0, 0.0, 0.0]]
