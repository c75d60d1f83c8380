"""LoRA: names as in published adapters, folders with all of theirs, merged folders, and what nothing reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy
from embodied_rl.models.openvla.oft import OpenVlaOftPolicy
from embodied_rl.models.registry import build_policy
from embodied_rl.models.weights.lora import add_adapters, merge_adapters, read_folder, save_adapters, write_folder
from tests.models.openvla.published import layout, observe, spec, weights_of, write_checkpoint
from tests.models.small import settings

MATRICES = {name.removesuffix(".weight"): shape for name, shape in layout().items() if len(shape) == 2}
HEAD, WORDS = "language_model.lm_head", "language_model.model.embed_tokens"


def unread(name: str) -> bool:
    """The last block of each encoder, and SigLIP's pooling."""
    return ".blocks.2." in name or ".attn_pool." in name


@pytest.fixture
def policy(tmp_path: Path) -> OpenVlaOftPolicy:
    write_checkpoint(tmp_path / "base")
    policy = build_policy("openvla_oft", spec(), {}, str(tmp_path / "base"))
    assert isinstance(policy, OpenVlaOftPolicy)
    torch.manual_seed(0)
    add_adapters(policy, settings())
    return policy


def test_names_are_the_published_ones(policy: OpenVlaOftPolicy) -> None:
    """peft's ``base_model.model.`` goes before the names below the adapters' root."""
    root = policy.adapter_root()
    found = {name.partition(".lora_A")[0] for name, _ in root.named_parameters() if ".lora_A." in name}
    assert found == {name for name in MATRICES if not unread(name)} - {HEAD, WORDS}
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
    add_adapters(policy, settings(target_modules=["lm_head"]))
    after = policy(before.replay_inputs, temperature=1.0)
    assert torch.allclose(after.logprobs, before.logprobs, atol=1e-4)
    after.logprobs.sum().backward()
    adapter = policy.get_parameter("network.language_model.lm_head.lora_B.default.weight")
    assert adapter.grad is not None and adapter.grad.any()


@pytest.mark.parametrize(("model", "chunks"), [("openvla", 1), ("openvla_oft", 3), ("openvla_oft_l1", 3)])
def test_every_adapter_gets_a_gradient(model: str, chunks: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, l1=model.endswith("_l1"))
    policy = build_policy(model.removesuffix("_l1"), spec(chunks=chunks), {}, str(tmp_path))
    add_adapters(policy, settings())
    outcome = policy(policy.demonstration(observe(), torch.zeros(4, chunks, 7)), temperature=1.0)
    assert outcome.values is not None
    (outcome.logprobs.sum() + outcome.values.sum()).backward()
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert [name for name, p in trained.items() if p.grad is None] == []


def publish(path: Path, rank: int = 4) -> None:
    """Adapters as upstream's fine-tuning leaves them: on all linear layers, read or not, named by their last parts."""
    adapted = {name: shape for name, shape in MATRICES.items() if name not in (HEAD, WORDS)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (fan_out, fan_in) in adapted.items():
        shapes |= {f"{name}.lora_A": (rank, fan_in), f"{name}.lora_B": (fan_out, rank)}
    suffixes = sorted({name.rpartition(".")[2] for name in adapted})
    write_folder(path, LoraConfig(r=rank, lora_alpha=8, target_modules=suffixes), weights_of(shapes), {})


def logprobs(policy: Policy) -> torch.Tensor:
    return policy.act(observe(), greedy=True, temperature=1.0, generator=None).logprobs


def test_published_adapters_are_on_layers_that_nothing_reads_too(tmp_path: Path) -> None:
    base, adapters, merged = tmp_path / "base", tmp_path / "adapters", tmp_path / "merged"
    write_checkpoint(base, shards=1)
    publish(adapters)

    def with_adapters(path: Path) -> Policy:
        policy = build_policy("openvla_oft", spec(), {}, str(base))
        add_adapters(policy, settings(path=str(path), rank=0))
        return policy

    policy = with_adapters(adapters)
    found = {name.partition(".lora_A")[0] for name, _ in policy.named_parameters() if ".lora_A." in name}
    assert found == {f"network.{name}" for name in MATRICES if not unread(name)} - {f"network.{HEAD}"} - {
        f"network.{WORDS}"
    }
    # What they compute is what the base with all of them merged does, by hand.
    write_checkpoint(merged, shards=1)
    [file] = merged.glob("model-*.safetensors")
    weights, given = load_file(file), read_folder(str(adapters)).weights
    for name in MATRICES.keys() - {HEAD, WORDS}:
        weights[f"{name}.weight"] += 8 / 4 * given[f"{name}.lora_B"] @ given[f"{name}.lora_A"]
    save_file(weights, file)
    by_hand = logprobs(build_policy("openvla_oft", spec(), {}, str(merged)))
    assert torch.allclose(logprobs(policy), by_hand, atol=1e-3)
    assert not torch.allclose(logprobs(build_policy("openvla_oft", spec(), {}, str(base))), by_hand, atol=0.1)

    save_adapters(policy, settings(rank=4), "the/base", tmp_path / "again")
    assert torch.equal(logprobs(with_adapters(tmp_path / "again")), logprobs(policy))


def test_layers_that_nothing_reads_are_refused_where_they_are_all_that_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, l1=True)
    for name, fields in (
        ("target_modules", {"target_modules": ["kv"]}),
        ("target_modules", {"target_modules": ["lm_head"]}),  # the L1 head takes its place
        ("modules_to_save", {"modules_to_save": ["attn_pool"]}),
    ):
        policy = build_policy("openvla_oft", spec(), {}, str(tmp_path))
        with pytest.raises(UserError, match=rf"model\.lora\.{name}: got .*nothing reads"):
            add_adapters(policy, settings(**fields))
    policy = build_policy("openvla_oft", spec(), {}, str(tmp_path))
    add_adapters(policy, settings(modules_to_save=["blocks"]))
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert "network.vision_backbone.featurizer.blocks.0.norm1.weight" in trained
    assert not any(unread(name) for name in trained)
