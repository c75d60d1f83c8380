from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.lora import adapters_off, add_adapters, has_adapters, trains_base_weights
from embodied_rl.models.registry import build_policy
from embodied_rl.schema import LoraSettings

STATE = PolicySpec(action_dim=2, num_action_chunks=3, state_dim=4, image_shapes={}, values_per_chunk=1)
IMAGES = PolicySpec(
    action_dim=2, num_action_chunks=3, state_dim=4, image_shapes={"front": (32, 32)}, values_per_chunk=1
)
LANGUAGE = PolicySpec(action_dim=1, num_action_chunks=6, state_dim=0, image_shapes={}, values_per_chunk=1)
MODELS: dict[str, tuple[PolicySpec, dict[str, Any]]] = {
    "mlp": (STATE, {"hidden_size": 16}),
    "tiny_vla": (IMAGES, {"hidden_size": 32, "num_layers": 2}),
    "causal_lm": (
        LANGUAGE,
        {
            "architecture": {
                "type": "qwen2",
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "intermediate_size": 64,
            }
        },
    ),
}


def settings(**fields: Any) -> LoraSettings:
    return LoraSettings(
        **{
            "rank": 4,
            "alpha": 8,
            "dropout": 0.0,
            "target_modules": "all-linear",
            "use_rslora": False,
            "init_lora_weights": "default",
            "modules_to_save": [],
            **fields,
        }
    )


def fresh(model: str) -> Policy:
    torch.manual_seed(0)
    spec, params = MODELS[model]
    return build_policy(model, spec, params)


def inputs(model: str) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    if model == "mlp":
        return {"state": torch.randn(5, 4, generator=rng), "samples": torch.randn(5, 3, 2, generator=rng)}
    if model == "tiny_vla":
        return {
            "words": torch.randint(1, 50, (5, 24), generator=rng),
            "proprio": torch.randn(5, 4, generator=rng),
            "images/front": torch.randint(0, 256, (5, 32, 32, 3), generator=rng, dtype=torch.uint8),
            "bins": torch.randint(0, 256, (5, 3, 2), generator=rng),
        }
    return {
        "prompt_ids": torch.randint(5, 20, (5, 4), generator=rng),
        "prompt_lengths": torch.full((5,), 4),
        "response_ids": torch.randint(5, 20, (5, 6), generator=rng),
        "response_lengths": torch.full((5,), 6),
    }


def logprobs(policy: Policy, model: str) -> torch.Tensor:
    with torch.no_grad():
        return policy.eval()(inputs(model), temperature=1.0).logprobs


@pytest.mark.parametrize("model", MODELS)
def test_only_adapters_and_the_value_head_are_trained(model: str) -> None:
    policy = fresh(model)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    plain = logprobs(policy, model)
    add_adapters(policy, settings())
    assert has_adapters(policy)
    assert not trains_base_weights(policy)
    assert torch.equal(logprobs(policy, model), plain), "adapters start at nothing"
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
        assert torch.equal(logprobs(policy, model), plain)
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
    assert trains_base_weights(policy)


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
