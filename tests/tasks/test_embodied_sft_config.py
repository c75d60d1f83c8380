"""What a command line with ``task=sft`` and an env means, and what is refused."""

from __future__ import annotations

import pytest

from embodied_rl.cli import config_of
from embodied_rl.errors import ConfigError
from embodied_rl.schema import EmbodiedSftConfig, SftConfig

GIVEN = ("task=sft", "env=dummy", "data.path=demonstrations")


def test_sft_with_an_env_imitates_what_was_done_in_it() -> None:
    config = config_of("task=sft", "env=libero_spatial", "model=tiny_vla", "data.path=somewhere")
    assert isinstance(config, EmbodiedSftConfig)
    assert config.runner.task_type == "embodied_sft"
    assert config.runner.experiment_name == "sft_libero_spatial"
    assert config.data.path == "somewhere"
    assert config.algorithm.loss_type == "nll"
    assert config_of("task=embodied_sft", "env=libero_spatial", "data.path=somewhere") == config
    assert isinstance(config_of("task=sft"), SftConfig)


def test_what_goes_on_from_imitation_acts_as_it_did() -> None:
    """With another ``spread`` the same weights are another policy."""
    imitated, trained = (config_of(f"experiment=libero_spatial_new_{name}").model for name in ("sft", "ppo"))
    assert imitated.params == trained.params == {"spread": 4.0}


@pytest.mark.parametrize("task", ["task=sft", "task=dagger"])
@pytest.mark.parametrize("model", [[], ["model=libero_10_vla"], ["model=libero_10_all_vla"]], ids=lambda it: str(it))
def test_imitation_leaves_out_the_settings_of_ppo_that_shipped_weights_have(task: str, model: list[str]) -> None:
    """These would take each batch twice."""
    of_env, plain = ("env=libero_10", "data.path=somewhere"), ("env=libero_spatial", "model=tiny_vla", "data.path=s")
    config, other = config_of(task, *of_env, *model), config_of(task, *plain)
    assert (config.algorithm.update_epoch, config.algorithm.critic_warmup_steps) == (1, 0)
    assert (other.algorithm.update_epoch, other.algorithm.critic_warmup_steps) == (1, 0)
    assert config_of(task, *of_env, *model, "algorithm.update_epoch=2").algorithm.update_epoch == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=sft", "env=dummy"], "data.path: missing; set it with data.path=..."),
        ([*GIVEN, "algorithm=grpo"], "got 'ppo', but task=embodied_sft imitates; use algorithm=sft"),
        ([*GIVEN, "algorithm.group_size=2"], "algorithm.group_size: got 2, but demonstrations have no rewards"),
        ([*GIVEN, "env.train.total_num_envs=8"], "env.train.total_num_envs: this run would not read it"),
        ([*GIVEN, "env.eval.total_num_envs=6"], "env.eval.total_num_envs: got 6, which does not divide evenly"),
        ([*GIVEN, "data.augmentation.brightness=2.0"], "data.augmentation.brightness: got 2.0"),
        (
            [*GIVEN, "data.batch_size=1", "cluster.component_placement.actor=0-1"],
            "got 2 actor ranks for data.batch_size",
        ),
        ([*GIVEN, "algorithm.rollout_epoch=2"], "raise data.batch_size instead"),
        ([*GIVEN, "data.weights=[1,1]"], "data.weights: got 2, expected 1, one for each folder of data.path"),
        ([*GIVEN, "data.weights=[1]"], "a single folder of data.path, which is all there is"),
        ([*GIVEN, "data.path=[a,b]", "data.weights=[1,0]"], "data.weights.1: got 0"),
        ([*GIVEN, "data.path=[a,b]", "data.weights=[1,999]"], "1 of 1000 is none of data.batch_size=256 frames"),
        (
            ["task=dagger", "env=libero_spatial", "data.path=somewhere", "data.weights=[1]"],
            "expected 1, one for each folder of data.path and one for what all rounds add",
        ),
        ([*GIVEN, "model=tiny_lm"], "does not act in an env"),
        ([*GIVEN, "runner.weight_sync_interval=5"], "demonstrations are made by no policy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides)
    assert message in str(caught.value)
