from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.models.base import Policy
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.models.weights.lora import (
    adapters_off,
    add_adapters,
    described,
    has_adapters,
    save_adapters,
)
from tests.configs import config_of
from tests.models.small import MODELS, fresh, inputs, logprobs, model_config, settings, shaken

assert_same = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
"""On an AMD EPYC, one thread, a Linear gave other last bits (5e-7) for equal weights and inputs, alike strided."""


@pytest.mark.parametrize("model", MODELS)
def test_only_adapters_and_the_value_head_are_trained(model: str) -> None:
    policy = fresh(model)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    plain = logprobs(policy, model)
    add_adapters(policy, settings())
    assert has_adapters(policy)
    assert_same(logprobs(policy, model), plain, msg="adapters start at nothing")
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name or name.startswith("value_head.") for name in trained)
    assert any(name.startswith("value_head.") for name in trained)
    assert not any("value_head" in name and "lora" in name for name in trained)

    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        policy.train()(inputs(model), temperature=1.0).logprobs.sum().backward()
        optimizer.step()
    changed = logprobs(policy, model)
    assert not torch.allclose(changed, plain, atol=1e-3)
    after = {name.replace(".base_layer", ""): tensor for name, tensor in policy.state_dict().items()}
    assert all(torch.equal(after[name], before[name]) for name in before)

    with adapters_off(policy):
        assert_same(logprobs(policy, model), plain)
    assert torch.equal(logprobs(policy, model), changed)


def test_the_scale_is_alpha_over_rank_or_its_root() -> None:
    shift = {}
    for rslora in (False, True):
        policy = fresh("mlp")
        add_adapters(policy, settings(use_rslora=rslora, target_modules=["0"]))
        layer: Any = policy.get_submodule("policy.0")
        with torch.no_grad():
            layer.lora_A["default"].weight.fill_(0.1)
            layer.lora_B["default"].weight.fill_(0.1)
            x = torch.ones(1, 4)
            shift[rslora] = (layer(x) - layer.base_layer(x))[0, 0].item()
        with adapters_off(policy):
            pass
        assert (layer(x) - layer.base_layer(x))[0, 0].item() == pytest.approx(shift[rslora], rel=1e-5)
    # 4 inputs x .1, then rank 4 x .1, times 8 / 4 or 8 / 2
    assert shift == {False: pytest.approx(0.16 * 2, rel=1e-4), True: pytest.approx(0.16 * 4, rel=1e-4)}


def test_target_modules_by_name() -> None:
    policy = fresh("causal_lm")
    add_adapters(policy, settings(target_modules=["q_proj", "v_proj"]))
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, _ in policy.named_parameters() if ".lora_" in name}
    assert adapted == {"q_proj", "v_proj"}


def test_all_linear_leaves_the_head_out() -> None:
    policy = fresh("tiny_vla")
    add_adapters(policy, settings())
    assert not any("action_head" in name and "lora" in name for name, _ in policy.named_parameters())


def test_modules_to_save_are_trained_whole() -> None:
    policy = fresh("tiny_vla")
    add_adapters(policy, settings(modules_to_save=["action_head"]))
    assert policy.get_parameter("action_head.weight").requires_grad


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["q_porj"]}, "model.lora.target_modules: got 'q_porj', which is no linear layer"),
        ({"modules_to_save": ["hed"]}, "model.lora.modules_to_save: got 'hed', which is no part of"),
    ],
)
def test_names_that_are_not_there_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        add_adapters(fresh("causal_lm"), settings(**fields))


# Adapters of a folder.


def folder_of(tmp_path: Path, model: str = "causal_lm", **fields: Any) -> tuple[Policy, Path]:
    """A policy with trained adapters, and their folder."""
    config = model_config(model, rank=4, **fields)
    policy = shaken(config)
    save_adapters(policy, config.lora, "the/base", tmp_path / "adapters")
    return policy, tmp_path / "adapters"


def from_folder(path: Path, model: str = "causal_lm", **fields: Any) -> Policy:
    policy = fresh(model)
    add_adapters(policy, settings(path=str(path), rank=0, alpha=1, target_modules=["nothing"], **fields))
    return policy


@pytest.mark.parametrize("model", MODELS)
def test_adapters_of_a_folder_are_what_was_saved(model: str, tmp_path: Path) -> None:
    policy, path = folder_of(tmp_path, model, use_rslora=True)
    again = from_folder(path, model)
    assert torch.equal(logprobs(again, model), logprobs(policy, model))
    assert not torch.equal(logprobs(fresh(model), model), logprobs(policy, model))
    trained = [{name for name, p in each.named_parameters() if p.requires_grad} for each in (again, policy)]
    assert trained[0] == trained[1]


def test_a_folder_that_peft_wrote_gives_what_peft_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy, reference = fresh("causal_lm"), fresh("causal_lm")
    assert isinstance(reference, CausalLMPolicy)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = get_peft_model(reference.model, config)
    theirs.save_pretrained(str(tmp_path))
    add_adapters(policy, settings(path=str(tmp_path)))
    assert isinstance(policy, CausalLMPolicy)
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        assert torch.equal(policy.model.eval()(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits)


def test_the_description_of_a_folder_makes_the_same_adapters(tmp_path: Path) -> None:
    _, path = folder_of(tmp_path, target_modules=["q_proj"], use_rslora=True)
    found = described(settings(path=str(path), rank=0, alpha=1, dropout=0.25))
    assert found.path is None
    assert (found.rank, found.alpha, found.dropout, found.use_rslora) == (4, 8, 0.25, True)
    assert found.target_modules == [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")


KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(KEY), r"layers\.1\.self_attn\.q_proj\.lora_A is missing"),
        (
            lambda t: [t.pop(KEY), t.pop(KEY.replace("lora_A", "lora_B"))],
            r"layers\.1\.self_attn\.q_proj has no adapter, which its configuration asks for",
        ),
        (lambda t: t.update({KEY.replace("q_proj", "x_proj"): t[KEY]}), "x_proj is no linear layer of this model"),
        (lambda t: t.update({KEY: t[KEY][:, :5].contiguous()}), r"q_proj\.lora_A is \[4, 5\], expected \[4, 32\]"),
        (lambda t: t.update({"lm_head.weight": t[KEY]}), "has the tensor lm_head.weight, expected base_model.model."),
    ],
)
def test_adapters_that_do_not_fit_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    _, path = folder_of(tmp_path)
    change_weights(path, change)
    with pytest.raises(UserError, match=f"model.lora.path={path}: .*{message}"):
        from_folder(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_dora", True), ("rank_pattern", {"q_proj": 2}), ("bias", "all"), ("peft_type", "IA3"),
     ("init_lora_weights", "pissa"), ("modules_to_save", ["lm_head"])],
)  # fmt: skip
def test_adapters_that_compute_otherwise_are_refused(name: str, value: object, tmp_path: Path) -> None:
    _, path = folder_of(tmp_path)
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(UserError, match=f"describes no plain LoRA adapters: {name} is "):
        from_folder(path)


def test_what_is_no_folder_of_adapters_is_refused_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.path: got .*, which has no adapter_config\.json"):
        config_of("env=dummy", f"model.lora.path={tmp_path}")


def test_keys_that_the_folder_answers_are_refused(tmp_path: Path) -> None:
    _, path = folder_of(tmp_path, "mlp")
    config = config_of("env=dummy", f"model.lora.path={path}", "model.lora.dropout=0.1")
    assert config.model.lora.used
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: .*the folder in model\.lora\.path says it"):
        config_of("env=dummy", f"model.lora.path={path}", "model.lora.rank=4")
