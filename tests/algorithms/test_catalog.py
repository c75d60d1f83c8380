from __future__ import annotations

import dataclasses
import inspect
from typing import get_type_hints

import pytest

from embodied_rl.algorithms.advantages import AdvantageEstimate, AdvantageInputs
from embodied_rl.algorithms.catalog import ADVANTAGES, POLICY_LOSSES, Entry
from embodied_rl.errors import UserError
from embodied_rl.schema import AlgorithmConfig

TENSORS = {"inputs", "logprobs", "old_logprobs", "proximal_logprobs", "advantages", "mask", "eps"}
TABLES = {"adv_type": ADVANTAGES, "loss_type": POLICY_LOSSES}
NAMES = [(key, name) for key, table in TABLES.items() for name in table]


@pytest.mark.parametrize(
    "entry", [*ADVANTAGES.values(), *POLICY_LOSSES.values()], ids=lambda entry: str(entry.function)
)
def test_options_are_the_hyperparameters_of_the_function(entry: Entry) -> None:
    parameters = set(inspect.signature(entry.load()).parameters) - TENSORS
    assert parameters == set(entry.options)


@pytest.mark.parametrize(("key", "name"), NAMES)
def test_every_name_reaches_its_function(key: str, name: str) -> None:
    function = TABLES[key][name].load()
    hints = get_type_hints(function)
    if key == "adv_type":
        assert (hints["inputs"], hints["return"]) == (AdvantageInputs, AdvantageEstimate)
    else:
        assert {"logprobs", "old_logprobs", "advantages", "mask"} < set(hints)
    assert function.__name__ in (name, f"{name}_policy_loss")


@pytest.mark.parametrize(("key", "name"), NAMES)
def test_options_and_sections_are_keys_of_the_config(key: str, name: str) -> None:
    entry = TABLES[key][name]
    fields = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    assert {*entry.options, *entry.sections} <= fields
    assert not {*entry.options} & {*entry.sections}
    # The training step hands these over where the entry reads prox_logp_method, and nowhere else.
    takes_proximal = "proximal_logprobs" in inspect.signature(entry.load()).parameters
    assert takes_proximal == ("prox_logp_method" in entry.sections)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"algorithm\.adv_type: got 'grp'.*Did you mean 'grpo'"):
        ADVANTAGES["grp"]
    doors = r"module:function, or path/to/file\.py:function"
    expected = rf"algorithm\.loss_type: got 'zzz', expected one of aipo, decoupled_ppo, nll, ppo, {doors}\.$"
    with pytest.raises(UserError, match=expected):
        POLICY_LOSSES["zzz"]
