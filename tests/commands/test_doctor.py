"""``python train.py doctor`` on good and bad folders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from embodied_rl.cli import main
from embodied_rl.commands import doctor
from embodied_rl.commands.doctor import folder_findings
from embodied_rl.commands.export import export
from embodied_rl.commands.make_tiny import make_tiny
from embodied_rl.commands.terminal import Finding, ProblemError, ok
from embodied_rl.commands.weights_folder import read_header
from embodied_rl.errors import UserError
from embodied_rl.models.weights.lora import save_adapters
from tests.commands.checkpoints import republish, save
from tests.models.small import model_config, shaken

SHARD = "actor/shard_00001.safetensors"
REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def found(folder: Path) -> dict[str, str]:
    """What was looked at -> all that was said of it."""
    said: dict[str, str] = {}
    for finding in folder_findings(folder):
        said[finding.what] = said.get(finding.what, "") + f"[{finding.status}] {finding.text} {finding.advice}\n"
    return said


def problems(folder: Path) -> list[Finding]:
    return [finding for finding in folder_findings(folder) if finding.status == "problem"]


def openvla(folder: Path, **config: Any) -> Path:
    """The files of the published layout, in two shards."""
    folder.mkdir()
    content = {"model_type": "openvla", "transformers_version": "4.40.1", **config}
    (folder / "config.json").write_text(json.dumps(content))
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (folder / name).write_text("{}")
    (folder / "dataset_statistics.json").write_text(json.dumps({"libero_10_no_noops": {}}))
    places = {}
    for number, dtype in ((1, torch.bfloat16), (2, torch.float32)):
        file, name = f"model-0000{number}-of-00002.safetensors", f"layer.{number}"
        save_file({name: torch.zeros(1000 * number, 3, dtype=dtype)}, folder / file)
        places[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_a_header_is_read_without_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    assert read_header(path) == {"a": ("F32", 6), "b": ("BF16", 1)}
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], whole[:3], b"", b"\xff" * 40, whole + b"0"):
        path.write_bytes(damaged)
        with pytest.raises(ProblemError, match=r"x\.safetensors is damaged"):
            read_header(path)


def test_a_published_folder(tmp_path: Path) -> None:
    folder = openvla(tmp_path / "vla")
    said = found(folder)
    assert not problems(folder)
    assert "9 k parameters in 2 tensors in 2 files: 6 k F32, 3 k BF16" in said["weights"]
    assert "libero_10_no_noops" in said["statistics"]
    assert "transformers 4.40.1; here: 5." in said["written with"]
    assert f"model=openvla model.path={folder}" in said["use it with"]
    assert "or model=openvla_oft" in said["use it with"]

    (folder / "action_head--latest_checkpoint.pt").touch()
    (folder / "lora_adapter").mkdir()
    (folder / "lora_adapter/adapter_config.json").write_text(json.dumps({"r": 32, "lora_alpha": 16}))
    said = found(folder)
    assert f"model=openvla_oft model.path={folder}" in said["use it with"]
    assert "lora_adapter/: rank 32, alpha 16" in said["adapters"]
    assert "[warning] proprio_projector--*_checkpoint.pt: no proprio_projector" in said["files"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "tokenizer.json is missing: the tokenizer"),
        ("preprocessor_config.json", "preprocessor_config.json is missing: means and deviations"),
        ("model-00002-of-00002.safetensors", "model-00002-of-00002.safetensors is missing"),
        ("dataset_statistics.json", "neither dataset_statistics.json nor norm_stats"),
    ],
)
def test_a_file_that_is_missing_is_a_problem(file: str, text: str, tmp_path: Path) -> None:
    folder = openvla(tmp_path / "vla")
    (folder / file).unlink()
    [problem] = problems(folder)
    assert text in problem.text
    assert problem.advice


def test_a_shard_that_is_cut_off_is_a_problem(tmp_path: Path) -> None:
    folder = openvla(tmp_path / "vla")
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    [problem] = problems(folder)
    assert f"{path.name} is damaged: " in problem.text


def test_weights_in_another_format_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "tokenizer.json").touch()
    [problem] = problems(tmp_path)
    assert "only safetensors are read, not pytorch_model.bin" in problem.advice


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"type": "act"}, "act of lerobot: config.json says type 'act'"),
        ({"model_type": "bert"}, "no layout that is known here"),
    ],
)
def test_models_of_others_are_a_problem(config: dict[str, str], text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    [problem] = problems(tmp_path)
    assert text in problem.text


@pytest.mark.parametrize("model", ["causal_lm", "openvla", "openvla_oft", "pi0", "pi05", "smolvla"])
def test_every_tiny_folder_is_whole(model: str, tmp_path: Path) -> None:
    make_tiny(model, tmp_path / "tiny")
    assert not problems(tmp_path / "tiny")
    said = found(tmp_path / "tiny")["use it with"]
    assert f"model={model}" in said


def test_our_own_checkpoints_runs_exports_and_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = model_config("mlp", rank=4)
    policy = shaken(config)
    checkpoint = save(policy, config, tmp_path / "run")
    (tmp_path / "run/config.yaml").write_text("runner: {task_type: embodied, max_steps: 9}\nmodel: {model_type: mlp}\n")
    (tmp_path / "run/checkpoints/.global_step_5.writing").mkdir()
    for folder in (checkpoint, tmp_path / "run"):
        said = found(folder)
        assert not problems(folder)
        assert "global_step_3: after 3 training steps" in said["checkpoint"]
        assert re.search(r"2, .* MiB, as they were saved \(SHA-256\)", said["files"])
        assert "model alone" in said["contents"]
        assert "mlp, adapters of rank 4; 3×2 actions from 4 states, value head" in said["policy"]
        assert f"python train.py export {checkpoint} <folder>" in said["make a folder"]
    assert "[warning] .global_step_5.writing" in said["interrupted"]
    assert "1 whole: global_step_3" in said["checkpoints"]

    export(checkpoint, tmp_path / "out")
    said = found(tmp_path / "out")
    assert "this project's own, of MlpPolicy" in said["model"]
    assert f"model=mlp model.path={tmp_path / 'out'}" in said["use it with"]
    save_adapters(policy, config.lora, "the/base", tmp_path / "adapters")
    said = found(tmp_path / "adapters")
    assert "rank 4, alpha 8, peft_type LORA" in said["adapters"]
    assert f"model.path=the/base model.lora.path={tmp_path / 'adapters'}" in said["use it with"]

    main(["doctor", str(tmp_path / "run")])  # ends with status 0
    assert "after 3 training steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda c: (c / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda c: (c / SHARD).write_bytes(b""), f"{SHARD} has 0 bytes"),
        (lambda c: (c / "actor/.metadata").write_bytes(b"x"), "holds actor/.metadata: it is of an earlier version"),
        (lambda c: (c / "policy.json").write_text("{}"), "policy.json has 2 bytes"),
        (lambda c: (c / "state.json").write_text("{"), "state.json: cannot be read"),
    ],
)
def test_a_damaged_checkpoint_ends_with_status_1(
    damage: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = model_config("mlp")
    checkpoint = save(shaken(config), config, tmp_path)
    damage(checkpoint)
    [problem] = problems(checkpoint)
    assert text in problem.text
    with pytest.raises(SystemExit) as stop:
        main(["doctor", str(checkpoint)])
    assert stop.value.code == 1
    assert "problem" in capsys.readouterr().out


def test_a_checkpoint_of_before_is_a_warning(tmp_path: Path) -> None:
    config = model_config("mlp")
    checkpoint = save(shaken(config), config, tmp_path)
    (checkpoint / "policy.json").unlink()
    republish(checkpoint)
    assert not problems(checkpoint)
    assert "[warning] no policy.json" in found(checkpoint)["policy"]


def test_a_run_without_whole_checkpoint_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/.global_step_1.writing").mkdir(parents=True)
    [problem] = problems(tmp_path)
    assert problem.text == "no whole one"


def test_what_is_nothing_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        folder_findings(tmp_path / "none")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"holds notes\.txt; expected config\.json"):
        folder_findings(tmp_path)


def test_a_folder_of_weights_is_read_without_torch(tmp_path: Path) -> None:
    folder = openvla(tmp_path / "vla")
    code = "import sys; sys.modules['torch'] = None\nfrom embodied_rl.cli import main\nmain(['doctor', sys.argv[1]])"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "9 k parameters" in done.stdout


# The doctor.


def test_the_packages_that_the_project_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(finding.status for finding in doctor.packages()) == "ok"
    versions: dict[str, str | None] = {"torch": "2.13.0+cpu", "numpy": "1.0", "rich": None}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    declared = (">=3.11", ["torch>=2.11,<2.15", "numpy>=1.26,<3", "rich>=13.9", "wandb; extra == 'wandb'"])
    monkeypatch.setattr(doctor, "_declared", lambda: declared)
    monkeypatch.setattr(doctor, "_pins", lambda: {"torch": "2.12.0"})
    said = [(f.status, f.what, f.text) for f in doctor.packages()]
    assert said == [
        ("problem", "numpy", "1.0, expected <3,>=1.26"),
        ("problem", "rich", "not installed, expected >=13.9"),
        ("ok", "packages", "1 as the project asks for"),
        ("warning", "packages", "not the version that was tested (in brackets): torch 2.13.0+cpu (2.12.0)"),
    ]


def test_python_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.python().status == "ok"
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    assert doctor.python().status == "problem"


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("print('chatter'); print('imports, renders')", "ok", "imports, renders"),
        ("print('imports, cannot render')", "warning", "imports, cannot render"),
        ("raise RuntimeError('no EGL')", "problem", "no EGL"),
        ("import os; os.abort()", "problem", "ended with status -6"),
        ("import time; time.sleep(60)", "problem", "no answer in 2 seconds"),
    ],
)
def test_a_simulator_is_tried_in_a_process_of_its_own(
    code: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in code:
        monkeypatch.setattr(doctor, "_TIMEOUT_SECONDS", 2)
    finding = doctor.simulator("Sim", "json", code)
    assert (finding.status, finding.text) == (status, text)


def test_a_simulator_that_is_not_installed_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    finding = doctor.simulator("Sim", "mani_skill", "")
    assert finding.status == "warning"
    assert finding.advice == "pip install 'mani-skill==3.0.1', for its envs"


def test_channels_need_no_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is the kernel's, without a name: a container's 64 MB of ``/dev/shm`` are no problem."""
    usage = type("Usage", (), {"free": 0, "total": 64 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr(doctor, "simulator", lambda name, *_: ok(name, "takes seconds to try"))
    findings = {finding.what: finding for finding in doctor.installation_findings()}
    assert findings["channels"].status == "ok"
    assert "shared memory" not in findings


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), AttributeError("no attribute 'memfd_create'")])
def test_a_system_without_memory_to_share_is_a_problem(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise error

    monkeypatch.setattr("os.memfd_create", refuse)
    finding = doctor.channels()
    assert finding.status == "problem"
    assert str(error) in finding.text
    assert "cluster=serial" in finding.advice
