"""Names of one's own: files, modules and entry points, their options, and what is said of a wrong one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodied_rl import registry
from embodied_rl.algorithms.catalog import ADVANTAGES, POLICY_LOSSES
from embodied_rl.cli import config_of
from embodied_rl.demonstrations.expert import EXPERTS, expert_class
from embodied_rl.envs.base import ADAPTERS
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.language.datasets.registry import DATASETS
from embodied_rl.language.engines.base import BACKENDS as ENGINES
from embodied_rl.language.rewards.functions import REWARDS, build_reward
from embodied_rl.models.registry import MODELS
from embodied_rl.monitoring.metrics import BACKENDS as LOGGERS
from embodied_rl.params import keyword_options, parse_params
from embodied_rl.registry import Registry
from embodied_rl.schema import EmbodiedConfig

ROOT = Path(__file__).parents[1]
LOADERS: list[tuple[str, str, Callable[[str], Any]]] = [
    ("env.env_type", "Class", ADAPTERS.load),
    ("model.model_type", "Class", MODELS.load),
    ("algorithm.adv_type", "function", ADVANTAGES.__getitem__),
    ("algorithm.loss_type", "function", POLICY_LOSSES.__getitem__),
    ("reward.function", "function", REWARDS.load),
    ("runner.logger.logger_backends", "Class", LOGGERS.load),
    ("collect.expert", "Class", EXPERTS.load),
    ("data.dataset", "Class", DATASETS.load),
    ("rollout.backend", "Class", ENGINES.load),
]
OWN = """
from __future__ import annotations
from dataclasses import dataclass
from embodied_rl.algorithms.catalog import advantage_estimator, policy_loss

@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1

@dataclass(frozen=True, kw_only=True)
class Options:
    width: int
    inner: Inner = Inner()

class Thing:
    Params = Options

class Reward:
    Params = Options
    def __init__(self, params): self.params = params
    def __call__(self, *, prompt, completion, answer): return self.params.width * len(completion)

class Log:
    Params = Options

@advantage_estimator(needs_values=True)
def estimate(inputs, *, gamma: float, tau: float = 0.5, cut: list[int] = [1]): ...

@policy_loss()
def loss(*, logprobs, old_logprobs, proximal_logprobs, advantages, mask, tau: float, sharp: int = 2): ...

def undeclared(inputs): ...
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.things.py").write_text(OWN)
    return tmp_path / "own.things.py"


@pytest.mark.parametrize(("key", "kind", "load"), LOADERS, ids=[key for key, _, _ in LOADERS])
def test_messages_are_alike(key: str, kind: str, load: Callable[[str], Any], own: Path) -> None:
    for name, message in (
        ("no_such_thing", rf"got 'no_such_thing', expected one of .*module:{kind}, or path/to/file\.py:{kind}\."),
        ("no_such.py:Thing", r"got 'no_such.py:Thing', but there is no such file; a relative path starts at /"),
        (str(own), rf"expected path/to/file\.py:{kind}$"),
        ("no_such_module:Thing", "but module 'no_such_module' cannot be imported: No module named"),
        (f"{own}:Thingy", rf"but the file {own} has no (class|function) 'Thingy'\. Did you mean 'Thing'\?"),
    ):
        with pytest.raises(UserError, match=rf"^{key}: .*{message}"):
            load(name)


def test_a_class_of_a_file_is_found_again_by_another_process(own: Path) -> None:
    """So a worker can be given its options, whoever imported the file first."""
    thing = ADAPTERS.load(f"{own}:Thing")
    assert ADAPTERS.load(f"{own.parent}/../{own.parent.name}/own.things.py:Thing") is thing
    params = parse_params(thing.Params, {"width": 3, "inner": {"depth": 2}}, "x")
    code = f"import pickle; print(pickle.loads({pickle.dumps(params)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "Options(width=3, inner=Inner(depth=2))", done.stderr


def test_an_algorithm_says_what_it_needs(own: Path) -> None:
    entry = ADVANTAGES[f"{own}:estimate"]
    assert (entry.needs_values, entry.needs_groups, entry.options) == (True, False, ("gamma",))
    assert entry.own_params({"sharp": 3}) == {"tau": 0.5, "cut": [1]}, "the loss's are not its own"
    assert POLICY_LOSSES[f"{own}:loss"].sections == ("prox_logp_method", "behav_imp_weight_cap", "m2_threshold")
    for catalog, name, decorator in (
        (ADVANTAGES, "undeclared", "advantage_estimator"),
        (ADVANTAGES, "loss", "advantage_estimator"),
        (POLICY_LOSSES, "estimate", "policy_loss"),
    ):
        with pytest.raises(UserError, match=rf"{name}', which is not declared as one; put @{decorator}\(\)"):
            catalog[f"{own}:{name}"]
    assert ADVANTAGES["embodied_rl.algorithms.advantages:gae"] is ADVANTAGES["gae"]
    assert ADVANTAGES.get("no_such") is None


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        config_of("env=dummy", *overrides)
    return refused.value.problems


