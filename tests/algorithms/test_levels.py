from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from embodied_rl.algorithms.catalog import check_levels
from embodied_rl.schema.types import LogprobLevel, RewardLevel


@pytest.mark.parametrize("logprob", get_args(LogprobLevel))
@pytest.mark.parametrize("reward", get_args(RewardLevel))
def test_legal_pairs_pass(reward: RewardLevel, logprob: LogprobLevel) -> None:
    if (reward, logprob) != ("action_level", "chunk_level"):
        check_levels(reward, logprob)


def test_action_reward_with_chunk_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward_type=action_level.*logprob_type=chunk_level.*use logprob_type"):
        check_levels("action_level", "chunk_level")


def test_names_are_known_without_torch() -> None:
    """The config is checked before torch is loaded (seconds)."""
    code = "import sys; import embodied_rl.algorithms.catalog; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
