"""A folder's weights are exactly the model's, or nothing is built: no tensor is ever made up."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from embodied_rl.commands.make_tiny import make_tiny
from embodied_rl.errors import UserError
from embodied_rl.language.rewards.reward_model import RewardModel
from embodied_rl.launch import run
from embodied_rl.models.causal_lm import CausalLMPolicy, character_tokenizer
from embodied_rl.models.openvla.oft import OpenVlaOftPolicy
from embodied_rl.models.registry import build_policy
from embodied_rl.models.weights import shipped
from embodied_rl.models.weights.lora import add_adapters, save_adapters
from tests.configs import tiny_math_run
from tests.models.flow.flow_models import flow_spec
from tests.models.openvla import published
from tests.models.small import IMAGES, LANGUAGE, MODELS, fresh, model_config, settings, shaken

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a folder is written and read, and tensors of it: by their names in the file, and in the message."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    tensors: dict[str, str]
    file: str = WEIGHTS
    strays: bool = True
    """A tensor too many is refused."""


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def write_fresh(model: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        policy = fresh(model)
        policy.save_pretrained(path)

    return write


def read_fresh(model: str) -> Callable[[Path], nn.Module]:
    spec, params = MODELS[model]
    return lambda path: build_policy(model, spec, params, str(path))


def write_reward_model(path: Path) -> None:
    tokenizer: Any = character_tokenizer("0123456789+= ")
    config: Any = LlamaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def read_openvla(model: str) -> Callable[[Path], nn.Module]:
    spec = published.spec(chunks=1, image_shapes={"agentview": (56, 56)})
    return lambda path: build_policy(model, spec, {"suite": "libero_10"}, str(path))


def with_openvla_value_head(path: Path) -> None:
    make_tiny("openvla", path)
    torch.manual_seed(0)
    policy: Any = read_openvla("openvla")(path)
    shutil.rmtree(path)
    policy.save_pretrained(path)


def read_flow(model: str) -> Callable[[Path], nn.Module]:
    params = {"num_steps": 2, "noise_method": "flow_noise"}
    return lambda path: build_policy(model, flow_spec(), params, str(path))


def with_flow_heads(path: Path) -> None:
    make_tiny("pi0", path)
    policy: Any = read_flow("pi0")(path)
    shutil.rmtree(path)
    policy.save_pretrained(path)


def write_adapters(path: Path) -> None:
    config = model_config("tiny_vla", rank=4)
    save_adapters(shaken(config), config.lora, "the/base", path)


def read_adapters(path: Path) -> None:
    add_adapters(fresh("tiny_vla"), settings(path=str(path)))


def read_causal_lm(path: Path) -> CausalLMPolicy:
    policy = build_policy("causal_lm", LANGUAGE, {}, str(path))
    assert isinstance(policy, CausalLMPolicy)
    return policy


_EXPERT = "paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
_SMOL_EXPERT = "vlm_with_expert.lm_expert.layers.1.mlp.up_proj.weight"
_HEAD = "value_head.safetensors"
_ADAPTER = "base_model.model.{}.weight"
FAMILIES = {
    "mlp": Family(write=write_fresh("mlp"), read=read_fresh("mlp"), tensors=same("policy.0.weight", "log_std")),
    "mlp_value_head": Family(
        write=write_fresh("mlp"), read=read_fresh("mlp"), tensors=same("value_head.0.weight", "value_head.4.bias")
    ),
    "tiny_vla": Family(write=write_fresh("tiny_vla"), read=read_fresh("tiny_vla"), tensors=same("action_head.weight")),
    "causal_lm": Family(
        write=lambda path: make_tiny("causal_lm", path),
        read=read_causal_lm,
        tensors=same("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"),
    ),
    "causal_lm_value_head": Family(
        write=write_fresh("causal_lm"), read=read_causal_lm, file=_HEAD, tensors=same("weight", "bias")
    ),
    "reward_model": Family(
        write=write_reward_model,
        read=lambda path: RewardModel({"path": str(path)}, "cpu"),
        tensors=same("score.weight", "model.embed_tokens.weight", "model.norm.weight"),
    ),
    "openvla": Family(
        write=lambda path: make_tiny("openvla", path),
        read=read_openvla("openvla"),
        tensors=same("language_model.lm_head.weight", "vision_backbone.fused_featurizer.attn_pool.q.bias"),
    ),
    "openvla_value_head": Family(
        write=with_openvla_value_head, read=read_openvla("openvla"), file=_HEAD, tensors=same("fc1.weight")
    ),
    "openvla_oft": Family(
        write=lambda path: make_tiny("openvla_oft", path),
        read=read_openvla("openvla_oft"),
        tensors=same("language_model.model.embed_tokens.weight", "projector.fc2.weight"),
    ),
    "openvla_oft_l1": Family(
        write=lambda path: OpenVlaOftPolicy.write_tiny(path, with_l1_head=True),
        read=read_openvla("openvla_oft"),
        file="action_head--latest_checkpoint.pt",
        tensors={"module.model.fc2.weight": "model.fc2.weight"},
    ),
    "openvla_oft_proprio": Family(
        write=lambda path: OpenVlaOftPolicy.write_tiny(path, with_l1_head=True),
        read=read_openvla("openvla_oft"),
        file="proprio_projector--latest_checkpoint.pt",
        tensors={"module.fc1.bias": "fc1.bias"},
    ),
    "pi0": Family(
        write=lambda path: make_tiny("pi0", path),
        read=read_flow("pi0"),
        tensors={
            f"model.{_EXPERT}": "model.dit.layers.1.mlp.up_proj.weight",
            "model.paligemma_with_expert.paligemma.lm_head.weight": "language_model.embed_tokens.weight",
            "model.state_proj.bias": "state_proj.bias",
        },
    ),
    "pi05": Family(
        write=lambda path: make_tiny("pi05", path),
        read=read_flow("pi05"),
        tensors={
            f"model.{_EXPERT}": "model.dit.layers.1.mlp.up_proj.weight",
            "model.paligemma_with_expert.gemma_expert.model.norm.dense.bias": "model.dit.norm.dense.bias",
            "model.paligemma_with_expert.paligemma.lm_head.weight": "language_model.embed_tokens.weight",
            "model.time_mlp_in.weight": "time_mlp_in.weight",
        },
    ),
    "pi0_noise_head": Family(
        write=with_flow_heads, read=read_flow("pi0"), file="noise_head.safetensors", tensors=same("0.weight")
    ),
    "pi0_value_head": Family(write=with_flow_heads, read=read_flow("pi0"), file=_HEAD, tensors=same("6.bias")),
    "smolvla": Family(
        write=lambda path: make_tiny("smolvla", path),
        read=read_flow("smolvla"),
        tensors={f"model.{_SMOL_EXPERT}": _SMOL_EXPERT, "model.action_out_proj.weight": "action_out_proj.weight"},
    ),
    "adapters": Family(
        write=write_adapters,
        read=read_adapters,
        file="adapter_model.safetensors",
        tensors={_ADAPTER.format(f"proprio.0.{part}"): f"proprio.0.{part}" for part in ("lora_A", "lora_B")},
    ),
    "adapters_value_head": Family(write=write_adapters, read=read_adapters, file=_HEAD, tensors=same("0.weight")),
}
CASES = [(name, tensor) for name, family in FAMILIES.items() for tensor in family.tensors]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's whole folder, written once."""
    root = tmp_path_factory.mktemp("whole")

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            FAMILIES[name].write(path)
        return path

    return find


