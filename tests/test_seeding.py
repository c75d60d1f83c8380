"""The numbers themselves: runs that were begun with an earlier version are resumed bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.seeding import derived_seed, generator


def test_the_numbers_of_a_position() -> None:
    assert derived_seed(7, 3, 1) == 6665335680343557524
    assert derived_seed(7, 3, 1, bits=32) == 1060801321
    assert derived_seed(7, 3, 1, bits=31) == 530400660
    assert generator(7, 3, 1).integers(1000, size=4).tolist() == [718, 532, 254, 52]


def test_spawned_generators_are_numpys() -> None:
    first, second = np.random.SeedSequence(7, spawn_key=(2, 5)).spawn(2)
    for number, sequence in enumerate((first, second)):
        assert generator(7, spawn_key=(2, 5, number)).random() == np.random.default_rng(sequence).random()


@pytest.mark.parametrize("bits", [31, 32, 63, 64])
def test_seeds_have_the_bits_asked_for(bits: int) -> None:
    seeds = [derived_seed(0, position, bits=bits) for position in range(64)]
    assert max(seeds) < 2**bits
    assert max(seeds) >= 2 ** (bits - 1)
