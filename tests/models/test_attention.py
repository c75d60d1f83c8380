"""The attention that a run chooses: the same numbers, in every worker, or refused before anything starts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from embodied_rl.errors import UserError
from embodied_rl.launch import connect, make_backend
from embodied_rl.models import attention
from embodied_rl.models.attention import set_attention
from embodied_rl.models.base import Evaluation, Policy
from embodied_rl.models.registry import build_policy
from embodied_rl.runtime.placement import Placement
from embodied_rl.tasks.planning import plan_of
from tests.configs import embodied, small_math
from tests.models.causal_lm.language import language_policy, language_spec
from tests.models.flow.flow_models import POLICIES, decide, flow_policy, look
from tests.models.openvla import published
from tests.models.small import inputs


def policy_and_inputs(family: str, directory: Path) -> tuple[Policy, dict[str, torch.Tensor]]:
    """With prompts of several lengths."""
    if family == "causal_lm":
        replay = inputs("causal_lm")
        replay["prompt_lengths"], replay["response_lengths"] = (
            torch.tensor(x) for x in ([4, 2, 3, 1, 4], [6, 1, 3, 6, 2])
        )
        return language_policy(language_spec(6, 1)), replay
    if family in POLICIES:
        POLICIES[family].write_tiny(directory)
        policy = flow_policy(family, directory, train_expert_only=False)
        return policy, dict(decide(policy, look()).replay_inputs)
    published.write_checkpoint(directory)
    torch.manual_seed(0)
    spec = published.spec(chunks=1 if family == "openvla" else 3, values=1)
    policy = build_policy(family, spec, {}, str(directory)).eval()
    generator = torch.Generator().manual_seed(0)
    return policy, dict(
        policy.act(published.observe(), greedy=False, temperature=1.0, generator=generator).replay_inputs
    )


def outcome(policy: Policy, replay: dict[str, torch.Tensor]) -> tuple[Evaluation, dict[str, torch.Tensor]]:
    """What is computed of the inputs, and the gradients."""
    policy.zero_grad()
    evaluation = policy(replay, temperature=1.0)
    evaluation.logprobs.mean().backward()
    return evaluation, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["openvla", "openvla_oft", "pi0", "smolvla", "causal_lm"])
def test_eager_equals_sdpa(family: str, tmp_path: Path) -> None:
    policy, replay = policy_and_inputs(family, tmp_path)
    layers = [module for module in policy.modules() if isinstance(module, PreTrainedModel)]
    assert {module.config._attn_implementation for module in layers} == {"sdpa"}
    (before, gradients) = outcome(policy, replay)
    set_attention(policy, "eager")
    assert {module.config._attn_implementation for module in layers} == {"eager"}
    (after, again) = outcome(policy, replay)
    torch.testing.assert_close(after.logprobs, before.logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.values, before.values, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == again.keys()
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name] / scale, gradient / scale, rtol=1e-3, atol=1e-4)


def test_rollout_actor_and_reference_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Policy] = []
    plain = attention.set_attention
    monkeypatch.setattr(attention, "set_attention", lambda policy, name: (plain(policy, name), given.append(policy)))
    config = small_math("model.attn_implementation=eager", "algorithm.kl_beta=0.1")
    backend = make_backend(config)
    try:
        connect(config, backend)
    finally:
        backend.shutdown()
    workers = [policy for policy in given if not next(policy.parameters()).is_meta]
    assert len(workers) == 3
    for policy in workers:
        assert {m.config._attn_implementation for m in policy.modules() if isinstance(m, PreTrainedModel)} == {"eager"}


def test_models_without_such_layers_and_own_masks_refuse_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="MlpPolicy cannot have; use null"):
        plan_of(embodied("env=dummy", "model=mlp", "model.attn_implementation=eager"))
    POLICIES["smolvla"].write_tiny(tmp_path)
    options = ("env=libero_spatial", "model=smolvla", f"model.path={tmp_path}")
    plan_of(embodied(*options, "model.attn_implementation=eager"))
    with pytest.raises(UserError, match="use sdpa or eager, or null"):
        plan_of(embodied(*options, "model.attn_implementation=flash_attention_2"))


def test_flash_attention_needs_its_package_a_type_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = "model.attn_implementation=flash_attention_2"
    find, there = importlib.util.find_spec, importlib.util.find_spec("torch")
    for installed in (False, True):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest, installed=installed: (
                (there if installed else None) if name == "flash_attn" else find(name, *rest)
            ),
        )
        with pytest.raises(UserError) as caught:
            small_math(flash)
        assert ("no package flash_attn" in str(caught.value)) != installed
        assert "set it to bfloat16" in str(caught.value)
        assert "needs CUDA, but actor is on the CPU" in str(caught.value)
    monkeypatch.setattr(Placement, "device", lambda *_: "cuda:0")
    assert small_math(flash, "++model.params.dtype=bfloat16").model.attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_dropout_of_a_checkpoint_is_off_in_updates_too(family: str, tmp_path: Path) -> None:
    """With it, the first ratio would not be 1; gpt2 has it in modules, qwen2 in numbers."""
    policy = language_policy(language_spec(8, 0))
    policy.save_pretrained(tmp_path)
    if family == "gpt2":
        tokens = len(policy.tokenizer)
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": tokens}
        dropout: dict[str, Any] = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
        ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 1}
        GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ends)).save_pretrained(tmp_path)
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    loaded = build_policy("causal_lm", language_spec(6, 0), {}, str(tmp_path))
    replay = inputs("causal_lm")
    expected = loaded.eval()(replay, temperature=1.0).logprobs
    torch.testing.assert_close(loaded.train()(replay, temperature=1.0).logprobs, expected, rtol=0, atol=1e-6)
