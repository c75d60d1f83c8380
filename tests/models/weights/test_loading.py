"""``model.hf_overrides``, ``revision``, ``trust_remote_code`` and ``tokenizer_path``."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch import Tensor

from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.commands.export import use_of
from embodied_rl.errors import UserError
from embodied_rl.language.rewards.reward_model import RewardModel
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.causal_lm import CausalLMPolicy, character_tokenizer
from embodied_rl.models.registry import build_policy, policy_class, policy_of
from embodied_rl.models.weights.loading import Loading, merged
from embodied_rl.schema import ModelConfig
from tests.models.causal_lm.language import SMALL, language_spec, replay_inputs
from tests.models.flow.flow_models import flow_spec, look
from tests.models.openvla.published import observe
from tests.models.openvla.published import spec as openvla_spec
from tests.models.small import settings

ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
"""Positions count half."""
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "causal_lm": ROPE,
    "openvla": {"text_config": ROPE},
    "openvla_oft": {"text_config": ROPE},
    "pi0": {"vlm_config": {"text_config": ROPE}, "dit_config": ROPE},
    "pi05": {"vlm_config": {"text_config": ROPE}, "dit_config": ROPE},
    "smolvla": {"vlm_config": {"text_config": ROPE}, "expert_config": ROPE},
}
SPECS: Mapping[str, PolicySpec] = {
    "causal_lm": language_spec(),
    "openvla": openvla_spec(chunks=1, values=0),
    "openvla_oft": openvla_spec(values=0),
    **dict.fromkeys(("pi0", "pi05", "smolvla"), flow_spec(values=0)),
}
TEXT = replay_inputs([[5, 6, 7, 8]], [[9, 10, 11]], max_prompt=4, max_response=8, pad=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    made = {}
    for model in OVERRIDES:
        made[model] = tmp_path_factory.mktemp(model)
        policy_class(model).write_tiny(made[model])  # type: ignore[attr-defined]
    return made


def load(model: str, folder: Path | str, **keys: Any) -> Policy:
    params = {"unnorm_key": "libero_spatial_no_noops"} if model.startswith("openvla") else {}
    return build_policy(model, SPECS[model], params, str(folder), Loading(**keys)).eval()


def computed(model: str, policy: Policy) -> Tensor:
    if model == "causal_lm":
        return policy.evaluate(TEXT, temperature=1.0).logprobs.detach()
    obs = observe() if model.startswith("openvla") else look()
    return policy.act(obs, greedy=True, temperature=1.0, generator=torch.Generator().manual_seed(0)).logprobs


@pytest.mark.parametrize("model", OVERRIDES)
def test_an_override_changes_the_network_and_stays_in_its_folder(
    folders: Mapping[str, Path], tmp_path: Path, model: str
) -> None:
    plain, changed = load(model, folders[model]), load(model, folders[model], hf_overrides=OVERRIDES[model])
    found = computed(model, changed)
    assert not torch.equal(found, computed(model, plain))
    changed.save_pretrained(tmp_path / "saved")
    assert torch.equal(computed(model, load(model, tmp_path / "saved")), found)


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("causal_lm", {"atention_dropout": 0.1}, "hf_overrides.atention_dropout.*Did you mean 'attention_dropout'"),
        ("causal_lm", {"attention_dropout": "x"}, "attention_dropout: got 'x': .*expected float"),
        ("causal_lm", {"hidden_size": 32}, r"would change the weights' tensors: .*embed_tokens.weight is \[\d+, 32\]"),
        ("causal_lm", {"num_hidden_layers": 1}, r"would change the weights' tensors: .*layers\.1\..* is missing"),
        ("causal_lm", {"rope_parameters": {"rope_type": "linaer"}}, "no network can be built so: KeyError: 'linaer'"),
        ("causal_lm", {"dtype": "bfloat16"}, "set model.params.dtype"),
        ("openvla", {"text_cfg": {}}, "Did you mean 'text_config'"),
        ("openvla", {"text_config": {"intermediate_size": 8}}, "tensors: .*gate_proj"),
        ("pi0", {"dit_config": 3}, "expected names of GemmaConfig"),
        ("pi0", {"dit_config": {"hidden_size": 8}}, "tensors: .*dit"),
        ("smolvla", {"expert_config": {"rms_norm_epsilon": 1.0}}, "Did you mean 'rms_norm_eps'"),
    ],
)
def test_a_wrong_override(folders: Mapping[str, Path], model: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(model, folders[model], hf_overrides=overrides)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_names_of_rope(folders: Mapping[str, Path], name: str) -> None:
    policy = load("causal_lm", folders["causal_lm"], hf_overrides={name: {"type": "linear", "factor": 4.0}})
    assert isinstance(policy, CausalLMPolicy)
    found = policy.model.config.rope_parameters
    assert (found["rope_type"], found["factor"], found["rope_theta"]) == ("linear", 4.0, 10000.0)


def test_dropout_is_off_unless_asked_for(folders: Mapping[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["causal_lm"] / "config.json").read_text())
    folder = Path(shutil.copytree(folders["causal_lm"], tmp_path / "dropping"))
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.9}))
    off, on = load("causal_lm", folder).train(), load("causal_lm", folder, hf_overrides={"attention_dropout": 0.5})
    assert torch.equal(computed("causal_lm", off), computed("causal_lm", off))
    assert torch.equal(computed("causal_lm", on), computed("causal_lm", off)), "acting is without"
    assert not torch.equal(computed("causal_lm", on.train()), computed("causal_lm", off))


def test_a_fresh_model_and_max_positions() -> None:
    policy = build_policy(
        "causal_lm",
        language_spec(),
        {"architecture": SMALL},
        loading=Loading(hf_overrides={"max_position_embeddings": 99, **ROPE}),
    )
    assert isinstance(policy, CausalLMPolicy)
    assert policy.max_length == 99
    assert policy.model.config.rope_parameters["factor"] == 2.0


def test_a_record_builds_the_same_network(folders: Mapping[str, Path], tmp_path: Path) -> None:
    config = ModelConfig(
        model_type="pi0",
        path=str(folders["pi0"]),
        params={},
        lora=settings(rank=0),
        hf_overrides=dict(OVERRIDES["pi0"]),
        trust_remote_code=True,
    )
    PolicyRecord.of(config, SPECS["pi0"]).write(tmp_path)
    record = PolicyRecord.read(tmp_path)
    assert not record.model.trust_remote_code, "whoever reads the record decides"
    again = policy_of(record.model, record.spec)
    assert torch.equal(
        computed("pi0", again), computed("pi0", load("pi0", folders["pi0"], hf_overrides=OVERRIDES["pi0"]))
    )


def test_an_export_says_how_its_base_is_loaded(tmp_path: Path) -> None:
    model = {"revision": "v1", "hf_overrides": {"attention_dropout": 0.1, **ROPE}, "trust_remote_code": True}
    content = {"model_type": "causal_lm", "base": "org/name", "params": {}, "record": {"model": model}}
    (tmp_path / "export.json").write_text(json.dumps(content))
    assert use_of(tmp_path).split()[3:] == [
        "model.revision=v1",
        "model.hf_overrides.attention_dropout=0.1",
        "model.hf_overrides.rope_parameters.rope_type=linear",
        "model.hf_overrides.rope_parameters.factor=2.0",
        "model.trust_remote_code=true",
    ]


@pytest.mark.parametrize("base", [None, "the base (1)"])
def test_folders_of_any_name_are_understood(tmp_path: Path, base: str | None) -> None:
    folder = tmp_path / "my models (1)"
    folder.mkdir()
    content = {"model_type": "causal_lm", "base": base, "params": {"unnorm_key": "nan"}, "record": {"model": {}}}
    (folder / "export.json").write_text(json.dumps(content))
    found = OverridesParser.create().parse_overrides(shlex.split(use_of(folder))[1:])
    paths = {"model.path": str(folder)} if base is None else {"model.path": base, "model.lora.path": str(folder)}
    assert {one.key_or_group: one.value() for one in found} == {**paths, "model.params.unnorm_key": "nan"}


def test_overrides_of_two_sections() -> None:
    assert merged({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}, "e": 5}) == {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("openvla", {"revision": "v1"}, r"model.revision: got 'v1', which OpenVlaPolicy cannot have: .*hf download"),
        ("pi0", {"trust_remote_code": True}, "Pi0Policy cannot have: .*never run"),
        ("pi0", {"tokenizer_path": "x"}, "model.params.tokenizer"),
        ("causal_lm", {"revision": "v1"}, "is a local folder, which has no revisions; leave the revision out"),
    ],
)
def test_keys_that_a_model_cannot_have(
    folders: Mapping[str, Path], model: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(model, folders[model], **keys)
    with pytest.raises(UserError, match="MlpPolicy cannot have"):
        build_policy("mlp", dataclasses.replace(SPECS["pi0"], image_shapes={}), {}, None, Loading(**keys))


def test_a_tokenizer_from_elsewhere(folders: Mapping[str, Path], tmp_path: Path) -> None:
    character_tokenizer("ab").save_pretrained(tmp_path)
    policy = load("causal_lm", folders["causal_lm"], tokenizer_path=str(tmp_path))
    assert isinstance(policy, CausalLMPolicy)
    assert len(policy.tokenizer) == 5
    with pytest.raises(UserError, match=r"model.tokenizer_path=/nowhere: no tokenizer"):
        load("causal_lm", folders["causal_lm"], tokenizer_path="/nowhere")


REVISIONS = """
from embodied_rl.models.registry import build_policy, policy_class
from embodied_rl.models.weights.loading import Loading
from tests.models.causal_lm.language import language_spec
for revision in (None, "v1", "1" * 40):
    loading = Loading(revision=revision)
    policy_class("causal_lm").try_loading("org/name", policy_class("causal_lm").Params(), loading)
    policy = build_policy("causal_lm", language_spec(), {}, "org/name", loading)
    print(int(policy.model.get_input_embeddings().weight[0, 0]), len(policy.tokenizer))
