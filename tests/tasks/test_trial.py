"""A model that cannot serve the env, and weights that are not its own, are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embodied_rl.cli import main
from embodied_rl.envs.base import KnownSpaces
from embodied_rl.errors import CheckpointError, UserError
from embodied_rl.launch import run
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.registry import build_policy, policy_class
from embodied_rl.models.weights import folder
from embodied_rl.tasks import planning, trial
from embodied_rl.tasks.planning import plan_of
from tests.configs import embodied, tiny_math_run, tiny_run

LIBERO = ("task=embodied", "env=libero_10")


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smolvla")
    policy_class("smolvla").write_tiny(path)  # type: ignore[attr-defined]
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an mlp on the dummy env."""
    path = tmp_path_factory.mktemp("run")
    run(tiny_run(path, "model=mlp", "cluster=serial", "runner.max_steps=1", "runner.val_check_interval=-1"))
    [found] = path.glob("results/*/*/checkpoints/*")
    return found


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr("embodied_rl.launch.make_backend", started)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=smolvla", "model.path=/nowhere"], "model.path: /nowhere/config.json does not exist"),
        (["model=pi0", "model.path={smolvla}"], "its config.json says smolvla, expected 'pi0'.*use model=smolvla"),
        (["model=tiny_vla", "model.path={smolvla}"], "says smolvla, expected 'TinyVlaPolicy'"),
        (["model=libero_10_vla", "model.num_action_chunks=4"], "weights for model.num_action_chunks 8 there, 4 here"),
        (
            ["model=libero_10_vla", "env.init_params.camera_heights=64"],
            "agentview 128 x 128, wrist 128 x 128 there, agentview 64 x 128, wrist 64 x 128 here",
        ),
        (["model=smolvla", "model.path={smolvla}", "env.init_params.cameras=[wrist]"], "sees a camera 'image'"),
        (["model=smolvla", "model.path={smolvla}", "model.num_action_chunks=64"], "predicts 16 actions at once"),
        (["env=dummy", "model=tiny_vla"], "'tiny_vla' acts on camera images and this env gives none"),
    ],
)
def test_what_does_not_fit_the_env(smolvla: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(embodied(*LIBERO, *(override.format(smolvla=smolvla) for override in overrides)))


def test_what_fits_passes(smolvla: Path) -> None:
    plan_of(embodied(*LIBERO, "model=smolvla", f"model.path={smolvla}"))
    plan_of(embodied(*LIBERO, "model=libero_10_vla"))


def test_weights_of_another_network_are_listed(smolvla: Path, tmp_path: Path) -> None:
    for file in smolvla.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = folder.read_weights(tmp_path)
    weights["model.state_proj.bias"] = torch.zeros(3)
    folder.write_tensors(tmp_path / folder.WEIGHTS_FILE, weights)
    with pytest.raises(UserError, match=r"state_proj.bias is \[3\], expected \[64\]"):
        plan_of(embodied(*LIBERO, "model=smolvla", f"model.path={tmp_path}"))


@pytest.mark.parametrize("adapters", ["pissa", "olora"])
def test_adapters_that_need_the_base_in_numbers_are_left_to_the_workers(smolvla: Path, adapters: str) -> None:
    options = ("algorithm=ppo", "model=smolvla", f"model.path={smolvla}", "model.lora.rank=4")
    plan = plan_of(embodied(*LIBERO, *options, f"model.lora.init_lora_weights={adapters}"))
    assert trial.measure_policy(plan) is None


def test_of_large_files_only_the_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / folder.WEIGHTS_FILE
    folder.write_tensors(path, {"a": torch.ones(2, 3)})
    monkeypatch.setattr(folder, "_LARGE", 1)
    with folder.headers_only():
        found = folder.read_tensors(path)["a"]
        assert (found.device.type, found.shape) == ("meta", (2, 3))
    assert torch.equal(folder.read_tensors(path)["a"], torch.ones(2, 3))


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("no_workers")
def test_a_small_folder_is_tried_without_a_warning(tmp_path: Path) -> None:
    spec = PolicySpec(action_dim=2, num_action_chunks=1, state_dim=4, image_shapes={}, values_per_chunk=0)
    build_policy("mlp", spec, {}).save_pretrained(tmp_path / "folder")
    trial.try_policy(
        plan_of(tiny_run(tmp_path, "model=mlp", "model.num_action_chunks=1", f"model.path={tmp_path / 'folder'}"))
    )


@pytest.mark.parametrize("key", ["runner.init_from", "runner.resume_dir"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=tiny_vla", "env.init_params.image_size=32"], "model_type"),
        (["model=mlp", "model.num_action_chunks=2"], "num_action_chunks"),
        (["model=mlp", "model.params.hidden_size=32"], r"hidden_size|policy.0.weight is .*, expected"),
    ],
)
@pytest.mark.usefixtures("no_workers")
def test_checkpoints_of_other_policies(
    checkpoint: Path, tmp_path: Path, key: str, overrides: list[str], message: str
) -> None:
    plan_of(tiny_run(tmp_path, "model=mlp", f"{key}={checkpoint}"))
    with pytest.raises(CheckpointError, match=message) as caught:
        run(tiny_run(tmp_path, *overrides, f"{key}={checkpoint}", "runner.max_steps=9"))
    assert str(checkpoint) in str(caught.value)


def test_an_evaluation_of_another_policys_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    key = f"runner.resume_dir={checkpoint}"
    with pytest.raises(CheckpointError, match=r"is of a policy of model_type=mlp.*tiny_vla; use model=mlp"):
        plan_of(tiny_run(tmp_path, "model=tiny_vla", "env.init_params.image_size=32", "runner.only_eval=true", key))


@pytest.mark.parametrize("where", [("runner.init_from",), ("runner.init_from", "only"), ("runner.resume_dir", "only")])
@pytest.mark.usefixtures("no_workers")
def test_weights_of_the_same_shapes_that_meant_something_else(
    checkpoint: Path, tmp_path: Path, where: tuple[str, ...]
) -> None:
    given = ["model=mlp", f"{where[0]}={checkpoint}", f"runner.only_eval={len(where) > 1}".lower()]
    with pytest.raises(CheckpointError, match=r"model_type=mlp with other .*: activation 'tanh' there, 'relu' here"):
        run(tiny_run(tmp_path, *given, "model.params.activation=relu"))
    trial.try_checkpoints(plan_of(tiny_run(tmp_path, *given, "model.params.initial_log_std=-1.5")))


@pytest.mark.parametrize(
    ("model", "other", "message"),
    [
        (
            ["model=tiny_vla", "env.init_params.image_size=32", "model.params.hidden_size=16"],
            "model.params.num_heads=2",
            "model_type=tiny_vla with other model.params: num_heads 4 there, 2 here",
        ),
        (
            ["model=residual", "model.path=FOLDER", "model.params.base=mlp"],
            "model.params.scale=0.5",
            r"model_type=residual with other model.params: scale 0\.2 there, 0\.5 here",
        ),
    ],
    ids=["tiny_vla", "residual"],
)
def test_what_weights_mean_by_family(tmp_path: Path, model: list[str], other: str, message: str) -> None:
    spec = PolicySpec(action_dim=2, num_action_chunks=1, state_dim=4, image_shapes={}, values_per_chunk=0)
    build_policy("mlp", spec, {}).save_pretrained(tmp_path / "base")
    given = ["model.num_action_chunks=1", *(each.replace("FOLDER", f"{tmp_path}/base") for each in model)]
    run(tiny_run(tmp_path, *given, "cluster=serial", "runner.max_steps=1", "runner.val_check_interval=-1"))
    [made] = tmp_path.glob("results/*/*/checkpoints/*")
    trial.try_checkpoints(plan_of(tiny_run(tmp_path, *given, f"runner.init_from={made}")))
    with pytest.raises(CheckpointError, match=message):
        run(tiny_run(tmp_path, *given, f"runner.init_from={made}", other))


def test_weights_that_were_trained_to_act_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PPO about the means does not teach the medians: a run that plays these says so."""
    given = ["model=tiny_vla", "env.init_params.image_size=32", "model.params.hidden_size=16", "cluster=serial"]
    given += ["model.num_action_chunks=1", "runner.max_steps=1", "runner.val_check_interval=-1"]
    run(tiny_run(tmp_path / "first", *given, "model.params.spread=4.5"))
    assert "another policy" not in capsys.readouterr().out
    [made] = tmp_path.glob("first/results/*/*/checkpoints/*")
    main(["export", str(made), str(tmp_path / "folder")])
    capsys.readouterr()
    for number, where in enumerate((made, tmp_path / "folder")):
        key = "model.path" if number else "runner.init_from"
        run(tiny_run(tmp_path / str(number), *given, f"{key}={where}"))
        assert (
            f"{where}: its weights were trained with model.params.spread=4.5, and this run acts with "
            "model.params.spread=null, which is another policy; set model.params.spread=4.5 to play what was trained\n"
        ) in capsys.readouterr().out
        for width in ("4.5", "[9,2.5]"):  # whatever the width, means are played
            same = tiny_run(tmp_path / "same", *given, f"{key}={where}", f"model.params.spread={width}")
            assert trial.acts_otherwise(plan_of(same)) == []
    evaluated = tiny_run(tmp_path / "only", *given, f"runner.resume_dir={made}", "runner.only_eval=true")
    assert len(trial.acts_otherwise(plan_of(evaluated))) == 1
    [plain] = tmp_path.glob("0/results/*/*/checkpoints/*")
    begun = tiny_run(tmp_path / "more", *given, f"runner.init_from={plain}", "model.params.spread=4.5")
    assert trial.acts_otherwise(plan_of(begun)) == []
    corrected = ("model=residual", *given[1:2], f"model.path={tmp_path}/folder", *given[4:])
    corrected += ("model.params.base_params.hidden_size=16",)
    [said] = trial.acts_otherwise(plan_of(tiny_run(tmp_path / "corrected", *corrected)))
    assert "acts with model.params.base_params.spread=null" in said
    corrected += ("model.params.base_params.spread=4.5",)
    assert trial.acts_otherwise(plan_of(tiny_run(tmp_path / "corrected", *corrected))) == []
    content = json.loads((tmp_path / "folder" / "config.json").read_text())
    content["params"]["spread"] = [4.5, 2.0]  # one for each dimension
    (tmp_path / "folder" / "config.json").write_text(json.dumps(content))
    of_folder = (*given, f"model.path={tmp_path}/folder")
    assert trial.acts_otherwise(plan_of(tiny_run(tmp_path / "same", *of_folder, "model.params.spread=[4.5,2.0]"))) == []
    [said] = trial.acts_otherwise(plan_of(tiny_run(tmp_path / "same", *of_folder)))
    assert "trained with model.params.spread=[4.5, 2.0], and this run acts with model.params.spread=null," in said
    run(tiny_run(tmp_path / "corrected", *corrected))
    [made] = tmp_path.glob("corrected/results/*/*/checkpoints/*")
    again = tiny_run(tmp_path / "again", *corrected[:-1], f"runner.init_from={made}")
    assert len(trial.acts_otherwise(plan_of(again))) == 1


def test_a_fresh_language_model_with_as_many_numbers_in_other_heads(tmp_path: Path) -> None:
    once = ("runner.max_steps=1", "runner.eval_at_end=false")
    config = tiny_math_run(tmp_path, *once, "model.params.architecture.num_key_value_heads=2")
    run(config)
    [made] = tmp_path.glob("results/*/*/checkpoints/global_step_1")
    for where in ("runner.init_from", "runner.resume_dir"):
        given = (f"{where}={made}", f"runner.only_eval={where != 'runner.init_from'}".lower())
        trial.try_checkpoints(
            plan_of(tiny_math_run(tmp_path, "model.params.architecture.num_key_value_heads=2", *given))
        )
        other = ("model.params.architecture.num_heads=1", "model.params.architecture.num_key_value_heads=1")
        with pytest.raises(CheckpointError, match=r"model_type=causal_lm with other model\.params: architecture"):
            trial.try_checkpoints(plan_of(tiny_math_run(tmp_path, *other, *given)))


def test_an_env_that_only_its_simulator_knows_is_left_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = KnownSpaces(action_dim=None, state_dim=4, image_shapes={})
    for module in (planning, trial):
        monkeypatch.setattr(module, "known_spaces", lambda *_: unknown)
    plan_of(embodied("env=dummy", "model=tiny_vla"))


def test_the_trial_draws_nothing(smolvla: Path) -> None:
    state = torch.random.get_rng_state()
    plan_of(embodied(*LIBERO, "model=smolvla", f"model.path={smolvla}", "model.lora.rank=4"))
    plan_of(embodied("env=dummy", "model=mlp"))
    assert torch.equal(torch.random.get_rng_state(), state)
