"""Counted operations against formulas by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.models import flops
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.flops import ActingCost, acting_cost, countable, if_countable, sample_cost
from embodied_rl.models.openvla.policy import OpenVlaPolicy
from embodied_rl.models.registry import build_policy
from embodied_rl.models.weights.lora import add_adapters
from embodied_rl.monitoring.work import Flops
from embodied_rl.training.sharding import checkpoint_blocks
from tests.models.flow.flow_models import POLICIES, flow_policy, look
from tests.models.small import LANGUAGE, STATE, fresh, inputs, settings


@pytest.fixture(autouse=True, params=[0, 10**9], ids=["without memory", "small"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Parameters of a policy that is small."""
    monkeypatch.setattr(flops, "_SMALL", request.param)
    return request.param


PAIRS = torch.tensor([[4, 6], [1, 1], [9, 2], [30, 17]])


def language(hidden: int = 32, layers: int = 2, inner: int = 64, values: int = 0) -> Policy:
    sizes = {"hidden_size": hidden, "num_layers": layers, "intermediate_size": inner}
    architecture = {"type": "qwen2", "num_heads": 2, "num_key_value_heads": 2, **sizes}
    return build_policy("causal_lm", replace(LANGUAGE, values_per_chunk=values), {"architecture": architecture})


def llama(tokens: float, *, width: int, layers: int, inner: int) -> float:
    """Projections, gated network and attention of a transformer without grouped queries."""
    return layers * (2 * tokens * (4 * width**2 + 3 * width * inner) + 4 * tokens**2 * width)


def language_forward(prompt: int, response: int, vocabulary: int) -> float:
    tokens = prompt + response
    return llama(tokens, width=32, layers=2, inner=64) + 2 * (response + 1) * 32 * vocabulary


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_language_model_costs_what_the_formula_says(checkpointed: bool) -> None:
    policy = language()
    vocabulary = len(policy.get_submodule("model").get_input_embeddings().weight)  # type: ignore[operator]
    cost = sample_cost(countable(policy), inputs("causal_lm"), checkpoint_blocks if checkpointed else None)
    expected = sum(language_forward(p, r, vocabulary) for p, r in PAIRS.tolist())
    assert cost.inferred(len(PAIRS), PAIRS).model == pytest.approx(expected, rel=1e-9)
    trained = cost.trained(len(PAIRS), PAIRS)
    assert trained.model == pytest.approx(3 * expected, rel=1e-9)
    if not checkpointed:
        assert trained.again == pytest.approx(0.0, abs=1e-3)
        return
    # The blocks once more, but for the last product of each, whose result nobody needs.
    blocks = sum(llama(p + r, width=32, layers=2, inner=64) - 2 * 2 * (p + r) * 32 * 64 for p, r in PAIRS.tolist())
    assert trained.again == pytest.approx(blocks, rel=1e-9)


def test_long_texts_of_a_wide_model_cost_six_operations_a_weight_and_token() -> None:
    """Kaplan et al., arXiv:2001.08361: 6 N a token, where attention itself is little of it."""
    policy = language(hidden=512, layers=4, inner=2048)
    cost = sample_cost(countable(policy), inputs("causal_lm"))
    weights, lengths = sum(p.numel() for p in policy.parameters()), torch.tensor([[2, 62]])
    assert cost.trained(1, lengths).model == pytest.approx(6 * weights * 64, rel=0.03)


def test_samples_without_lengths_cost_the_same() -> None:
    """mlp: 4 features, two hidden layers of 16, 3 actions of 2 numbers, and a value head like it."""
    one = {name: tensor[:1] for name, tensor in inputs("mlp").items()}
    cost = sample_cost(countable(fresh("mlp")), one)
    head = 2 * (4 * 16 + 16 * 16)
    forward = 2 * head + 2 * 16 * (6 + 1)
    assert cost.inferred(7, None) == Flops(model=7 * forward)
    # No gradient of the first layers' inputs is asked for.
    assert cost.trained(7, None) == Flops(model=7 * (3 * forward - 2 * 2 * 4 * 16))
    assert cost.inferred(0, None) == Flops()


def test_acting_on_an_observation(tmp_path: Path) -> None:
    obs = EnvObs(env_ids=torch.arange(1), images={}, state=torch.zeros(1, 4), instructions=("",))
    head = 2 * (4 * 16 + 16 * 16)
    found = acting_cost(countable(fresh("mlp")), obs)
    assert found == ActingCost(act=2 * head + 2 * 16 * 7, values=head + 2 * 16)
    bare = build_policy("mlp", replace(STATE, values_per_chunk=0), {"hidden_size": 16})
    assert acting_cost(countable(bare), obs) == ActingCost(act=head + 2 * 16 * 6, values=0.0)


