from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.start_memory import starts, write_random


@pytest.mark.slow
@pytest.mark.cold_start
def test_a_rank_never_has_more_than_its_shards_and_a_unit(tmp_path: Path) -> None:
    encoders = ["vit_tiny_test_dinov2", "vit_tiny_test_siglip"]
    parameters = write_random(tmp_path, hidden=512, layers=32, encoders=encoders, image_size=56)
    most, own, unit, _ = starts(tmp_path, 2, stored=True)
    assert own == pytest.approx(4 * parameters / 2, rel=0.01)
    assert most < 1.1 * (own + unit)
    whole, *_ = starts(tmp_path, 2, stored=False)
    assert whole > 4 * parameters > 1.1 * (own + unit)