try:
    build_policy("causal_lm", language_spec(), {}, "org/name", Loading(revision="v3"))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_revision_of_the_hub(tmp_path: Path) -> None:
    """A cache as the hub's client lays it out, read by transformers without network."""
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for ref, commit, number, characters in (("v1", "1" * 40, 1.0, "ab"), ("main", "2" * 40, 2.0, "abc")):
        policy = build_policy("causal_lm", language_spec(), {"architecture": {**SMALL, "characters": characters}})
        assert isinstance(policy, CausalLMPolicy)
        torch.nn.init.constant_(policy.model.get_input_embeddings().weight, number)  # type: ignore[arg-type]
        policy.save_pretrained(repository / "snapshots" / commit)
        (repository / "refs" / ref).write_text(commit)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REVISIONS], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    *found, refusal = done.stdout.strip().splitlines()
    assert found == ["2 6", "1 5", "1 5"]
    assert refusal.startswith("UserError model.path=org/name: not a causal language model's folder, nor one on the hub")


CODE = """
import os
from transformers import Qwen2Config, Qwen2ForCausalLM

os.environ["RAN_CODE_OF_A_FOLDER"] = "1"


class OwnConfig(Qwen2Config):
    model_type = "own"


class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2.0
        return output
"""


DROPPING = """
    def __init__(self, config):
        super().__init__(config)
        self.hidden_dropout = 0.5
        self.drop = __import__("torch").nn.Dropout(0.5)
"""


