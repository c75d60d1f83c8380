"""LoRA: names as in published adapters, merged folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.models.lora import add_adapters, merge_adapters
from embodied_rl.models.openvla.oft import OpenVlaOftPolicy
from embodied_rl.models.registry import build_policy
from embodied_rl.schema import LoraSettings
from tests.models.openvla.published import SMALL, layout, observe, spec, write_checkpoint


@pytest.fixture
def policy(tmp_path: Path) -> OpenVlaOftPolicy:
    write_checkpoint(tmp_path / "base")
    policy = build_policy("openvla_oft", spec(), {}, str(tmp_path / "base"))
    assert isinstance(policy, OpenVlaOftPolicy)
    torch.manual_seed(0)
    settings = LoraSettings(
        path=None,
        rank=4,
        alpha=8,
        dropout=0.0,
        target_modules="all-linear",
        use_rslora=False,
        init_lora_weights="default",
        modules_to_save=[],
    )
    add_adapters(policy, settings)
    return policy


def test_names_are_the_published_ones(policy: OpenVlaOftPolicy) -> None:
    """peft's ``base_model.model.`` goes before the names below the adapters' root."""
    root = policy.adapter_root()
    found = {name.partition(".lora_A")[0] for name, _ in root.named_parameters() if ".lora_A." in name}
    matrices = {name.removesuffix(".weight") for name, shape in layout(SMALL).items() if len(shape) == 2}
    assert found == matrices - {"language_model.lm_head", "language_model.model.embed_tokens"}
    assert "vision_backbone.featurizer.blocks.0.attn.qkv" in found
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in policy.named_parameters() if ".lora_" in n or n.startswith("value_head.")}


def test_merged_adapters_give_the_same_policy(policy: OpenVlaOftPolicy, tmp_path: Path) -> None:
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    before = policy.act(observe(), greedy=True, temperature=1.0, generator=None)
    with pytest.raises(RuntimeError, match="merge them first"):
        policy.save_pretrained(tmp_path / "merged")
    merge_adapters(policy)
    policy.save_pretrained(tmp_path / "merged")
    loaded = build_policy("openvla_oft", spec(), {}, str(tmp_path / "merged"))
    after = loaded.act(observe(), greedy=True, temperature=1.0, generator=None)
    assert torch.allclose(after.logprobs, before.logprobs, atol=1e-3)
    base = build_policy("openvla_oft", spec(), {}, str(tmp_path / "base"))
    assert not torch.allclose(
        base.act(observe(), greedy=True, temperature=1.0, generator=None).logprobs, before.logprobs, atol=0.1
    )


def test_adapters_on_the_output_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    policy = build_policy("openvla_oft", spec(), {}, str(tmp_path))
    before = policy.act(observe(), greedy=True, temperature=1.0, generator=None)
    settings = LoraSettings(
        path=None,
        rank=4,
        alpha=8,
        dropout=0.0,
        target_modules=["lm_head"],
        use_rslora=False,
        init_lora_weights="default",
        modules_to_save=[],
    )
    add_adapters(policy, settings)
    after = policy(before.replay_inputs, temperature=1.0)
    assert torch.allclose(after.logprobs, before.logprobs, atol=1e-4)
    after.logprobs.sum().backward()
    adapter = policy.get_parameter("network.language_model.lm_head.lora_B.default.weight")
    assert adapter.grad is not None and adapter.grad.any()
