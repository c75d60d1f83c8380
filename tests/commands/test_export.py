"""What ``python train.py export`` writes is the policy that was trained, and loads everywhere."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import embodied_rl as er
from embodied_rl.checkpoints.store import RunState, publish, seal
from embodied_rl.cli import main
from embodied_rl.commands.export import export, use_of
from embodied_rl.errors import CheckpointError, UserError
from embodied_rl.launch import run
from embodied_rl.models.base import Policy
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.models.registry import policy_of
from embodied_rl.models.smolvla import SmolVlaPolicy
from embodied_rl.models.weights.lora import merge_adapters
from embodied_rl.params import argument
from embodied_rl.schema import ModelConfig
from tests.commands.checkpoints import republish, save, save_in_ranks
from tests.configs import tiny_run
from tests.models.flow.flow_models import decide, flow_spec, look
from tests.models.small import MODELS, inputs, model_config, shaken
from tests.training.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def outputs(policy: Policy, model: str) -> Mapping[str, Tensor]:
    with torch.no_grad():
        got = policy.eval()(inputs(model), temperature=1.0)
    assert got.values is not None
    return {"logprobs": got.logprobs, "values": got.values}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def loaded(config: ModelConfig, **fields: object) -> Policy:
    torch.manual_seed(5)
    return policy_of(replace(config, **fields), MODELS[config.model_type][0])  # type: ignore[arg-type]


@pytest.mark.parametrize("model", MODELS)
def test_weights_and_value_head_come_back_bit_for_bit(model: str, tmp_path: Path) -> None:
    config = model_config(model)
    policy = shaken(config)
    export(save(policy, config, tmp_path / "run"), tmp_path / "out")
    again = loaded(config, path=str(tmp_path / "out"))
    assert equal(outputs(again, model), outputs(policy, model))
    assert not equal(outputs(loaded(config), model), outputs(policy, model)), "they are not those of fresh weights"


@pytest.mark.parametrize("model", MODELS)
def test_adapters_are_merged(model: str, tmp_path: Path) -> None:
    config = model_config(model, rank=4)
    policy = shaken(config)
    trained = outputs(policy, model)
    export(save(policy, config, tmp_path / "run"), tmp_path / "out")
    names = set(load_file(tmp_path / "out/model.safetensors"))
    plain = model_config(model)
    assert not any("lora" in name or "base_layer" in name for name in names)

    again = outputs(loaded(plain, path=str(tmp_path / "out")), model)
    merge_adapters(policy)
    # To rounding: on an AMD EPYC a Linear gave other last bits for equal weights and inputs, alike strided.
    torch.testing.assert_close(again, outputs(policy, model), rtol=1e-6, atol=1e-6)
    assert torch.allclose(again["logprobs"], trained["logprobs"], atol=1e-4)
    assert not torch.allclose(again["logprobs"], outputs(shaken(plain, seed=2), model)["logprobs"], atol=1e-2)


@pytest.mark.slow
def test_shards_of_two_ranks_become_one_folder(two_ranks: Ranks, tmp_path: Path) -> None:
    config = model_config("mlp", rank=4)
    two_ranks.run(save_in_ranks, config, tmp_path / "written")
    checkpoint = tmp_path / "run/checkpoints/global_step_7"
    checkpoint.parent.mkdir(parents=True)
    seal(tmp_path / "written", RunState(step=7, policy_version=7))
    publish(tmp_path / "written", checkpoint, max_keep=None)
    assert len(list((checkpoint / "actor").glob("*.safetensors"))) == 2
    assert export(tmp_path / "run", tmp_path / "out") == checkpoint
    policy = shaken(config)
    merge_adapters(policy)
    again = loaded(model_config("mlp"), path=str(tmp_path / "out"))
    assert equal(outputs(again, "mlp"), outputs(policy, "mlp"))


def based(tmp_path: Path) -> ModelConfig:
    """Adapters on a language model that is in a folder."""
    base = shaken(model_config("causal_lm"), seed=3)
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base/value_head.safetensors").unlink()
    return model_config("causal_lm", path=str(tmp_path / "base"), rank=4, use_rslora=True)


def test_adapters_alone_load_in_peft_and_here(tmp_path: Path) -> None:
    config = based(tmp_path)
    policy = shaken(config)
    assert isinstance(policy, CausalLMPolicy)
    export(save(policy, config, tmp_path / "run"), tmp_path / "out", adapters_only=True)

    names = set(load_file(tmp_path / "out/adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert all(name.startswith("base_model.model.") and ".lora_" in name for name in names)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "out"))
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        assert torch.equal(theirs.eval()(input_ids=ids).logits, policy.model.eval()(input_ids=ids).logits)

    use = dict(word.split("=", 1) for word in use_of(tmp_path / "out").split())
    assert use == {
        "model": "causal_lm",
        "model.path": str(tmp_path / "base"),
        "model.lora.path": str(tmp_path / "out"),
    }
    torch.manual_seed(8)
    further = model_config("causal_lm", path=use["model.path"], path_of_adapters=use["model.lora.path"])
    again = loaded(further)
    assert equal(outputs(again, "causal_lm"), outputs(policy, "causal_lm"))
    trained = {name for name, p in again.named_parameters() if p.requires_grad}
    assert len(trained) == len(names) + 2, "adapters and value head"

    # A run that goes on with them can be exported again, without the folder that it took them from.
    checkpoint = save(again, further, tmp_path / "further")
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    export(checkpoint, tmp_path / "merged")
    merged = loaded(model_config("causal_lm"), path=str(tmp_path / "merged"))
    assert torch.allclose(outputs(merged, "causal_lm")["logprobs"], outputs(policy, "causal_lm")["logprobs"], atol=1e-4)


def test_exported_folders_are_loaded_from_python(tmp_path: Path) -> None:
    """Of a policy with adapters: merged, and the adapters on their base."""
    base = shaken(model_config("mlp"), seed=3)
    base.save_pretrained(tmp_path / "base")
    config = model_config("mlp", path=str(tmp_path / "base"), rank=4)
    policy = shaken(config)
    checkpoint = save(policy, config, tmp_path / "run")
    for name, alone in (("merged", False), ("adapters", True)):
        export(checkpoint, tmp_path / name, adapters_only=alone)
        again = er.load_policy(tmp_path / name).policy
        torch.testing.assert_close(outputs(again, "mlp"), outputs(policy, "mlp"), rtol=1e-4, atol=1e-4)
    config = model_config("causal_lm")
    export(save(shaken(config), config, tmp_path / "language"), tmp_path / "words")
    with pytest.raises(UserError, match="is of a language model, which takes no actions"):
        er.load_policy(tmp_path / "words")


def test_an_export_looks_through_the_cameras_of_the_run(tmp_path: Path) -> None:
    """Of a policy that was told which is which, against what their names say."""
    SmolVlaPolicy.write_tiny(tmp_path / "base")
    cameras = {"image": "wrist", "image2": "agentview"}
    params = {"cameras": cameras, "num_steps": 2}
    config = replace(model_config("mlp"), model_type="smolvla", path=str(tmp_path / "base"), params=params)
    checkpoint = save(policy_of(config, flow_spec()), config, tmp_path / "run")
    export(checkpoint, tmp_path / "out")
    use = OverridesParser.create().parse_overrides(shlex.split(use_of(tmp_path / "out")))
    assert {one.key_or_group: one.value() for one in use} == {
        "model": "smolvla",
        "model.path": str(tmp_path / "out"),
        "model.num_action_chunks": 3,
        **{f"model.params.{name}": value for name, value in params.items()},
    }
    policies = [er.load_policy(folder).policy for folder in (checkpoint, tmp_path / "out")]
    assert [policy.cameras for policy in policies] == [cameras, cameras]
    first, again = (decide(policy, look(), greedy=True).actions for policy in policies)  # type: ignore[arg-type]
    assert torch.equal(first, again)


def test_a_noise_head_goes_with_the_adapters(tmp_path: Path) -> None:
    """It is in no base, and under adapters stays what the run's seed made it."""
    SmolVlaPolicy.write_tiny(tmp_path / "base")
    params = {"noise_method": "flow_noise", "num_steps": 2}
    config = model_config("mlp", path=str(tmp_path / "base"), rank=4)
    config = replace(config, model_type="smolvla", params=params)
    torch.manual_seed(3)
    policy = policy_of(config, flow_spec())
    checkpoint = save(policy, config, tmp_path / "run")
    export(checkpoint, tmp_path / "out", adapters_only=True)
    torch.manual_seed(4)
    further = replace(config, lora=replace(config.lora, path=str(tmp_path / "out")))
    expected = decide(policy, look())  # type: ignore[arg-type]
    for again in (er.load_policy(tmp_path / "out").policy, policy_of(further, flow_spec())):
        found = decide(again, look())  # type: ignore[arg-type]
        assert torch.equal(found.actions, expected.actions)
        assert torch.equal(found.logprobs, expected.logprobs)
    policy_of(replace(further, params={"num_steps": 2}), flow_spec())  # has no such head, and needs none


