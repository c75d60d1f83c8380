"""Weights for engines without adapters."""

from __future__ import annotations

from dataclasses import replace

import torch

from embodied_rl.language.engines.vllm_backend import merged_weights
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.models.registry import policy_of
from embodied_rl.models.weights.lora import merge_adapters
from tests.configs import small_math
from tests.models.causal_lm.language import SMALL, language_policy, language_spec


def test_without_adapters_they_are_the_policys_own_and_tied_ones_come_once() -> None:
    policy = language_policy(language_spec(values_per_chunk=1))
    found = dict(merged_weights(policy))
    assert found.keys() == dict(policy.model.named_parameters()).keys()
    assert "lm_head.weight" not in found
    assert all(found[name].data_ptr() == parameter.data_ptr() for name, parameter in policy.model.named_parameters())


def test_adapters_are_added_and_the_policy_stays_as_it_is() -> None:
    section = small_math().model
    model = replace(section, params={"architecture": SMALL}, lora=replace(section.lora, rank=2))
    policy = policy_of(model, language_spec())
    assert isinstance(policy, CausalLMPolicy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    found = {name: tensor.clone() for name, tensor in merged_weights(policy)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    merge_adapters(policy)  # peft's own merging
    expected = dict(policy.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), atol=1e-6, rtol=0)
    assert not torch.equal(
        found["model.layers.0.self_attn.q_proj.weight"],
        before["model.model.layers.0.self_attn.q_proj.base_layer.weight"],
    )
