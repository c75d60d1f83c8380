"""``scripts/imitate_on_gpu.py``, on the CPU."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embodied_rl.commands.export import exported_policy
from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.models.base import Policy
from tests.demonstrations.recording import record

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
def test_it_imitates_what_is_there_and_what_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)  # processes that decode look there, too
    script = importlib.import_module("imitate_on_gpu")
    data = record(tmp_path / "data", range(0, 64, 4), image_size=32)
    late, begin, clock = tmp_path / "late", script.Imitation.train, [0.0]

    def train(self: Any, part: float) -> torch.Tensor:
        clock[0] += 0.08  # as many steps however busy the machine is
        if self.step == 1:
            shutil.copytree(data, late)
        return begin(self, part)

    folder, common = tmp_path / "weights", ["--device", "cpu", "--batch", "16"]
    script.main(
        [str(tmp_path / "fresh"), "--data", str(data), "--minutes", "0.001", "--params", '{"hidden_size": 32}', *common]
    )
    more = ["--half", "--write-every", "0.1", "--init", str(tmp_path / "fresh")]
    monkeypatch.setattr(script.Imitation, "train", train)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    script.main([str(folder), "--data", str(data), str(late), "--minutes", "0.4", *common, *more])
    assert exported_policy(folder).params == exported_policy(tmp_path / "fresh").params
    assert f"{late}: 16 episodes" in capsys.readouterr().out

    sizes = [(folder / "model.safetensors").stat().st_size for folder in (folder, tmp_path / "fresh")]
    assert sizes[0] < 0.6 * sizes[1]

    found = Demonstrations(data, chunk=8)

    def loss(policy: Policy) -> float:
        obs, actions, _ = found.sample(torch.arange(0, found.num_frames, 4))
        return -policy.evaluate(policy.demonstration(obs, actions), temperature=1.0).logprobs.mean().item()

    losses = [loss(exported_policy(tmp_path / name)) for name in ("fresh", "weights-1", "weights")]
    assert losses == sorted(losses, reverse=True), losses
    assert losses[-1] < 0.9 * losses[0], losses
    assert (folder / "views.safetensors").is_file()
