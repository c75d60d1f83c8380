"""The config: unknown keys, wrong types and rules across fields, all problems at once, each with its remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from embodied_rl.cli import config_of
from embodied_rl.config import CONFIG_MODULE
from embodied_rl.errors import ConfigError
from embodied_rl.models.weights.shipped import SHIPPED
from embodied_rl.schema import EmbodiedConfig, MathConfig
from embodied_rl.tasks.table import TASKS
from embodied_rl.tasks.validation import build_config, known_keys
from tests.configs import REQUIRED

CONFIG = Path(__file__).parents[2] / "config"
ALGORITHMS = sorted(path.stem for path in (CONFIG / "algorithm").glob("*.yaml") if path.stem not in ("base", "sft"))
ENVS = sorted(path.stem for path in (CONFIG / "env").glob("*.yaml"))
CHUNKS_AHEAD = ("rollout.max_staleness=1", "rollout.chunks_ahead=2")


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        config_of(*overrides)
    return refused.value.problems


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("cluster", ["serial", "process"])
def test_every_choice_of_groups_is_a_valid_config(env: str, algorithm: str, cluster: str) -> None:
    config = config_of(f"env={env}", f"algorithm={algorithm}", f"cluster={cluster}", *REQUIRED.get(env, ()))
    assert isinstance(config, EmbodiedConfig)
    assert config.env.name.startswith(env)
    assert config.cluster.backend == cluster


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONFIG / "experiment").glob("*.yaml")))
def test_every_experiment_is_a_valid_config(experiment: str) -> None:
    assert config_of(f"experiment={experiment}", *REQUIRED.get(experiment, ())).runner.max_steps > 0


def test_the_env_chooses_the_model_unless_the_user_does() -> None:
    assert config_of("env=dummy").model.model_type == "mlp"
    assert config_of("env=libero_10").model.model_type == "tiny_vla"
    assert config_of("env=libero_10", "model=mlp").model.model_type == "mlp"


def test_a_model_that_ships_with_the_project_chooses_how_it_learns_unless_the_user_does() -> None:
    """And where no other is named, ``env=libero_10`` starts from one."""
    suite = {"task_suite_name": "libero_10", "max_cached_scenes": 6}
    chosen = config_of("env=libero_10")
    assert isinstance(chosen, EmbodiedConfig)
    assert chosen.model.path == str(SHIPPED / "libero_10_vla")
    assert chosen.env.init_params == suite | {"draft": True, "reward": "progress"}
    assert (chosen.algorithm.adv_type, chosen.algorithm.gamma) == ("gae", 0.95)
    assert config_of("env=libero_10", "algorithm=grpo").algorithm.adv_type == "grpo"

    fresh = config_of("env=libero_10", "model=tiny_vla")
    assert isinstance(fresh, EmbodiedConfig)
    assert fresh.model.path is None
    assert fresh.env.init_params == suite
    assert (fresh.algorithm.adv_type, fresh.algorithm.gamma) == ("grpo", 0.99)
    assert config_of("experiment=libero_10_sft").model.path is None, "imitation begins with random weights"


@pytest.mark.parametrize("options", [("env=libero_10", "algorithm=ppo"), ("task=math",), ("task=sft",)], ids=" ".join)
def test_the_saved_config_is_read_back_as_it_was(options: tuple[str, ...]) -> None:
    config = config_of(*options)
    assert build_config(yaml.safe_load(yaml.safe_dump(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("task", TASKS)
def test_the_yaml_gives_every_key_of_the_schema(task: str) -> None:
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        raw = OmegaConf.to_container(compose("train", overrides=[f"task={task}"]), resolve=True)
    assert isinstance(raw, dict)
    assert not raw.keys() - set(known_keys(TASKS[task].config)), "a section that the task does not read"
    chosen_or_absent = {"eval_env"}
    for key in set(known_keys(TASKS[task].config)) - chosen_or_absent:
        node = raw
        for part in key.split("."):
            assert part in node, f"{key} has no default in config/"
            node = node[part]


def test_a_task_chooses_the_groups_that_it_needs() -> None:
    config = config_of("task=math")
    assert isinstance(config, MathConfig)
    assert config.model.model_type == "causal_lm"
    assert config.data.name == "arithmetic"
    assert config.actor.micro_batch_size == 128, "the model's, not what all tasks share"


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("rlpd", "sac")])
@pytest.mark.parametrize("cluster", ["serial", "process"])
def test_every_algorithm_is_a_valid_config_of_math(algorithm: str, cluster: str) -> None:
    assert isinstance(config_of("task=math", f"algorithm={algorithm}", f"cluster={cluster}"), MathConfig)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=math", "env=libero_10"], "env: task=math has no env and would not read it; leave it out"),
        (["task=math", "++env.init_params.x=1"], "env: task=math has no env"),
        (["data=arithmetic"], "data: task=embodied has no data and would not read it; leave it out, or use task=math"),
        (["task=math", "model=mlp"], "got 'mlp', which acts in an env; use a language model"),
        (["env=dummy", "model=tiny_lm"], "got 'causal_lm', a language model, which does not act in an env"),
        (["task=math", "model=causal_lm"], "model.path: missing; set it with model.path=..."),
        (["task=math", "rollout.min_new_tokens=99"], "rollout.min_new_tokens: got 99, more than max_new_tokens="),
        (["task=math", "algorithm.rollout_epoch=2"], "raise data.rollout_batch_size instead"),
        (
            ["task=math", "cluster.component_placement.rollout=0-1", "data.rollout_batch_size=1"],
            "got 2 rollout workers for data.rollout_batch_size=1 prompts",
        ),
        (
            ["task=math", "cluster.component_placement.actor=0-1", "data.rollout_batch_size=1"],
            "got 2 actor workers for data.rollout_batch_size=1 prompts",
        ),
        (["task=math", "++cluster.component_placement.env=0"], "got component 'env', expected actor, rollout"),
        (["task=math", "algorithm.group_size=1"], "adv_type=grpo compares the members of a group"),
        (["task=math", "algorithm=sft"], "algorithm.loss_type: nll imitates demonstrations; use task=sft"),
        (["env=dummy", "algorithm=sft"], "nll imitates demonstrations, and envs have none"),
        (["task=sft", "algorithm=grpo"], "algorithm.loss_type: got 'ppo', but task=sft imitates; use algorithm=sft"),
        (["task=sft", "algorithm.group_size=2"], "algorithm.group_size: got 2, but demonstrations have no rewards"),
        (["task=sft", "algorithm.sampling_params.temperature=0.5"], "that at temperature 1"),
        (
            ["task=math", "algorithm=reinforce_pp", "algorithm.adv_norm.mean_level=task"],
            "algorithm.adv_norm: got the level task, but task=math has no tasks to tell apart; use group or batch",
        ),
        (
            ["task=math", "algorithm.bc_coef=0.1", "algorithm.bc_path=somewhere"],
            "algorithm.bc_coef: got 0.1, but task=math has no policy in an env that could be kept to recorded episodes",
        ),
    ],
)
def test_what_cannot_be_in_math_is_refused(overrides: list[str], message: str) -> None:
    assert any(message in text for text in problems(*overrides)), problems(*overrides)


def test_several_wrong_types_are_reported_together() -> None:
    found = problems("actor.optim.lr=abc", "algorithm.group_size=0", "runner.save_interval=-3", "algorithm.gamma=1.5")
    assert len(found) == 4
    assert any("actor.optim.lr: got 'abc' (str); input should be a valid number" in text for text in found)
    assert any("algorithm.group_size: got 0" in text for text in found)


def test_several_broken_rules_are_reported_together() -> None:
    found = problems("env.train.total_num_envs=63", "algorithm.n_minibatches=null", "algorithm.group_size=1")
    assert len(found) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["++algorithm.gama=0.9"], r"algorithm.gama: no such key. Did you mean 'algorithm.gamma'?"),
        (["++env.init_params.step_sise=1"], "Did you mean 'env.init_params.step_size'?"),
        (
            ["algorithm.adv_type=grop"],
            "algorithm.adv_type: got 'grop', expected one of gae, grpo, ",
        ),
        (["algorithm.loss_type=pop"], "algorithm.loss_type: got 'pop', expected one of aipo, decoupled_ppo, nll, ppo"),
        (
            ["env.env_type=libro"],
            "env.env_type: got 'libro', expected one of dummy, envpool, gymnasium, libero, maniskill, metaworld, "
            "put_on_plate, robosuite, module:Class, or path/to/file.py:Class.",
        ),
        (["model.model_type=tinyvla"], "Did you mean 'tiny_vla'?"),
        (["runner.logger.logger_backends=[jsnol]"], "Did you mean 'jsonl'?"),
        (["cluster.component_placement.env=x"], "got 'x', expected all, 3, 0,2,3, 0-3 or 0-3,5"),
        (["~cluster.component_placement.env"], "no ranks for env"),
        (["env.train.total_num_envs=6"], "2 env workers x 2 pipeline stages; use a multiple of 4"),
        (["env.eval.total_num_envs=6"], "env.eval.total_num_envs: got 6"),
        (["algorithm.group_size=3"], "a group is never split; use a divisor of 16, or env.train.total_num_envs=12"),
        (["cluster.component_placement.rollout=0-2"], "3 rollout workers for 2 env workers"),
        (["cluster.component_placement.actor=0-4", "algorithm.group_size=16"], "5 actor ranks for 4 groups of envs"),
        (["actor.seed=-1"], "actor.seed: got -1"),
        (["cluster=serial", "cluster.component_placement.actor=0-1"], "one process is one rank; use cluster=process"),
        (["algorithm.reward_type=action_level", "algorithm.logprob_type=chunk_level"], "cannot share its one ratio"),
        (["actor.global_batch_size=8"], "set exactly one of them, the other to null"),
        (["env.train.auto_reset=true"], "adv_type=grpo scores one whole episode per env"),
        (["env.train.stagger=true"], "without env.train.auto_reset all episodes of a rollout begin with it"),
        (
            ["algorithm=ppo", "env.train.task_sampling=success", "env.train.auto_reset=true"],
            "but with auto_reset episodes begin at any time; use uniform or a list of weights",
        ),
        (
            ["env.train.task_sampling=success", "env.train.use_fixed_reset_state_ids=true"],
            "but use_fixed_reset_state_ids keeps the first draw",
        ),
        (
            ["env.train.task_sampling=success", "rollout.max_staleness=1"],
            "but with rollout.max_staleness=1 a step's episodes begin before the last ones have ended",
        ),
        (["env.train.task_sampling=often"], "env.train.task_sampling"),
        (["algorithm.clip_ratio_low=1.5"], "algorithm.clip_ratio_low: got 1.5"),
        (["algorithm.bc_coef=0.1"], "there are no demonstrations to keep to; set algorithm.bc_path"),
        (["algorithm.bc_coef=0.1", "algorithm.bc_path=[]"], "there are no demonstrations to keep to; set algorithm"),
        (["algorithm.bc_path=somewhere"], "this run would not read it, since algorithm.bc_coef is 0"),
        (
            ["actor.lr_sched.lr_warmup_fraction=0.1", "actor.lr_sched.lr_warmup_iters=20"],
            "would not read it, since actor.lr_sched.lr_warmup_fraction says how long the rate rises; null turns",
        ),
        (["algorithm.loss_scale_factor=20"], "would not read it, since algorithm.loss_agg_func is not seq-mean"),
        (
            ["algorithm.bc_coef=0.1", "algorithm.bc_path=a", "cluster.component_placement.actor=0-2"],
            "algorithm.bc_batch_size: got 32, which does not divide evenly over 3 actor ranks; use a multiple of 3",
        ),
        (["env.train.task_sampling=[1.0,0.0]"], "env.train.task_sampling"),
        (
            ["algorithm=ppo", "env.train.auto_reset=true", "algorithm.filter_rewards=true"],
            "filter_rewards=true scores one whole episode per env",
        ),
        (
            ["algorithm=ppo", "env.train.auto_reset=true", "algorithm.positive_nll_coef=0.1"],
            "positive_nll_coef=0.1 scores one whole episode per env",
        ),
        (
            ["algorithm=ppo", "env.train.max_steps_per_rollout_epoch=64"],
            "nothing starts a second episode; set it to null, or env.train.auto_reset=true",
        ),
        (
            ["algorithm=ppo", "env.train.max_steps_per_rollout_epoch=16"],
            "episodes would be dropped unfinished; set it to null, or env.train.auto_reset=true",
        ),
        (
            ["algorithm=ppo", "env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=50"],
            "not a multiple of model.num_action_chunks=4",
        ),
        (["algorithm.filter_rewards=true", "algorithm.rewards_lower_bound=2"], "every group would be masked"),
        # Of returns with env.reward_coef=5 they would say something.
        (
            ["algorithm=dapo", "algorithm.rewards_lower_bound=0.5", "algorithm.rewards_upper_bound=4.5"],
            "algorithm.rewards_upper_bound: got 4.5, but it is compared with a group's mean score, and an episode's",
        ),
        (["algorithm=dapo", "algorithm.rewards_lower_bound=-0.1"], "algorithm.rewards_lower_bound: got -0.1, but it"),
        (
            ["algorithm=dapo", "algorithm.rewards_lower_bound=0.3", "algorithm.rewards_upper_bound=0.49"],
            "no group of group_size=4 can pass",
        ),
        (["actor.fsdp_config.sharding_strategy=hybrid_shard"], "actor.fsdp_config.fsdp_size: got null, but"),
        (
            [
                "actor.fsdp_config.sharding_strategy=hybrid_shard",
                "actor.fsdp_config.fsdp_size=2",
                "cluster.component_placement.actor=0-2",
            ],
            "actor.fsdp_config.fsdp_size: got 2, which does not divide the 3 actor ranks",
        ),
        (
            [
                "actor.micro_batch_size=auto",
                "cluster.component_placement.actor=0-1",
                "actor.fsdp_config.sharding_strategy=no_shard",
            ],
            "actor.micro_batch_size: got auto with 2 actor ranks and sharding_strategy=no_shard",
        ),
        (["actor.fsdp_config.mixed_precision.param_dtype=bf16"], "actor.fsdp_config.mixed_precision.param_dtype: got"),
        (["~cluster.num_threads.actor"], "cluster.num_threads: no entry for actor"),
        (["++cluster.num_threads.acter=1"], "Did you mean 'actor'?"),
        (["cluster.num_threads.env=auto"], "num_threads.env: got auto, which is for the actor"),
        (
            ["cluster.num_threads.actor=auto", "cluster=ray"],
            "which nodes the actor will be on, and their cores; give a",
        ),
        (["cluster.num_threads.actor=auto", "++cluster.cpu_affinity.actor=0"], "cores of its own; give their number"),
        (["cluster=serial", "rollout.max_staleness=1"], "with cluster=serial nothing happens at the same time"),
        (["rollout.interruptible=true"], "with rollout.max_staleness=0 no weights come in a rollout's middle"),
        (["rollout.chunks_ahead=2"], "with rollout.max_staleness=0, but it is for a rollout that runs ahead of one"),
        (["rollout.chunks_ahead=2", "rollout.max_staleness=2"], "use rollout.max_staleness=1, or rollout.chunks_ahead"),
        ([*CHUNKS_AHEAD, "runner.weight_sync_interval=2"], "chunks_ahead: got 2 with runner.weight_sync_interval=2"),
        ([*CHUNKS_AHEAD, "rollout.interruptible=true"], "chunks_ahead: got 2 with rollout.interruptible=true"),
        (
            ["task=sft", "env=dummy", "model=mlp", "data.path=.", *CHUNKS_AHEAD],
            "rollout.chunks_ahead: this run would not read it",
        ),
        (["rollout.max_staleness=1", "runner.weight_sync_interval=4"], "weights get 3 updates old; use at least 3"),
        (["rollout.max_staleness=1", "algorithm.max_resample_rounds=2"], "the next rollout has begun"),
        (["rollout.max_staleness=1", "actor.enable_offload=true"], "by which actor and rollout take turns"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(overrides: list[str], message: str) -> None:
    assert any(message in text for text in problems(*overrides)), problems(*overrides)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["algorithm=ppo", "algorithm.filter_rewards=true"], "or use algorithm.filter_rewards=false"),
        (["algorithm=ppo", "algorithm.positive_nll_coef=0.1"], "or use algorithm.positive_nll_coef=null"),
        (["algorithm=dapo"], "or use algorithm=ppo and algorithm.filter_rewards=false"),
    ],
)
def test_what_scores_whole_episodes_is_refused_once(overrides: list[str], remedy: str) -> None:
    [problem] = problems(*overrides, "env.train.auto_reset=true")
    assert problem.endswith(remedy)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("steps", [16, 64])
def test_auto_reset_is_recommended_where_it_is_allowed(algorithm: str, steps: int) -> None:
    options = [f"algorithm={algorithm}", f"env.train.max_steps_per_rollout_epoch={steps}"]
    [problem] = problems(*options)
    try:
        config_of(*options, "env.train.auto_reset=true")
        allowed = True
    except ConfigError:
        allowed = False
    assert ("env.train.auto_reset=true" in problem) == allowed
    assert "set it to null" in problem


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.gamma=0.5",
        "algorithm.gae_lambda=0.5",
        "algorithm.normalize_advantages=false",
        "algorithm.value_clip=0.2",
        "actor.optim.value_lr=0.1",
        "algorithm.critic_warmup_steps=1",
        "critic.optim.lr=0.1",
        "critic.path=/weights",
        "algorithm.rewards_lower_bound=0.1",
        "algorithm.entropy_type=chunk_level",
        "actor.logprob_gap_warning=0.1",
        "actor.fsdp_config.fsdp_size=1",
        "++runner.logger.wandb.mode=offline",
    ],
)
def test_a_key_that_the_run_would_not_read_is_refused(override: str) -> None:
    [problem] = problems(override)
    assert problem.startswith(f"{override.split('=')[0].lstrip('+')}: this run would not read it, since ")


@pytest.mark.parametrize(
    ("task", "override"),
    [
        *(("sft", f"rollout.{option}") for option in ("top_p=0.5", "top_k=3", "repetition_penalty=1.3")),
        ("sft", "reward.mask_truncated=true"),
        ("sft", "reward.overlong_buffer_length=8"),
        ("math", "reward.overlong_penalty_factor=0.5"),
    ],
)
def test_what_no_completion_of_training_is_drawn_or_scored_by_is_refused(task: str, override: str) -> None:
    [problem] = problems(f"task={task}", override)
    assert problem.startswith(f"{override.split('=')[0]}: this run would not read it, since ")


@pytest.mark.parametrize("override", ["actor.optim.value_lr=0.1", "algorithm.value_loss_coef=0.3"])
def test_a_critic_of_its_own_leaves_a_value_heads_keys_unread(override: str) -> None:
    [problem] = problems("algorithm=ppo", "critic.enable=true", override)
    assert problem.startswith(f"{override.split('=')[0]}: this run would not read it, since ")


def test_a_critic_that_nobody_asks_is_refused() -> None:
    [problem] = problems("algorithm=grpo", "critic.enable=true")
    assert problem.startswith("critic.enable: got true, but adv_type=grpo has no values for a critic to learn; use ")


def test_a_critic_is_offloaded_in_one_way() -> None:
    offload = ("critic.enable_offload=true", "actor.fsdp_config.cpu_offload=true")
    [problem] = problems("algorithm=ppo", "critic.enable=true", *offload)
    assert problem.startswith("critic.enable_offload: got true with actor.fsdp_config.cpu_offload=true")


def test_what_is_never_gathered_is_never_freed() -> None:
    [problem] = problems("actor.fsdp_config.sharding_strategy=no_shard", "actor.fsdp_config.reshard_after_forward=true")
    assert "since no_shard gathers nothing; leave it out" in problem


def test_the_same_key_is_welcome_where_it_is_read() -> None:
    assert config_of("algorithm=ppo", "algorithm.gamma=0.5").algorithm.gamma == 0.5
