"""``scripts/imitate_on_gpu.py``, on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from embodied_rl.commands.export import exported_policy
from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.models.base import Policy
from tests.demonstrations.recording import record

SCRIPT = Path(__file__).parents[2] / "scripts/imitate_on_gpu.py"


@pytest.mark.slow
def test_it_imitates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("imitate_on_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # its dataclass looks there
    spec.loader.exec_module(script)
    data = record(tmp_path / "data", range(0, 64, 4), image_size=32)

    folder, common = tmp_path / "weights", ["--device", "cpu", "--batch", "16", "--params", '{"hidden_size": 32}']
    script.main([str(tmp_path / "fresh"), "--data", str(data), "--minutes", "0.001", *common])
    script.main([str(folder), "--data", str(data), str(data), "--minutes", "0.3", *common])

    found = Demonstrations(data, chunk=8)

    def loss(policy: Policy) -> float:
        obs, actions, _ = found.sample(torch.arange(0, found.num_frames, 4))
        return -policy.evaluate(policy.demonstration(obs, actions), temperature=1.0).logprobs.mean().item()

    assert loss(exported_policy(folder)) < 0.9 * loss(exported_policy(tmp_path / "fresh"))
    assert (folder / "views.safetensors").is_file()