@pytest.mark.parametrize(
    "value",
    [
        {"left eye": None, "observation.images.top": "wrist", "a=(b), [c]: {d}\\": {"e": "null"}},
        {"f": ["ünï, 'g' \"h\"", "1", 1e-5, True, {}]},
        ["ünï", "\\", []],
    ],
)
def test_hydra_reads_the_arguments_that_are_printed(value: object) -> None:
    assert OverridesParser.create().parse_override(argument("model.params.key", value)).value() == value


@pytest.mark.parametrize("case", ["no folder", "no adapters", "whole modules", "another base"])
def test_adapters_alone_need_their_base_somewhere(case: str, tmp_path: Path) -> None:
    config = based(tmp_path)
    messages = {
        "no folder": "are in no folder",
        "no adapters": "of a policy without adapters",
        "whole modules": r"are not those of .*base: model\.model\.norm\.weight; use adapters=merged",
        "another base": "are not those of .*base: .* and 3 more; use adapters=merged",
    }
    if case == "no folder":
        config = replace(config, path=None)
    elif case == "no adapters":
        config = replace(config, lora=model_config("causal_lm").lora)
    elif case == "whole modules":
        config = replace(config, lora=replace(config.lora, modules_to_save=["norm"]))
    policy = shaken(config)
    if case == "another base":
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "layernorm" in name or name.endswith("embed_tokens.weight"):
                    parameter.add_(1e-3)
    with pytest.raises(UserError, match=messages[case]):
        export(save(policy, config, tmp_path / "run"), tmp_path / "out", adapters_only=True)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_the_base_may_have_moved(tmp_path: Path) -> None:
    config = based(tmp_path)
    policy = shaken(config)
    checkpoint = save(policy, config, tmp_path / "run")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=f"model.path={tmp_path / 'base'}"):
        export(checkpoint, tmp_path / "out")
    export(checkpoint, tmp_path / "out", adapters_only=True, base=str(tmp_path / "moved"))
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "moved"
    )


