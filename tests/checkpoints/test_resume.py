from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied_rl.checkpoints import resume
from embodied_rl.checkpoints.resume import ABSENT, Change, compare
from embodied_rl.envs.dummy import DummyEnv
from embodied_rl.errors import CheckpointError
from embodied_rl.launch import run
from tests.configs import config_of, embodied, tiny_run

BASE = ("env=dummy", "model=mlp")


def saved(run_dir: Path, *overrides: str, **edits: Any) -> Path:
    """A checkpoint of a run with this configuration."""
    content: dict[str, Any] = asdict(config_of(*BASE, *overrides))
    content |= edits
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(content))
    return run_dir / "checkpoints/global_step_3"


def changes(checkpoint: Path, *overrides: str) -> list[Change]:
    found = compare(checkpoint, config_of(*BASE, *overrides))
    assert found is not None
    return found


def test_nothing_changed(tmp_path: Path) -> None:
    assert changes(saved(tmp_path), "runner.resume_dir=auto") == [], "how it is started does not count"


def test_what_a_run_may_change_is_shown(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "runner.max_steps=3")
    found = changes(checkpoint, "runner.max_steps=9", "actor.optim.lr=0.5", "env.task_ids=[0,2]")
    shown = {c.key: (c.before, c.now, c.refusal) for c in found}
    assert shown.pop("actor.optim.lr")[1:] == (0.5, None)
    assert shown == {"runner.max_steps": (3, 9, None), "env.task_ids": (None, [0, 2], None)}
    resume.check(checkpoint, found)


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ([], ["model.params.hidden_size=8"], "model.params.hidden_size"),
        ([], ["++model.hf_overrides.attention_dropout=0.1"], "model.hf_overrides.attention_dropout"),
        ([], ["model.num_action_chunks=2"], "model.num_action_chunks"),
        (["model.lora.rank=4"], ["model.lora.rank=8"], "model.lora.rank"),
        (["algorithm=grpo"], ["algorithm=ppo"], "algorithm.adv_type"),
        (["algorithm=ppo"], ["algorithm=ppo", "algorithm.reward_type=action_level"], "algorithm.reward_type"),
        (["algorithm=ppo"], ["algorithm=ppo", "critic.enable=true"], "critic.enable"),
        (["algorithm=ppo", "critic.enable=true"], ["algorithm=ppo"], "critic.enable"),
        (
            ["algorithm=ppo", "critic.enable=true"],
            ["algorithm=ppo", "critic.enable=true", "++critic.params.hidden_size=8"],
            "critic.params.hidden_size",
        ),
        (["algorithm.kl_beta=0.1"], ["algorithm.kl_beta=0.1", "actor.seed=7"], "actor.seed"),
    ],
)
def test_what_would_corrupt_the_run_is_refused(tmp_path: Path, before: list[str], now: list[str], key: str) -> None:
    checkpoint = saved(tmp_path, *before)
    with pytest.raises(CheckpointError, match=re.escape(f"\n  {key}: ")) as caught:
        resume.check(checkpoint, changes(checkpoint, *now))
    text = str(caught.value)
    assert text.startswith(f"cannot resume {checkpoint} with this configuration:\n")
    assert text.endswith("or start a new run from its weights with runner.init_from.")


def test_another_estimator_with_the_same_head_is_allowed(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "algorithm=grpo")
    resume.check(checkpoint, changes(checkpoint, "algorithm=rloo"))
    resume.check(checkpoint, changes(checkpoint, "actor.seed=7"))


def test_a_run_from_before_there_were_critics_goes_on_without(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "algorithm=ppo", critic=None)
    resume.check(checkpoint, changes(checkpoint, "algorithm=ppo"))
    with pytest.raises(CheckpointError, match=r"critic\.enable: "):
        resume.check(checkpoint, changes(checkpoint, "algorithm=ppo", "critic.enable=true"))


def test_a_critic_may_learn_faster(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "algorithm=ppo", "critic.enable=true")
    resume.check(checkpoint, changes(checkpoint, "algorithm=ppo", "critic.enable=true", "critic.optim.lr=0.5"))


@pytest.mark.parametrize("key", ["model.path", "model.tokenizer_path"])
def test_a_model_folder_may_move(tmp_path: Path, key: str) -> None:
    """Otherwise no run from weights that ship with the project would survive a move of the checkout."""
    checkpoint = saved(tmp_path, f"{key}={tmp_path}/old/weights")
    (tmp_path / "new/weights").mkdir(parents=True)
    found = changes(checkpoint, f"{key}={tmp_path}/new/weights")
    assert [c.key for c in found] == [key], "and it is shown"
    resume.check(checkpoint, found)


