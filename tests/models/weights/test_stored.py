"""Policies that are built as their files have them are, once settled, those that are built at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import policy_class, policy_of
from embodied_rl.models.weights.precision import hold_in
from embodied_rl.models.weights.stored import as_stored, settle, wanted
from embodied_rl.schema import ModelConfig
from embodied_rl.training.sharding import shard
from tests.gathered import full_state_dict
from tests.models.small import settings
from tests.training.learner import training_config
from tests.training.ranks import Ranks

MODELS = ("openvla", "openvla_oft", "pi0", "pi05", "smolvla")
DTYPES = (("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16"))
"""Of the file, and of the policy."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {"rank": 0},
    "default": {"rank": 2},
    "of the base": {"rank": 2, "init_lora_weights": "pissa"},
}
PARTS = {"openvla": "lm_head", "openvla_oft": "lm_head", "pi0": "norm", "pi05": "norm", "smolvla": "norm"}
"""A part that can be trained beside adapters."""
SIZES = {"agentview": (64, 64), "wrist": (64, 64)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``<model>-<type>``."""
    directory = tmp_path_factory.mktemp("stored")
    for model in MODELS:
        for dtype in ("float32", "bfloat16"):
            folder = directory / f"{model}-{dtype}"
            policy_class(model).write_tiny(folder)  # pyright: ignore[reportAttributeAccessIssue]
            for file in folder.glob("model*.safetensors"):
                weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
                file.unlink()
                save_file(weights, file)
    return directory


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def build(folders: Path, model: str, file: str, own: str, *, stored: bool, **lora: Any) -> Policy:
    torch.manual_seed(0)
    chunks = 1 if model == "openvla" else 3
    spec = PolicySpec(action_dim=7, num_action_chunks=chunks, state_dim=8, image_shapes=SIZES, values_per_chunk=1)
    params = {"dtype": own} | ({"suite": "libero_10"} if model.startswith("openvla") else {})
    path = str(folders / f"{model}-{file}")
    config = ModelConfig(model_type=model, path=path, params=params, lora=settings(**lora))
    with as_stored() if stored else nullcontext():
        return policy_of(config, spec)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("adapters", ADAPTERS)
def test_once_settled_it_is_what_is_built_at_once(
    folders: Path, model: str, dtypes: tuple[str, str], adapters: str
) -> None:
    file, own = (getattr(torch, dtype) for dtype in dtypes)
    expected = build(folders, model, *dtypes, stored=False, **ADAPTERS[adapters])
    policy = build(folders, model, *dtypes, stored=True, **ADAPTERS[adapters])
    network = [p for name, p in policy.named_parameters() if not name.endswith(".lora_A.default.weight")]
    assert {wanted(parameter) for parameter in network} <= {own, torch.float32}
    if adapters != "of the base":
        assert any(parameter.dtype == file != own for parameter in network) == (file != own)
    settle(policy)
    assert_equal(dict(policy.state_dict()), dict(expected.state_dict()))
    assert [p.requires_grad for p in policy.parameters()] == [p.requires_grad for p in expected.parameters()]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_what_is_trained_beside_a_base_of_half_the_bits(folders: Path, model: str, stored: bool, part: bool) -> None:
    """In float32, but with parts of the base, which are of its type."""
    saved = [PARTS[model]] if part else []
    policy = build(folders, model, "bfloat16", "bfloat16", stored=stored, rank=2, modules_to_save=saved)
    settle(policy)
    trained = {p.dtype for p in policy.parameters() if p.requires_grad}
    assert trained == {torch.bfloat16 if part else torch.float32}
    assert any(p.dtype == torch.bfloat16 for p in policy.parameters() if not p.requires_grad)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("file", ["float32", "bfloat16"])
def test_a_rollout_worker_rounds_the_same(folders: Path, model: str, file: str) -> None:
    expected, policy = (build(folders, model, file, "float32", stored=stored, rank=2) for stored in (False, True))
    for each in (expected, policy):
        hold_in(each, torch.bfloat16)
    assert_equal(dict(policy.state_dict()), dict(expected.state_dict()))


def seen() -> EnvObs:
    generator = torch.Generator().manual_seed(0)
    return EnvObs(
        env_ids=torch.arange(2),
        images={
            name: torch.randint(0, 256, (2, *size, 3), dtype=torch.uint8, generator=generator)
            for name, size in SIZES.items()
        },
        state=torch.randn(2, 8, generator=generator),
        instructions=("open the drawer",) * 2,
    )


def results(policy: Policy, whole: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Log-probabilities and gradients of what an untouched policy decides."""
    torch.manual_seed(0)
    output = policy.act(seen(), greedy=False, temperature=1.6, generator=torch.Generator().manual_seed(1))
    evaluation = policy(output.replay_inputs, temperature=1.6)
    assert evaluation.values is not None
    (evaluation.logprobs.mean() + evaluation.values.mean()).backward()
    gradients = {f"gradient of {name}": p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {"logprobs": evaluation.logprobs.detach(), **gradients}


def sharded(
    mesh: DeviceMesh, folders: Path, model: str, file: str, own: str, lora: dict[str, Any]
) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    policy = build(folders, model, file, own, stored=True, **lora)
    shard(policy, mesh, training_config("ppo").actor.fsdp_config)
    replay = build(folders, model, file, own, stored=False, **lora)
    output = replay.act(seen(), greedy=False, temperature=1.6, generator=torch.Generator().manual_seed(1))
    evaluation = policy(output.replay_inputs, temperature=1.6)
    assert evaluation.values is not None
    (evaluation.logprobs.mean() + evaluation.values.mean()).backward()
    gradients = {
        f"gradient of {name}": p.grad.full_tensor()
        for name, p in policy.named_parameters()
        if isinstance(p.grad, DTensor)
    }
    return {"logprobs": evaluation.logprobs.detach(), **gradients, **full_state_dict(policy)}


@pytest.mark.parametrize(
    ("model", "dtypes", "adapters"),
    [
        ("openvla_oft", ("bfloat16", "float32"), "none"),
        ("openvla_oft", ("bfloat16", "bfloat16"), "default"),
        ("openvla", ("bfloat16", "float32"), "of the base"),
        ("pi0", ("bfloat16", "float32"), "default"),
        ("smolvla", ("float32", "float32"), "none"),
        ("smolvla", ("bfloat16", "bfloat16"), "none"),
        ("pi0", ("float32", "bfloat16"), "part"),
        ("pi05", ("bfloat16", "float32"), "none"),
        ("pi05", ("float32", "bfloat16"), "part"),
    ],
)
def test_two_ranks_have_the_weights_and_gradients_of_one(
    folders: Path, two_ranks: Ranks, model: str, dtypes: tuple[str, str], adapters: str
) -> None:
    lora = ADAPTERS.get(adapters, {"rank": 2, "modules_to_save": [PARTS[model]]})
    policy = build(folders, model, *dtypes, stored=False, **lora)
    expected = results(policy) | {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    found, other = two_ranks.run(sharded, folders, model, *dtypes, lora)
    assert_equal(found, expected)
    assert any(name.startswith("gradient") and tensor.any() for name, tensor in found.items())
    assert torch.equal(other["logprobs"], expected["logprobs"])
