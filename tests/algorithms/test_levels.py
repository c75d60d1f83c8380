from __future__ import annotations

import subprocess
import sys

import pytest

from embodied_rl.algorithms.catalog import LEVEL_PAIRS, check_levels


@pytest.mark.parametrize(("reward", "logprob"), sorted(LEVEL_PAIRS))
def test_legal_pairs_pass(reward: str, logprob: str) -> None:
    check_levels(reward, logprob)


def test_action_reward_with_chunk_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward_type=action_level.*logprob_type=chunk_level.*use logprob_type"):
        check_levels("action_level", "chunk_level")


@pytest.mark.parametrize(("reward", "logprob"), [("token_level", "token_level"), ("chunk_level", "step_level")])
def test_unknown_level_is_refused(reward: str, logprob: str) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        check_levels(reward, logprob)


def test_names_are_known_without_torch() -> None:
    """The config is checked before torch is loaded (seconds)."""
    code = "import sys; import embodied_rl.algorithms.catalog; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