def test_a_run_is_evaluated_from_its_export_as_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("cluster=serial", "model=mlp", "++model.params.hidden_size=8", "algorithm=ppo")
    run(tiny_run(tmp_path, *options, "runner.max_steps=2", "runner.eval_at_end=false", "actor.optim.lr=0.05"))
    [trained] = (tmp_path / "results").glob("*/*")
    capsys.readouterr()
    main(["export", str(trained), str(tmp_path / "out")])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"exported: {trained}/checkpoints/global_step_2"
    use = said[1].removeprefix("use it with: ").split()
    assert use == [
        "model=mlp",
        f"model.path={tmp_path / 'out'}",
        "model.num_action_chunks=4",
        "model.params.hidden_size=8",
    ]
    results = []
    for loads in (["++" + use[3], *use[:3]], [*options, f"runner.resume_dir={trained}"]):
        run(tiny_run(tmp_path / str(len(results)), "cluster=serial", *loads, "runner.only_eval=true"))
        [path] = (tmp_path / str(len(results))).rglob("eval.json")
        content = json.loads(path.read_text())
        versions = {episode.pop("policy_version") for episode in content["episodes"]}
        assert versions == {0 if loads[0].startswith("++model.params") else 2}, "an exported folder counts anew"
        results.append({key: content[key] for key in ("overall", "per_task", "episodes")})
    assert results[0] == results[1]


