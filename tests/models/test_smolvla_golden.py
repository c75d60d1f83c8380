"""Against what lerobot's own SmolVLA gave: ``golden/smolvla.*``, written by ``scripts/golden/smolvla.py``.

Token ids are equal. The tolerances are those of float32: pixels and states by one operation or two; actions behind two
layers of each transformer and ten steps of denoising, which other kernels add in another order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.flow.policy import resize_with_padding
from embodied_rl.models.pi0 import Pi0Policy
from embodied_rl.models.pi05 import Pi05Policy
from embodied_rl.models.registry import build_policy
from embodied_rl.models.smolvla import SmolVlaPolicy
from tests.models.openvla import golden_inputs as given

_GOLDEN = Path(__file__).parent / "golden"
EXPECTED = load_file(_GOLDEN / "smolvla.safetensors")
FACTS = json.loads((_GOLDEN / "smolvla.json").read_text())
LAYOUT: dict[str, list[int]] = FACTS["layout"]
CAMERAS = {"agentview": given.LEROBOT["image"], "wrist": given.LEROBOT["image2"]}
ROWS = (0, 1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SmolVlaPolicy:
    folder = tmp_path_factory.mktemp("smolvla")
    SmolVlaPolicy.write_tiny(folder)
    spec = PolicySpec(action_dim=7, num_action_chunks=16, state_dim=8, image_shapes=CAMERAS, values_per_chunk=0)
    found = build_policy("smolvla", spec, {"num_steps": 10}, str(folder))
    assert isinstance(found, SmolVlaPolicy)
    weights = {name: torch.from_numpy(given.weight(name, tuple(shape))) for name, shape in LAYOUT.items()}
    found.model.load_state_dict(SmolVlaPolicy.own_weights(weights, "tiny"))
    return found


def observation() -> EnvObs:
    pictures = {
        camera: torch.stack([torch.from_numpy(given.picture(f"{name} {row}", *size)) for row in ROWS])
        for (camera, size), name in zip(CAMERAS.items(), given.LEROBOT, strict=True)
    }
    state = torch.stack([torch.from_numpy(given.state(row)) for row in ROWS])
    return EnvObs(env_ids=torch.arange(2), images=pictures, state=state, instructions=given.INSTRUCTIONS[:2])


def test_names_and_shapes(tmp_path: Path) -> None:
    SmolVlaPolicy.write_tiny(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == LAYOUT


@pytest.mark.parametrize("kind", [SmolVlaPolicy, Pi0Policy, Pi05Policy])
def test_lerobot_knows_every_key(kind: type[SmolVlaPolicy | Pi0Policy], tmp_path: Path) -> None:
    """It refuses a config.json with others."""
    kind.write_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config) - set(FACTS["config_keys"][config["type"]]) == {"type"}


@pytest.mark.parametrize(("camera", "name"), [("agentview", "image"), ("wrist", "image2")])
def test_pictures(camera: str, name: str) -> None:
    got = resize_with_padding(observation().images[camera], (64, 64), centered=False)
    assert torch.allclose(got[..., ::3, ::3], EXPECTED[name], rtol=0, atol=1e-6)


def test_tokens(policy: SmolVlaPolicy) -> None:
    """lerobot pads to 48 with a mask; ours are -1 there."""
    tokens = policy._inputs(observation())["tokens"]
    assert torch.equal(tokens >= 0, EXPECTED["token_mask"])
    assert torch.equal(tokens[tokens >= 0], EXPECTED["tokens"][EXPECTED["token_mask"]])


def test_state(policy: SmolVlaPolicy) -> None:
    state = policy.state_normalizer.normalize(observation().state)
    expected = EXPECTED["state"]
    assert torch.allclose(state, expected[:, :8], rtol=1e-6, atol=1e-6)
    assert expected.shape == (2, policy.max_state_dim) and not expected[:, 8:].any()


def test_actions(policy: SmolVlaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an observation and the noise to the actions; two prompts of different length in one batch of ours."""
    noise = torch.stack([torch.from_numpy(given.noise(row, 16, 32)) for row in ROWS])
    monkeypatch.setattr(policy, "_draw_noise", lambda count, generator: noise)
    chunks: list[Tensor] = []
    to_env = policy._to_env
    monkeypatch.setattr(policy, "_to_env", lambda actions: chunks.append(actions) or to_env(actions))
    decided = policy.act(observation(), greedy=True, temperature=1.0, generator=None)
    assert EXPECTED["chunk"].std() > 0.5
    assert torch.allclose(chunks[0][..., :7], EXPECTED["chunk"], rtol=0, atol=1e-4)
    executed = EXPECTED["actions"].clamp(-1.0, 1.0)  # lerobot leaves that to the simulator
    assert torch.allclose(decided.actions, executed, rtol=0, atol=1e-4)
