from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.errors import UserError
from embodied_rl.models.tiny_vla import hash_words

ROOT = Path(__file__).parents[3]
# CRC-32 of the standard check string is 0xCBF43926.
CHECK = 1 + 0xCBF43926 % 8191


def test_known_ids() -> None:
    ids = hash_words(["123456789", "Stack, 123456789!"], num_buckets=8192, max_words=4).tolist()
    assert ids[0] == [CHECK, 0, 0, 0]
    assert ids[1][1:] == [CHECK, 0, 0]


def test_the_same_in_another_process() -> None:
    code = (
        "from embodied_rl.models.tiny_vla import hash_words;"
        "print(hash_words(['open the top drawer'], num_buckets=8192, max_words=6).tolist())"
    )
    # Another hash seed: Python's own hash() would differ.
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT, env={"PYTHONHASHSEED": "1"}
    )
    here = hash_words(["open the top drawer"], num_buckets=8192, max_words=6).tolist()
    assert run.stdout == f"{here}\n"


def test_case_and_punctuation_do_not_matter_but_order_does() -> None:
    a, b, c = hash_words(["Open the DRAWER.", "open the drawer", "drawer the open"], num_buckets=8192, max_words=5)
    assert a.tolist() == b.tolist() != c.tolist()


@pytest.mark.parametrize("instruction", ["", "one two three four"])
def test_too_many_or_no_words(instruction: str) -> None:
    with pytest.raises(UserError, match=r"expected 1 to 3; for longer ones raise model\.params\.max_words"):
        hash_words([instruction], num_buckets=8192, max_words=3)
