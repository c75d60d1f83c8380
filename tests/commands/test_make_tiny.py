from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.cli import main
from embodied_rl.commands.make_tiny import make_tiny
from embodied_rl.errors import UserError
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.models.registry import build_policy
from tests.models.small import LANGUAGE, inputs


def test_a_tiny_language_model_loads_and_is_the_same_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = []
    for name in ("one", "two"):
        torch.manual_seed(len(policies))
        main(["make-tiny", "model=causal_lm", str(tmp_path / name)])
        policies.append(build_policy("causal_lm", LANGUAGE, {}, str(tmp_path / name)))
    assert f"use it with: task=math model=causal_lm model.path={tmp_path / 'two'}" in capsys.readouterr().out
    one, two = policies
    assert isinstance(one, CausalLMPolicy)
    assert one.tokenizer.decode(one.tokenizer("1+2=3")["input_ids"]) == "1+2=3"
    with torch.no_grad():
        left, right = (each.eval()(inputs("causal_lm"), temperature=1.0).logprobs for each in (one, two))
    assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out"], "missing: model=<name>"),
        (["model=causal_lm"], "are required: <folder>"),
        (["model=mlp", "out"], "model=mlp: is made fresh without a folder"),
        (["model=causal_ml", "out"], "Did you mean 'causal_lm'?"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["make-tiny", *arguments])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="exists already"):
        make_tiny("causal_lm", tmp_path)