def test_the_record_holds_what_the_run_was_asked_for(tmp_path: Path) -> None:
    config = model_config("causal_lm", path="some/model-on-the-hub", rank=4)
    assert replace(config) == config
    policy = shaken(model_config("mlp"))
    checkpoint = save(policy, config, tmp_path)
    content = json.loads((checkpoint / "policy.json").read_text())
    assert content["model"] == asdict(config)
    assert content["spec"] == json.loads(json.dumps(asdict(MODELS["mlp"][0])))
    assert content["versions"]["torch"] == torch.__version__


# What cannot be exported.


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["export", *arguments])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    return said.err.removeprefix("error: ").strip()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = model_config("mlp")
    return save(shaken(config), config, tmp_path_factory.mktemp("run"))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert refusal(capsys, f"{tmp_path}/none", out) == f"checkpoint={tmp_path}/none: no such directory"
    assert "holds no whole checkpoint" in refusal(capsys, str(tmp_path), out)


def test_a_checkpoint_without_record_or_weights_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    damaged = tmp_path / "run/checkpoints/global_step_3"
    shutil.copytree(checkpoint, damaged)
    (damaged / "policy.json").unlink()
    assert "policy.json is missing" in refusal(capsys, str(damaged), out)
    republish(damaged)
    assert "has no policy.json, so nothing says which policy its weights are of" in refusal(capsys, str(damaged), out)
    (damaged / "policy.json").write_text("{}")
    republish(damaged)
    assert "policy.json: cannot be used (model: Field required)" in refusal(capsys, str(damaged), out)
    shutil.copy(checkpoint / "policy.json", damaged)
    shutil.rmtree(damaged / "actor")
    republish(damaged)
    assert "not a readable checkpoint" in refusal(capsys, str(damaged), out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    config = model_config("mlp")
    policy = shaken(config)
    checkpoint = save(policy, config, tmp_path / "run")
    record = json.loads((checkpoint / "policy.json").read_text())
    record["spec"]["state_dim"] = 9
    (checkpoint / "policy.json").write_text(json.dumps(record))
    republish(checkpoint)
    with pytest.raises(CheckpointError, match=r"policy\.0\.weight is \[16, 4\], expected \[16, 9\]"):
        export(checkpoint, tmp_path / "out")


def test_a_checkpoint_without_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_config("mlp")
    state = {"extra": {"kl_beta": torch.zeros(())}}
    monkeypatch.setattr("embodied_rl.checkpoints.shards.actor_state", lambda *_, **__: state)
    checkpoint = save(shaken(config), config, tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds no weights"):
        export(checkpoint, tmp_path / "out")


def test_an_existing_folder_is_not_written_over(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    assert refusal(capsys, str(checkpoint), str(out)).startswith(f"{out}: exists already")
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    main(["export", str(checkpoint), str(out)])
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "export.json", "model.safetensors"]


def test_a_half_written_folder_does_not_get_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(policy: Policy, directory: Path) -> None:
        (directory / "model.safetensors").touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(Policy, "save_pretrained", fail)
    with pytest.raises(UserError, match="out: cannot be written: No space left on device"):
        export(checkpoint, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "the following arguments are required: <folder>"),
        (["a", "b", "c"], "unrecognized arguments: c"),
        (["a", "b", "adapter=only"], "adapter=only: no such option. Did you mean 'adapters'?"),
        (["a", "b", "--adapter", "only"], "unrecognized arguments: --adapter only"),
        (["a", "b", "adapters=mergd"], "argument --adapters: invalid choice: 'mergd' (choose from "),
        (["a", "b", "base="], "base: got '', expected a value"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, *arguments).splitlines()
    assert said[0].startswith(message)
    assert said[1].startswith("usage: python train.py export <checkpoint or run directory> <folder>")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["export"])
    assert not ending.value.code
    assert "adapters=only     LoRA adapters alone" in capsys.readouterr().out