@pytest.mark.parametrize(
    ("before", "now", "allowed"),
    [
        ({"revision": None}, "model.revision=0123abcdef", True),
        ({"revision": None}, "model.revision=main", False),
        ({"revision": "0123abcdef"}, "model.revision=4567abcdef", False),
        ({"revision": "0123abcdef"}, "model.revision=null", False),
        ({"trust_remote_code": False}, "model.trust_remote_code=true", True),
        ({"trust_remote_code": True}, "model.trust_remote_code=false", True),
    ],
)
def test_a_pin_and_trust_are_no_other_policy(tmp_path: Path, before: dict[str, Any], now: str, allowed: bool) -> None:
    checkpoint = saved(tmp_path, model=asdict(config_of(*BASE).model) | before)
    found = changes(checkpoint, now)
    assert [(c.key, c.refusal is None) for c in found] == [(now.partition("=")[0], allowed)]


@pytest.mark.parametrize(
    ("before", "now", "allowed"),
    [
        (["critic.path=a/b"], ["critic.path=a/b", "critic.revision=0123abcdef"], True),
        (["critic.path=a/b"], ["critic.path=a/b", "critic.revision=main"], False),
        (["critic.revision=0123abcdef"], ["critic.revision=4567abcdef"], False),
        (["critic.revision=0123abcdef"], [], False),
        (["model.revision=main"], ["model.revision=main", "critic.revision=0123abcdef"], False),  # it had the model's
        (
            ["model.revision=main", "critic.path=a/b"],
            ["model.revision=main", "critic.path=a/b", "critic.revision=0123abcdef"],
            True,
        ),
    ],
)
def test_another_revision_is_another_critic(tmp_path: Path, before: list[str], now: list[str], allowed: bool) -> None:
    critic = ("algorithm=ppo", "critic.enable=true")
    found = changes(saved(tmp_path, *critic, *before), *critic, *now)
    assert [(c.key, c.refusal is None) for c in found] == [("critic.revision", allowed)]


OUTCOMES = [
    "algorithm.gamma=0.5",
    "env.reward_coef=3.0",
    "env.use_rel_reward=false",
    "env.train.ignore_terminations=true",
    "env.task_ids=[0,2]",
    "++env.init_params.success_radius=0.3",
]
"""Of the dummy env, which has none of these."""


@pytest.mark.parametrize("now", OUTCOMES)
def test_a_buffer_holds_outcomes_of_one_kind(tmp_path: Path, now: str) -> None:
    sac, key = ("model=sac_mlp", "algorithm=sac"), now.partition("=")[0].lstrip("+")
    for before, after in (((), (now,)), ((now,), ())):
        checkpoint = saved(tmp_path, *sac, *before)
        with pytest.raises(CheckpointError, match=rf"\n  {key}: .*; the replay buffer's .*\n.*runner\.init_from"):
            resume.check(checkpoint, changes(checkpoint, *sac, *after))
    checkpoint = saved(tmp_path, *sac)
    free = ("algorithm.replay.capacity=200000", "algorithm.sac.tau=0.1", "env.train.max_episode_steps=50")
    resume.check(checkpoint, changes(checkpoint, *sac, *free))


@pytest.mark.parametrize(
    "now",
    [
        "algorithm.sac.num_critics=3",
        "algorithm.sac.hidden_size=32",
        "algorithm.sac.num_layers=3",
        "algorithm.sac.layer_norm=true",
        "algorithm.sac.temperature_lr=null",
    ],
)
def test_critics_that_were_saved_are_those_that_go_on(tmp_path: Path, now: str) -> None:
    sac = ("model=sac_mlp", "algorithm=sac")
    for before, after in (((), (now,)), ((now,), ())):
        checkpoint = saved(tmp_path, *sac, *before)
        with pytest.raises(CheckpointError, match=rf"\n  {now.partition('=')[0]}: .*\n.*runner\.init_from"):
            resume.check(checkpoint, changes(checkpoint, *sac, *after))


@pytest.mark.parametrize("learner", [("model=sac_mlp", "algorithm=sac"), ("algorithm=ppo",)])
def test_a_default_that_is_written_out_is_no_change(tmp_path: Path, learner: tuple[str, ...]) -> None:
    written = "++env.init_params.success_radius=0.12"
    for before, now in (((), (written,)), ((written,), ())):
        assert changes(saved(tmp_path, *learner, *before), *learner, *now) == []


@dataclass(frozen=True, kw_only=True)
class OptionsParams:
    table: dict[str, int] = field(default_factory=lambda: {"width": 1, "depth": 2})


class OptionsEnv(DummyEnv):
    Params = OptionsParams


def test_a_section_has_defaults_too(tmp_path: Path) -> None:
    mine = f"env.env_type={__file__}:OptionsEnv"
    written = "++env.init_params.table={width: 1, depth: 2}"
    for before, now in (((), (written,)), ((written,), ())):
        assert changes(saved(tmp_path, mine, *before), mine, *now) == []
    [found] = changes(saved(tmp_path, mine), mine, "++env.init_params.table={width: 1, depth: 3}")
    assert (found.key, found.before, found.now) == ("env.init_params.table.depth", 2, 3)


