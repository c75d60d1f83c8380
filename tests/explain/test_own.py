"""What is said of our own keys is what the schema and the configuration say."""

from __future__ import annotations

from embodied_rl.cli import config_of
from embodied_rl.config import GROUPS
from embodied_rl.explain.own import documentation, own_groups, own_keys
from embodied_rl.params import shown
from embodied_rl.schema import ActionModelConfig
from embodied_rl.tasks.table import TASKS
from embodied_rl.tasks.validation import known_keys


def test_every_key_that_takes_a_value_is_known() -> None:
    known = {key for task in TASKS.values() for key in known_keys(task.config)}
    leaves = {key for key in known if not any(other.startswith(f"{key}.") for other in known)}
    assert set(own_keys()) == leaves


def test_type_text_and_default() -> None:
    about = own_keys()["algorithm.clip_ratio_low"]
    assert about.kind == "PositiveFraction"
    assert about.text.startswith("The ratio is clipped to [1 - low, 1 + high]")
    assert about.defaults["embodied"] == str(config_of("env=libero_10").algorithm.clip_ratio_low)


def test_choices_stand_for_literal_types() -> None:
    assert own_keys()["algorithm.reward_type"].kind == "chunk_level | action_level"


def test_presets_are_those_of_the_files() -> None:
    presets = own_keys()["algorithm.adv_type"].presets
    assert presets["ppo"] == "gae"
    assert presets["rloo"] == "rloo"
    assert presets["ppo"] == config_of("algorithm=ppo").algorithm.adv_type


def test_inherited_fields_come_first() -> None:
    loading = ["hf_overrides", "revision", "trust_remote_code", "tokenizer_path"]
    own = ["model_type", "path", "params", "lora", "trainable", "attn_implementation", *loading, "num_action_chunks"]
    assert list(documentation(ActionModelConfig)) == own


def test_groups_have_their_default_and_choices() -> None:
    groups = own_groups()
    assert set(groups) == set(GROUPS)
    assert groups["env"].default == "dummy"
    assert {"ppo", "grpo"} <= set(groups["algorithm"].choices)
    assert "base" not in groups["algorithm"].choices


def test_values_are_shown_as_the_command_line_takes_them() -> None:
    assert shown({"a": None, "b": [True, 1e-05]}) == "{a: null, b: [true, 1e-05]}"
