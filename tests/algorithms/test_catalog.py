from __future__ import annotations

import inspect

import pytest

from embodied_rl.algorithms.catalog import ADVANTAGES, POLICY_LOSSES, Entry, lookup

TENSORS = {"inputs", "logprobs", "old_logprobs", "advantages", "mask", "eps"}


@pytest.mark.parametrize("entry", [*ADVANTAGES.values(), *POLICY_LOSSES.values()], ids=lambda entry: entry.function)
def test_options_are_the_hyperparameters_of_the_function(entry: Entry) -> None:
    parameters = set(inspect.signature(entry.load()).parameters) - TENSORS
    assert parameters == set(entry.options)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.adv_type: got 'grp'.*did you mean 'grpo'"):
        lookup(ADVANTAGES, "adv_type", "grp")
