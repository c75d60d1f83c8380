from __future__ import annotations

import torch

from embodied_rl.algorithms.statistics import Diagnostics
from tests.stand_in import stand_in_accelerator


def part(units: list[float], mask: list[bool]) -> Diagnostics:
    diagnostics = Diagnostics()
    diagnostics.add_mean("mean", torch.tensor(units), torch.tensor(mask, dtype=torch.bool))
    diagnostics.add_max("max", torch.tensor(units), torch.tensor(mask, dtype=torch.bool))
    return diagnostics


def test_parts_of_different_size_combine_to_the_whole() -> None:
    whole = part([1.0, 2.0, 6.0, 99.0], [True, True, True, False])
    merged = part([1.0], [True])
    merged.merge(part([2.0, 6.0, 99.0], [True, True, False]))
    assert merged.result() == whole.result() == {"mean": 3.0, "max": 6.0}


def test_any_number_of_parts() -> None:
    diagnostics, flags = Diagnostics(), torch.tensor([True, False])
    for number in range(200):
        more = part([float(number)], [True])
        more.add_mean("share", flags, torch.ones(2, dtype=torch.bool))
        diagnostics.merge(more)
    assert diagnostics.result() == {"mean": 99.5, "max": 199.0, "share": 0.5}
    assert diagnostics.pair("share").tolist() == [200.0, 400.0]


def test_reduce_over_ranks_uses_one_collective_each() -> None:
    mine, other = part([1.0], [True]), part([2.0, 6.0], [True, True])
    calls: list[tuple[int, ...]] = []

    def plus(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(tensor.shape))
        return tensor + torch.stack([other.pair("mean")])

    mine.reduce(plus, lambda tensor: torch.maximum(tensor, torch.tensor([6.0], dtype=torch.float64)))
    assert mine.result() == {"mean": 3.0, "max": 6.0}
    assert calls == [(1, 2)]


def test_numbers_of_the_cpu_and_of_an_accelerator_combine() -> None:
    with stand_in_accelerator() as device:
        diagnostics, on_device = part([1.0], [True]), Diagnostics()
        diagnostics.add_mean("known before", torch.ones(1), torch.ones(1, dtype=torch.bool))
        units, mask = torch.tensor([3.0, 8.0], device=device), torch.ones(2, dtype=torch.bool, device=device)
        on_device.add_mean("found", units, mask)
        on_device.add_mean("mean", units, mask)
        on_device.add_max("max", units, mask)
        on_device.add_max("largest", units, mask)
        diagnostics.merge(on_device)
        diagnostics.reduce(lambda tensor: tensor, lambda tensor: tensor)
        assert diagnostics.pair("known before").device.type == device
        assert diagnostics.result() == {"mean": 4.0, "known before": 1.0, "found": 5.5, "max": 8.0, "largest": 8.0}


def test_nothing_valid_gives_no_number() -> None:
    empty = part([1.0], [False])
    assert empty.result() == {}
    empty.merge(part([4.0], [True]))
    assert empty.result() == {"mean": 4.0, "max": 4.0}
    assert part([], []).result() == {}


def test_pair_is_sum_and_count() -> None:
    assert part([1.0, 2.0, 6.0, 99.0], [True, True, True, False]).pair("mean").tolist() == [9.0, 3.0]
    assert Diagnostics().pair("mean").tolist() == [0.0, 0.0]


def test_it_holds_no_graph() -> None:
    units = torch.ones(2, requires_grad=True)
    diagnostics = Diagnostics()
    diagnostics.add_mean("mean", units, torch.ones(2, dtype=torch.bool))
    assert not diagnostics.pair("mean").requires_grad
