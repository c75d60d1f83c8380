"""The package lerobot opens our folders as they are, and its policies do in them what ours do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from embodied_rl.commands.export import export
from embodied_rl.contracts import EnvObs
from embodied_rl.launch import run
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.flow.policy import FlowPolicy
from embodied_rl.models.pi0 import Pi0Policy
from embodied_rl.models.pi05 import Pi05Policy
from embodied_rl.models.registry import build_policy, policy_class
from tests.configs import tiny_run

PYTHON = Path(__file__).parents[3] / ".venv-lerobot/bin/python"
INSTRUCTION = "put the black bowl in the bottom drawer of the cabinet and close it"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-lerobot; scripts/lerobot_env.sh builds it"),
]


def lerobot(directory: Path, *arguments: object) -> None:
    """Without network."""
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("lerobot_policies.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf"), "PYTHONPATH": ""},
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr


def tiny(model: str, directory: Path) -> Path:
    kind: Any = policy_class(model)
    kind.write_tiny(directory / model)
    return directory / model


def exported(model: str, directory: Path) -> Path:
    """After a training step in an env whose states and actions are not LIBERO's."""
    folder = tiny(model, directory)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("MEAN_STD", "IDENTITY").replace("QUANTILES", "IDENTITY"))
    config = tiny_run(
        directory,
        "cluster=serial",
        "cluster.component_placement={env: 0, rollout: 0, actor: 0}",
        "rollout.pipeline_stage_num=1",
        "env.init_params.image_size=32",
        "env.train.total_num_envs=4",
        "env.train.max_episode_steps=4",
        "algorithm=grpo",
        "algorithm.group_size=2",
        f"model={model}",
        f"model.path={folder}",
        "model.num_action_chunks=2",
        "++model.params={num_steps: 2, train_expert_only: false, cameras: {image: agentview, image2: null}}",
        "actor.optim.lr=1e-2",
        "runner.max_steps=1",
        "runner.eval_at_end=false",
    )
    run(config)
    export(next(directory.glob("results/*/*")), directory / "exported")
    before, after = (load_file(path / "model.safetensors") for path in (folder, directory / "exported"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return directory / "exported"


@pytest.mark.parametrize("model", ["pi0", "pi05", "smolvla"])
@pytest.mark.parametrize("written_by", [tiny, exported])
def test_a_folder_acts_in_lerobot_as_it_does_here(
    model: str, written_by: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written_by(model, tmp_path)
    whole = written_by is tiny
    state_dim, action_dim, names = (8, 7, ["image", "image2"]) if whole else (4, 2, ["image"])
    cameras = dict(zip(["agentview", "wrist"][: len(names)], names, strict=True))
    generator = torch.Generator().manual_seed(0)
    pictures = {
        camera: torch.randint(0, 256, (48, 48, 3), dtype=torch.uint8, generator=generator) for camera in cameras
    }
    state = torch.randn(state_dim, generator=generator)
    spec = PolicySpec(
        action_dim=action_dim,
        num_action_chunks=16,
        state_dim=state_dim,
        image_shapes=dict.fromkeys(cameras, (48, 48)),
        values_per_chunk=0,
    )
    told = {} if whole else {"cameras": {"image": "agentview", "image2": None}}
    policy = build_policy(model, spec, {"num_steps": 10, **told}, str(folder))
    assert isinstance(policy, FlowPolicy)
    noise = torch.randn(policy.horizon, policy.max_action_dim, generator=generator)
    monkeypatch.setattr(policy, "_draw_noise", lambda count, generator: noise[None])
    ours = policy.act(
        EnvObs(
            env_ids=torch.tensor([0]),
            images={camera: picture[None] for camera, picture in pictures.items()},
            state=state[None],
            instructions=(INSTRUCTION,),
        ),
        greedy=True,
        temperature=1.0,
        generator=None,
    ).actions[0]
    files = {path: path.read_bytes() for path in folder.iterdir()}
    given = {
        f"observation.images.{name}": (pictures[camera].permute(2, 0, 1).float() / 255).contiguous()
        for camera, name in cameras.items()
    }
    save_file({**given, "observation.state": state, "noise": noise}, tmp_path / "given.safetensors")
    lerobot(tmp_path, "act", folder, tmp_path / "given.safetensors", INSTRUCTION, tmp_path / "out.safetensors")
    theirs = load_file(tmp_path / "out.safetensors")["actions"][:, :action_dim].clamp(-1.0, 1.0)
    assert ours.std() > 0.1
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-4), (ours - theirs).abs().max()
    assert files == {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", [Pi0Policy, Pi05Policy])
def test_a_published_one_has_the_same_tensors(kind: type[Pi0Policy], tmp_path: Path) -> None:
    config = {
        "type": kind.name,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "image_resolution": [224, 224],
        "chunk_size": 50,
    }
    with torch.device("meta"):
        network = kind.build_network(kind.network_config(config, "published"))
        ours = {name: list(t.shape) for name, t in kind.published_weights(network.state_dict()).items()}
    lerobot(tmp_path, "shapes", kind.name, tmp_path / "shapes.json")
    theirs = json.loads((tmp_path / "shapes.json").read_text())
    assert {name: shape for name, shape in theirs.items() if name in ours} == ours
    assert [name.rsplit(".", 2)[-2] for name in theirs.keys() - ours.keys()] in ([], ["embed_tokens"])