def test_hyperparameters_of_algorithms_from_outside(own: Path) -> None:
    both = (f"algorithm.adv_type={own}:estimate", f"algorithm.loss_type={own}:loss", "algorithm.params.tau=0.25")
    config = config_of(
        "env=dummy", *both, "algorithm.params.sharp=3", "algorithm.gamma=0.5", "algorithm.value_clip=1.0"
    )
    estimate, loss = ADVANTAGES[config.algorithm.adv_type], POLICY_LOSSES[config.algorithm.loss_type]
    assert estimate.hyperparameters(config.algorithm) == {"gamma": 0.5, "tau": 0.25, "cut": [1]}
    assert loss.hyperparameters(config.algorithm) == {"tau": 0.25, "sharp": 3}
    assert problems(*both, "algorithm.params.shrap=3") == [
        "algorithm.params.shrap: no such key. Did you mean 'algorithm.params.sharp'?"
    ]
    [problem] = problems(*both, "algorithm.params.sharp=x")
    assert problem.startswith("algorithm.params.sharp: got 'x' (str)")
    [problem] = problems(*both, "algorithm.gae_lambda=0.5")
    assert "does not use it (gae does)" in problem
    assert problems(both[1]) == ["algorithm.params.tau: missing; set it with algorithm.params.tau=..."]
    [problem] = problems("algorithm.params.gama=0.5")
    assert "adv_type=grpo and loss_type=ppo have no hyperparameters of their own" in problem
    assert "Did you mean 'algorithm.gamma'?" in problem


def test_options_of_loggers(own: Path) -> None:
    log = f"runner.logger.logger_backends=[jsonl, '{own}:Log']"
    config = config_of("env=dummy", log, "runner.logger.params.Log.width=2")
    assert config.runner.logger.params == {"Log": {"width": 2}}
    assert problems(log) == ["runner.logger.params.Log.width: missing; set it with runner.logger.params.Log.width=..."]
    assert "Did you mean 'Log'?" in problems(log, "runner.logger.params.Lok.width=2")[-1]
    assert problems("runner.logger.params.wandb.mode=offline") == [
        "runner.logger.params.wandb: wandb has no options here; they are runner.logger.wandb"
    ]


def test_a_reward_may_be_a_class(own: Path) -> None:
    reward = build_reward(f"{own}:Reward", {"width": 3})
    assert reward(prompt="", completion="ab", answer="") == 6.0
    with pytest.raises(ConfigError, match=r"reward\.params\.width: missing"):
        build_reward(f"{own}:Reward", {})


def test_an_expert_of_ones_own(own: Path) -> None:
    assert expert_class("dummy", f"{own}:Thing").__name__ == "Thing"
    collect = ("task=collect", f"collect.expert={own}:Thing")
    assert config_of(*collect, "env=dummy", "collect.expert_params.width=1").runner.task_type == "collect"
    assert (
        "Did you mean 'collect.expert_params.width'?"
        in problems(*collect, "collect.expert_params.width=1", "collect.expert_params.with=1")[0]
    )


def test_options_of_a_component_are_taken_one_by_one_and_together(own: Path) -> None:
    for section in ("collect", "dagger"):
        more = ("data.path=/demonstrations",) if section == "dagger" else ()
        task = (f"task={section}", "env=dummy", f"{section}.expert={own}:Thing", *more)
        for given in (f"{section}.expert_params.width=1", f"{section}.expert_params={{width: 1}}"):
            assert getattr(config_of(*task, given), section).expert_params == {"width": 1}
    together = config_of("env=dummy", "env.init_params={image_size: 64}", "model=mlp", "model.params={hidden_size: 8}")
    assert isinstance(together, EmbodiedConfig)
    assert (together.env.init_params["image_size"], together.model.params["hidden_size"]) == (64, 8)


def test_keyword_options_keep_annotations_and_defaults() -> None:
    def function(given: int, *, need: int, some: list[int] = [1], plain=None) -> None: ...  # noqa: B006

    options = keyword_options(function, ("given",))
    assert options is not None
    parsed = parse_params(options, {"need": 2}, "x")
    assert (parsed.need, parsed.some, parsed.plain) == (2, [1], None)
    with pytest.raises(ConfigError, match=r"x\.need: got '2'"):
        parse_params(options, {"need": "2"}, "x")
    assert keyword_options(lambda **anything: None, ()) is None


CLASH = """
from embodied_rl.registry import Registry
for registry in (Registry("key", {"taken": "m:A"}, group="g"), Registry("key", {}, group="g")):
    print(registry.names(), registry.problem("taken"), registry.problem("twice"), registry.problem("fine"), sep="|")
"""


def test_one_name_of_two_owners(tmp_path: Path) -> None:
    for package, points in (("one", "taken = one:A\ntwice = one:B\nfine = one:C\n"), ("two", "twice = two:B\n")):
        folder = tmp_path / f"{package}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[g]\n{points}")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", CLASH],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    advice = "; write out the one you mean as module:name, or uninstall the other"
    twice = {
        f"key: got 'twice', which stands for {first} and for {second}{advice}"
        for first, second in (
            ("one:B of the package one", "two:B of the package two"),
            ("two:B of the package two", "one:B of the package one"),
        )
    }
    builtin, without = [line.split("|") for line in done.stdout.splitlines()]
    assert builtin[0] == without[0] == "['fine', 'taken', 'twice']"
    assert (
        builtin[1]
        == f"key: got 'taken', which stands for m:A of embodied_rl itself and for one:A of the package one{advice}"
    )
    assert without[1] == builtin[3] == without[3] == "None"
    assert {builtin[2], without[2]} <= twice


def test_a_closed_table_has_no_other_doors() -> None:
    assert Registry("key", {"a": "m:A"}).names() == ["a"]


def test_installed_packages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training steps look names up, too; reading takes milliseconds for each installed package."""
    REWARDS.problem("nothing")

    def read(**_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(registry, "entry_points", read)
    assert "nothing" in str(REWARDS.problem("nothing"))