@pytest.fixture
def own_code(folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose model doubles its logits."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.delenv("RAN_CODE_OF_A_FOLDER", raising=False)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asked on the console"))
    folder = Path(shutil.copytree(folders["causal_lm"], tmp_path / "own_code"))
    (folder / "modeling_own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": names}))
    return folder


@pytest.mark.parametrize("early", [False, True])
def test_code_of_a_folder_is_not_run(own_code: Path, early: bool) -> None:
    model = policy_class("causal_lm")
    with pytest.raises(
        UserError, match=r"own_code: its config.json names code of its own \(.*modeling_own.OwnModel"
    ) as error:
        model.try_loading(str(own_code), model.Params(), Loading()) if early else load("causal_lm", own_code)
    assert "set model.trust_remote_code=true" in str(error.value)
    assert "RAN_CODE_OF_A_FOLDER" not in os.environ


def test_trusted_code_trains_and_travels_with_the_policy(
    own_code: Path, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    policy = load("causal_lm", own_code, trust_remote_code=True)
    assert isinstance(policy, CausalLMPolicy)
    assert type(policy.model).__module__.startswith("transformers_modules.")
    plain = load("causal_lm", folders["causal_lm"])
    sharper = plain.evaluate(TEXT, temperature=0.5).logprobs
    before = computed("causal_lm", policy)
    torch.testing.assert_close(before, sharper)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.001)
    (-policy.train()(TEXT, temperature=1.0).logprobs.sum()).backward()
    optimizer.step()
    after = computed("causal_lm", policy.eval())
    assert after.sum() > before.sum()
    policy.save_pretrained(tmp_path / "saved")
    assert torch.equal(computed("causal_lm", load("causal_lm", tmp_path / "saved", trust_remote_code=True)), after)
    with pytest.raises(UserError, match="names code of its own"):
        load("causal_lm", tmp_path / "saved")
    assert len(policy.shard_units()) == 2


