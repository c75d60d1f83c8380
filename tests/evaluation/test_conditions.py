"""What ``eval.json`` says an evaluation ran under."""

from __future__ import annotations

import importlib.metadata

import pytest

from embodied_rl.evaluation.report import episode_conditions, episode_seed
from embodied_rl.tasks.math.reporting import completion_conditions
from tests.configs import embodied, small_math


def test_the_adapter_s_defaults_are_there_beside_what_was_set() -> None:
    config = embodied("env=libero_spatial", "env.init_params.num_steps_wait=7")
    found = episode_conditions(config, image_shapes={"wrist": (8, 9), "agentview": (4, 5)}, task_ids=[3, 1])
    assert found["init_params"]["num_steps_wait"] == 7
    assert found["init_params"]["reward"] == "success", "a default"
    assert (found["cameras"], found["task_ids"]) == ({"agentview": [4, 5], "wrist": [8, 9]}, [1, 3])
    assert found["max_episode_steps"] == config.env.eval.max_episode_steps
    assert found["num_action_chunks"] == config.model.num_action_chunks
    for name in ("mujoco", "robosuite"):
        assert found["versions"].get(name) == _version(name)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.mark.parametrize(
    ("env", "seed"), [("libero_10", None), ("dummy", None), ("maniskill_push_cube", 5), ("robosuite_lift", 5)]
)
def test_a_seed_belongs_to_an_episode_only_where_its_state_needs_one(env: str, seed: int | None) -> None:
    model = ["model=mlp"] if env.startswith(("maniskill", "robosuite")) else []
    assert episode_seed(embodied(f"env={env}", "env.seed=5", *model)) == seed


def test_a_language_model_s_sampling_and_scoring() -> None:
    found = completion_conditions(small_math("rollout.stop=[';']", "reward.success_threshold=0.5"))
    assert (found["stop"], found["success_threshold"], found["max_new_tokens"]) == ([";"], 0.5, 8)
    assert found["params"]["digits"] == 1
    assert "torch" in found["versions"]
