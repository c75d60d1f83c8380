from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.envs.base import adapter_class
from embodied_rl.errors import UserError
from embodied_rl.language.datasets.registry import DATASETS
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.mlp import MlpPolicy
from embodied_rl.models.registry import MODELS, build_policy, policy_class

ROOT = Path(__file__).parents[2]
SPEC = PolicySpec(action_dim=2, num_action_chunks=2, state_dim=3, image_shapes={}, values_per_chunk=1)


def test_every_name_leads_to_a_class_named_after_its_folder() -> None:
    for name in MODELS:
        assert policy_class(name).__name__.endswith("Policy")
    assert policy_class("mlp") is MlpPolicy
    assert policy_class("embodied_rl.models.mlp:MlpPolicy") is MlpPolicy


def test_unknown_names_get_suggestions() -> None:
    with pytest.raises(UserError, match=r"model\.model_type: got 'tiny_vl'.* Did you mean 'tiny_vla'"):
        policy_class("tiny_vl")
    with pytest.raises(UserError, match=r"no class 'MlpPolice'\. Did you mean 'MlpPolicy'"):
        policy_class("embodied_rl.models.mlp:MlpPolice")
    with pytest.raises(UserError, match=r"module 'no_such_module' cannot be imported"):
        policy_class("no_such_module:Model")


def test_parameters_are_checked_and_all_problems_are_listed() -> None:
    policy = build_policy("mlp", SPEC, {"hidden_size": 8, "initial_log_std": -1})
    assert isinstance(policy, MlpPolicy)
    assert policy.log_std is not None and policy.log_std.flatten().tolist() == [-1.0] * 4
    with pytest.raises(UserError, match=r"(?s)hiden_size: no such key\. Did you mean 'model\.params\.hidden_size'"):
        build_policy("mlp", SPEC, {"hiden_size": 8})
    with pytest.raises(UserError, match=r"model\.params\.num_layers: got 0.*greater than"):
        build_policy("mlp", SPEC, {"num_layers": 0})
    for wrong in ("8", 8.0, True, None):
        with pytest.raises(UserError, match=r"model\.params\.hidden_size: got .*valid integer"):
            build_policy("mlp", SPEC, {"hidden_size": wrong})
    images = PolicySpec(
        action_dim=2, num_action_chunks=2, state_dim=3, image_shapes={"c": (32, 32)}, values_per_chunk=1
    )
    with pytest.raises(UserError, match=r"hidden_size=40 is not a multiple of num_heads=3"):
        build_policy("tiny_vla", images, {"hidden_size": 40, "num_heads": 3})


def test_a_spec_that_the_model_cannot_serve_is_refused() -> None:
    with pytest.raises(UserError, match=r"'tiny_vla' acts on camera images and this env gives none; use .*'mlp'"):
        build_policy("tiny_vla", SPEC, {})
    stateless = PolicySpec(
        action_dim=2, num_action_chunks=2, state_dim=0, image_shapes={"c": (32, 32)}, values_per_chunk=0
    )
    with pytest.raises(UserError, match=r"'mlp' acts on the env's state vector"):
        build_policy("mlp", stateless, {})


def test_import_under_the_folders_name_is_refused() -> None:
    run = subprocess.run([sys.executable, "-c", "import models"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "import embodied_rl.models" in run.stderr


class NoParams:
    pass


def test_a_class_of_ones_own_without_params_is_named() -> None:
    """Of all three kinds that have options; a bare AttributeError said nothing."""
    name = f"{__name__}:NoParams"
    for key, load in (
        ("env.env_type", adapter_class),
        ("model.model_type", policy_class),
        ("data.dataset", DATASETS.load),
    ):
        with pytest.raises(UserError, match=rf"{key}: got '{name}', but .*NoParams has no dataclass Params"):
            load(name)