def test_dropout_of_trusted_code_is_off(own_code: Path) -> None:
    config = json.loads((own_code / "config.json").read_text())
    (own_code / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.9}))
    code = CODE.replace("    def forward", f"{DROPPING}\n    def forward")
    (own_code / "modeling_own.py").write_text(code)
    policy = load("causal_lm", own_code, trust_remote_code=True).train()
    assert isinstance(policy, CausalLMPolicy)
    assert policy.model.hidden_dropout == 0.0
    assert policy.model.drop.p == 0.0  # type: ignore[union-attr]
    assert torch.equal(computed("causal_lm", policy), computed("causal_lm", policy))


def test_a_tokenizer_with_code(folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = Path(shutil.copytree(folders["causal_lm"], tmp_path / "own_tokenizer"))
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    is_own = True\n"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "OwnTokenizer", "auto_map": names})
    )
    with pytest.raises(UserError, match=r"its tokenizer_config.json names code of its own \(.*OwnTokenizer"):
        load("causal_lm", folder)
    with pytest.raises(UserError, match=r"^model.tokenizer_path=.*own_tokenizer: its tokenizer_config.json"):
        load("causal_lm", folders["causal_lm"], tokenizer_path=str(folder))
    policy = load("causal_lm", folder, trust_remote_code=True)
    assert isinstance(policy, CausalLMPolicy)
    assert policy.tokenizer.is_own  # type: ignore[attr-defined]


def test_a_reward_model(own_code: Path) -> None:
    with pytest.raises(UserError, match=r"reward.params.path=.*set reward.params.trust_remote_code=true"):
        RewardModel({"path": str(own_code)}, "cpu")
    with pytest.raises(UserError, match=r"reward.params.revision=v1: reward.params.path .*local folder"):
        RewardModel({"path": str(own_code), "revision": "v1"}, "cpu")


def test_loading_leaves_torch_as_it_was(folders: Mapping[str, Path]) -> None:
    """transformers replaces ``torch.linspace`` while it loads, which torch kept for good where nothing came before."""
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
from embodied_rl.models.weights.folder import load_model
load_model(AutoModelForCausalLM, sys.argv[1])
with torch.device("meta"):
    print(torch.linspace(0, 1, 3).device)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folders["causal_lm"])], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "meta", done.stderr