@pytest.fixture
def folder(tmp_path: Path, whole: Callable[[str], Path]) -> Callable[[str], Path]:
    """A copy of it, to be damaged."""
    return lambda name: Path(shutil.copytree(whole(name), tmp_path / "folder"))


def change(file: Path, what: Callable[[dict[str, Tensor]], object]) -> None:
    pickled = file.suffix == ".pt"
    tensors = torch.load(file) if pickled else load_file(file)
    what(tensors)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    torch.save(tensors, file) if pickled else save_file(tensors, file, {"format": "pt"})


def cut(tensor: Tensor) -> Tensor:
    """One row less."""
    return tensor[:-1]


def refused(family: Family, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        family.read(path)
    message = str(caught.value)
    assert str(path) in message
    return message


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_folder_is_read(name: str, whole: Callable[[str], Path]) -> None:
    FAMILIES[name].read(whole(name))


@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_a_missing_tensor_is_refused(name: str, tensor: str, folder: Callable[[str], Path]) -> None:
    family, path = FAMILIES[name], folder(name)
    change(path / family.file, lambda tensors: tensors.pop(tensor))
    assert f"{family.tensors[tensor]} is missing" in refused(family, path)


@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_a_tensor_of_another_shape_is_refused(name: str, tensor: str, folder: Callable[[str], Path]) -> None:
    family, path = FAMILIES[name], folder(name)
    shapes: list[list[int]] = []

    def shrink(tensors: dict[str, Tensor]) -> None:
        shapes.append(list(tensors[tensor].shape))
        tensors[tensor] = cut(tensors[tensor])
        shapes.append(list(tensors[tensor].shape))

    change(path / family.file, shrink)
    message = refused(family, path)
    assert f"{family.tensors[tensor]} is {shapes[1]}, expected {shapes[0]}" in message


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_too_many_is_refused(name: str, folder: Callable[[str], Path]) -> None:
    family, path = FAMILIES[name], folder(name)
    stray = "value_head.stray" if name == "mlp_value_head" else "model.stray.weight"
    change(path / family.file, lambda tensors: tensors.update({stray: torch.zeros(2)}))
    assert stray.removeprefix("model.") in refused(family, path)


# Weights that are one.


def lm_folder(path: Path, *, tied: bool, head: Tensor | None, embeddings: bool = True) -> Path:
    """``head``: the output head's weights, if they are in the file."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))

    def apply(tensors: dict[str, Tensor]) -> None:
        if head is not None:
            tensors["lm_head.weight"] = head
        if not embeddings:
            del tensors["model.embed_tokens.weight"]

    change(path / WEIGHTS, apply)
    return path


@pytest.mark.parametrize("embeddings", [True, False], ids=["both", "head_alone"])
def test_a_tied_head_may_be_in_the_file(embeddings: bool, folder: Callable[[str], Path]) -> None:
    path = folder("causal_lm")
    words = load_file(path / WEIGHTS)["model.embed_tokens.weight"]
    policy = read_causal_lm(lm_folder(path, tied=True, head=words, embeddings=embeddings))
    model: Any = policy.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, words)


def test_a_head_of_its_own_must_be_in_the_file(folder: Callable[[str], Path]) -> None:
    path = lm_folder(folder("causal_lm"), tied=False, head=None)
    assert "lm_head.weight is missing" in refused(FAMILIES["causal_lm"], path)
    words = load_file(path / WEIGHTS)["model.embed_tokens.weight"]
    model: Any = read_causal_lm(lm_folder(path, tied=False, head=2 * words)).model
    assert torch.equal(model.lm_head.weight, 2 * words)
    assert torch.equal(model.model.embed_tokens.weight, words)


def test_a_tied_head_that_differs_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("causal_lm")
    words = load_file(path / WEIGHTS)["model.embed_tokens.weight"]
    message = refused(FAMILIES["causal_lm"], lm_folder(path, tied=True, head=2 * words))
    assert "lm_head.weight differs from model.embed_tokens.weight, to which config.json ties it" in message


# Shards.

SHARDED = ("causal_lm", "openvla", "reward_model", "pi0", "pi05", "smolvla")


def split(path: Path, *, unnamed: str | None = None, without: str | None = None) -> Path:
    """Two shards and their index.

    Args:
        unnamed: a tensor, or a file, that the index does not name.
        without: a tensor that the index names and no shard has.
    """
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    names = sorted(tensors)
    places = {name: "b.safetensors" if place > len(names) // 2 else "a.safetensors" for place, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: tensors[name] for name in names if places[name] == file and name != without}
        save_file(part, path / file, {"format": "pt"})
    places = {name: file for name, file in places.items() if unnamed not in (name, file)}
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_read(name: str, folder: Callable[[str], Path]) -> None:
    FAMILIES[name].read(split(folder(name)))


@pytest.mark.parametrize("name", SHARDED)
def test_a_tensor_that_no_shard_has_is_refused(name: str, folder: Callable[[str], Path]) -> None:
    family = FAMILIES[name]
    for tensor, shown in list(family.tensors.items())[:1]:
        assert f"{shown} is missing" in refused(family, split(folder(name), without=tensor))


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_that_the_index_does_not_name_is_missed(name: str, folder: Callable[[str], Path]) -> None:
    assert re.search(r"[\w.]+ is missing", refused(FAMILIES[name], split(folder(name), unnamed="b.safetensors")))


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_that_is_not_there_is_named(name: str, folder: Callable[[str], Path]) -> None:
    path = split(folder(name))
    (path / "b.safetensors").unlink()
    assert "b.safetensors" in refused(FAMILIES[name], path)


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("content", ["{}", '{"weight_map": 3}', "{"])
def test_an_index_that_is_none_is_refused(name: str, content: str, folder: Callable[[str], Path]) -> None:
    path = split(folder(name))
    (path / f"{WEIGHTS}.index.json").write_text(content)
    refused(FAMILIES[name], path)


@pytest.mark.parametrize("name", ["causal_lm", "openvla"])
def test_a_tensor_that_the_index_forgets_is_read_all_the_same(name: str, folder: Callable[[str], Path]) -> None:
    path = folder(name)
    family = FAMILIES[name]
    expected: Any = family.read(path)
    [tensor, *_] = family.tensors
    again: Any = family.read(split(path, unnamed=tensor))
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in expected.state_dict().items()
               if not key.startswith("value_head."))  # fmt: skip


def test_a_damaged_file_is_one_message(folder: Callable[[str], Path]) -> None:
    for name in ("causal_lm", "reward_model"):
        path = folder(name)
        (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:1000])
        refused(FAMILIES[name], path)
        shutil.rmtree(path)


# Where they are used.


def test_no_run_starts_from_a_model_that_lacks_a_tensor(tmp_path: Path, folder: Callable[[str], Path]) -> None:
    path = folder("causal_lm")
    change(path / WEIGHTS, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    options = ("model=causal_lm", "~model.params.architecture", f"model.path={path}", "algorithm.kl_beta=0.1")
    with pytest.raises(UserError, match=f"model.path={path}: the weights do not fit .*embed_tokens.weight is missing"):
        run(tiny_math_run(tmp_path, *options))


def test_a_value_head_is_left_out_or_fresh_as_a_whole(folder: Callable[[str], Path]) -> None:
    """A value head that the run has no use for is left out, one that the folder lacks is fresh."""
    path = folder("tiny_vla")
    _, params = MODELS["tiny_vla"]
    build_policy("tiny_vla", replace(IMAGES, values_per_chunk=0), params, str(path))
    change(path / WEIGHTS, lambda t: [t.pop(name) for name in list(t) if name.startswith("value_head.")])
    build_policy("tiny_vla", IMAGES, params, str(path))


def test_a_gguf_file_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    sizes = {"hidden": 32, "inner": 64, "words": 40}
    layer = {
        "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32),
        "attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
    }  # fmt: skip
    tensors = {"token_embd": (40, 32), "output_norm": (32,)} | {f"blk.0.{name}": shape for name, shape in layer.items()}
    for missing in (None, "blk.0.ffn_up", "token_embd"):
        path = tmp_path / f"{missing}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(sizes["hidden"])
        writer.add_feed_forward_length(sizes["inner"])
        writer.add_block_count(1)
        writer.add_head_count(2)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(sizes["words"])
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*(chr(97 + place) for place in range(26)), *(f"<{place}>" for place in range(13)), "ab"])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(38)
        writer.add_eos_token_id(39)
        for name, shape in tensors.items():
            if name != missing:
                writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if missing is None:
            shipped.convert(path, tmp_path / "converted")
            continue
        with pytest.raises(UserError, match=r"the weights do not fit the model: .* is missing"):
            shipped.convert(path, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()