def test_how_an_env_draws_is_nothing_to_a_buffer(tmp_path: Path) -> None:
    sac = ("model=sac_mlp", "algorithm=sac")
    config = embodied(*BASE, *sac)
    for env_type, key, allowed in (
        ("maniskill", "render_backend", True),
        ("maniskill", "sim_backend", False),
        ("libero", "max_cached_scenes", True),
        ("libero", "render_width", True),
        ("libero", "draft", False),
        ("envpool", "num_threads", True),
        ("tests.nowhere:Env", "render_width", False),  # an adapter that is not at hand says nothing
    ):
        env = replace(config.env, env_type=env_type)
        checkpoint = saved(tmp_path, *sac, env=asdict(replace(env, init_params={key: "it had one"})))
        found = compare(checkpoint, replace(config, env=env)) or []
        assert [(c.key, c.refusal is None) for c in found] == [(f"env.init_params.{key}", allowed)]


@pytest.mark.parametrize("now", OUTCOMES)
def test_a_rollout_is_learned_from_once(tmp_path: Path, now: str) -> None:
    checkpoint = saved(tmp_path, "algorithm=ppo")
    resume.check(checkpoint, changes(checkpoint, "algorithm=ppo", now))


def test_a_run_from_before_critics_had_revisions_goes_on(tmp_path: Path) -> None:
    critic = ("algorithm=ppo", "critic.enable=true")
    written = asdict(config_of(*BASE, *critic).critic)
    del written["revision"]
    checkpoint = saved(tmp_path, *critic, critic=written)
    resume.check(checkpoint, changes(checkpoint, *critic))


@pytest.mark.parametrize("now", ["new/others", "elsewhere/weights", "null"])
def test_another_model_folder_is_refused(tmp_path: Path, now: str) -> None:
    checkpoint = saved(tmp_path, f"model.path={tmp_path}/old/weights")
    (tmp_path / "new/others").mkdir(parents=True)
    path = now if now == "null" else f"{tmp_path}/{now}"
    with pytest.raises(CheckpointError, match=r"model\.path: "):
        resume.check(checkpoint, changes(checkpoint, f"model.path={path}"))


def test_a_folder_does_not_pass_for_a_name_on_a_hub(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "model.path=somebody/weights")
    (tmp_path / "weights").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.path: "):
        resume.check(checkpoint, changes(checkpoint, f"model.path={tmp_path}/weights"))


def test_a_copy_of_a_model_folder_is_refused_while_the_first_is_there(tmp_path: Path) -> None:
    """Two folders of one name are two models until somebody has compared them."""
    checkpoint = saved(tmp_path, f"model.path={tmp_path}/old/weights")
    for place in ("old", "new"):
        (tmp_path / place / "weights").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"model\.path: "):
        resume.check(checkpoint, changes(checkpoint, f"model.path={tmp_path}/new/weights"))


def test_keys_that_are_new_since_are_no_obstacle(tmp_path: Path) -> None:
    content = asdict(config_of(*BASE))
    del content["model"]["lora"]
    checkpoint = saved(tmp_path, model=content["model"])
    found = changes(checkpoint)
    assert found
    assert all(c.key.startswith("model.lora.") and c.before == ABSENT and c.refusal is None for c in found)


def test_without_a_configuration_nothing_is_compared(tmp_path: Path) -> None:
    assert compare(tmp_path / "checkpoints/global_step_3", config_of(*BASE)) is None
    assert compare(saved(tmp_path).parent.parent / "copied", config_of(*BASE)) is None, "not in a run directory"


@pytest.mark.parametrize("text", ["[1, 2]", "a: [1", "\0"])
def test_a_damaged_configuration_is_refused(tmp_path: Path, text: str) -> None:
    checkpoint = saved(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml: "):
        changes(checkpoint)


def test_a_run_says_what_changed_and_keeps_its_configuration_when_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("cluster=serial", "model=mlp", "runner.eval_at_end=false")
    run(tiny_run(tmp_path, *options, "runner.max_steps=1"))
    [path] = tmp_path.rglob("config.yaml")
    before = path.read_text()
    with pytest.raises(CheckpointError, match=r"model\.params\.hidden_size"):
        run(
            tiny_run(tmp_path, *options, "runner.max_steps=2", "runner.resume_dir=auto", "++model.params.hidden_size=8")
        )
    assert path.read_text() == before
    capsys.readouterr()
    run(tiny_run(tmp_path, *options, "runner.max_steps=2", "runner.resume_dir=auto", "actor.optim.lr=0.25"))
    shown = capsys.readouterr().out
    assert "changed since the checkpoint" in shown
    assert re.search(r"actor\.optim\.lr +\S+ +0\.25", shown)
    assert re.search(r"runner\.max_steps +1 +2", shown)