def vit(tokens: int, patches: int, *, width: int = 32, inner: int = 64, layers: int = 2) -> float:
    """The tiny encoders but for their last layer, which is not computed."""
    block = 2 * tokens * (4 * width**2 + 2 * width * inner) + 4 * tokens**2 * width
    return layers * block + 2 * patches * 3 * 14**2 * width


@pytest.mark.parametrize("rank", [0, 4])
def test_openvla_costs_what_the_formula_says(tmp_path: Path, rank: int) -> None:
    OpenVlaPolicy.write_tiny(tmp_path)
    spec = PolicySpec(
        action_dim=7, num_action_chunks=1, state_dim=8, image_shapes={"agentview": (56, 56)}, values_per_chunk=0
    )
    policy = build_policy("openvla", spec, {"suite": "libero_spatial", "jpeg": False}, str(tmp_path))
    obs = EnvObs(
        env_ids=torch.arange(1),
        images={"agentview": torch.zeros(1, 56, 56, 3, dtype=torch.uint8)},
        state=torch.zeros(1, 8),
        instructions=("open the drawer",),
    )
    decided = policy.act(obs, greedy=True, temperature=1.0, generator=None)
    patches, prompt = (56 // 14) ** 2, int((decided.replay_inputs["prompt_ids"] != 32000).sum())
    tokens = patches + prompt + 7 - 1
    encoders = vit(patches + 5, patches) + vit(patches, patches)
    projector = 2 * patches * (64 * 256 + 256 * 64 + 64 * 64)
    text = llama(tokens, width=64, layers=2, inner=128) + 2 * 7 * 64 * 256
    if rank:
        add_adapters(policy, settings(rank=rank))
    cost = sample_cost(countable(policy), decided.replay_inputs)
    if not rank:
        assert cost.inferred(1, None).model == encoders + projector + text
        assert cost.trained(1, None).model == pytest.approx(3 * cost.forward[0], rel=0.05)
    else:
        # A frozen base has no gradients of its weights: the backward pass is about as large as the forward pass.
        more = cost.forward[0] - encoders - projector - text
        assert 0 < more < 0.2 * cost.forward[0]
        assert cost.trained(1, None).model == pytest.approx(2 * cost.forward[0] + more, rel=0.06)


@pytest.mark.parametrize("model", sorted(POLICIES))
def test_denoising_costs_each_of_its_steps(tmp_path: Path, model: str) -> None:
    POLICIES[model].write_tiny(tmp_path)
    obs = look(1)
    costs = [
        acting_cost(countable(flow_policy(model, tmp_path, values=0, num_steps=steps)), obs).act for steps in (2, 3, 5)
    ]
    step = costs[1] - costs[0]
    assert step > 0
    assert costs[2] - costs[1] == 2 * step
    assert costs[0] > 2 * step, "the prefix is computed once"


@pytest.mark.parametrize("model", ["tiny_vla", "mlp", "cnn"])
@pytest.mark.parametrize("rank", [0, 4])
def test_counting_changes_nothing(model: str, rank: int, small: int) -> None:
    policy = fresh(model)
    if rank:
        add_adapters(policy, settings(rank=rank))
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    state = torch.get_rng_state()
    blank = countable(policy)
    assert sample_cost(blank, {name: tensor[:1] for name, tensor in inputs(model).items()}, checkpoint_blocks).again
    assert all(p.is_meta != bool(small) for p in blank.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert all(p.grad is None for p in policy.parameters())


def test_a_policy_that_reads_numbers_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    class Peeking(Policy):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def evaluate(self, replay_inputs: Any, **_: Any) -> Any:
            return replay_inputs["x"] * float(self.weight)

    sample: dict[str, Tensor] = {"x": torch.ones(1)}
    count: Callable[[], Any] = lambda: sample_cost(countable(Peeking()), sample)  # noqa: E731
    assert if_countable(count) is None
    assert "perf/ metrics are left out" in capsys.readouterr().out


def test_the_compiler_is_not_imported_to_leave_operations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is missing, what torch asks of it is answered; it comes when something else is asked."""
    before = sys.modules.get("torch._dynamo")
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with flops._uncompiled():
        stand_in = sys.modules["torch._dynamo"]
        assert isinstance(stand_in, ModuleType) and stand_in is not before
        kept: Any = lambda: 3  # noqa: E731
        kept.__dynamo_disable = stand_in.disable(kept, True, wrapping=False)  # as torch keeps the answer
        assert kept.__dynamo_disable is kept
    assert "torch._dynamo" not in sys.modules
    assert not vars(kept), "a compiler that comes later is asked"
    compiler = ModuleType("torch._dynamo")
    compiler.__path__ = ["below"]
    monkeypatch.setattr(flops.importlib, "import_module", lambda name: compiler)
    with flops._uncompiled():
        assert sys.modules["torch._dynamo"].__path__ == ["below"], "what imports torch._dynamo.config finds it"
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo", real := ModuleType("torch._dynamo"))
    with flops._uncompiled():
        assert sys.modules["torch._dynamo"] is real
