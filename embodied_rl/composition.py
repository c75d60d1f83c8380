"""From the command line to a checked configuration; what is wrong with it is for ``command_line`` to say."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from embodied_rl.checkpoints.resume import DAMAGED, config_of_checkpoint, read_config
from embodied_rl.checkpoints.store import find_checkpoint
from embodied_rl.config import CONFIG_MODULE, GROUPS
from embodied_rl.errors import CheckpointError, ConfigError, UserError, first_line
from embodied_rl.models.weights.shipped import register_resolvers
from embodied_rl.params import argument, at
from embodied_rl.runtime.placement import separate_overrides
from embodied_rl.schema import Config, EnvConfig
from embodied_rl.tasks.table import TASKS
from embodied_rl.tasks.validation import build_config

FREE_FORM = (
    "algorithm.params.",
    "cluster.cpu_affinity.",
    "cluster.env_vars.",
    "collect.expert_params.",
    "collect.expert_params=",
    "dagger.expert_params.",
    "dagger.expert_params=",
    "env.init_params.",
    "env.init_params=",
    "eval_env.init_params.",
    "eval_env.init_params=",
    "data.params.",
    "reward.params.",
    "model.params.",
    "model.params=",
    "model.hf_overrides.",
    "model.hf_overrides=",
    "critic.hf_overrides.",
    "critic.hf_overrides=",
    "model.trainable=",
    "rollout.engine_kwargs.",
    "runner.logger.params.",
    "runner.logger.wandb.",
)
"""Sections whose keys belong to a component, an adapter, a data set, a model, ..., and are checked by their owner."""

_OF_COMPONENTS: Final = ("cluster.component_placement.", "cluster.num_threads.")
"""Sections whose keys are components, alone or several on a line."""

RECIPES: Final = {"libero_10": "libero_10_short"}
"""Env -> the experiment that a run of ``task=embodied`` in it is, as long as the command line leaves to the env what is
trained: see :func:`with_recipe`."""
_OWN_GROUPS: Final = ("experiment", "model", "algorithm", "data", "eval_env", "env@eval_env")
_OWN_KEYS: Final = ("env.task_ids", "env.init_params", "model.")

_turn: Final = threading.RLock()

register_resolvers()


@contextlib.contextmanager
def hydra_of_our_own() -> Iterator[None]:
    """Hydra on our files. A program or a sweep that Hydra itself has started finds its own as it was, and threads take
    turns: Hydra knows one application in a process, and refuses a second one."""
    with _turn:
        known: Any = Singleton._instances
        outer = {kind: known.pop(kind) for kind in (GlobalHydra, JobRuntime, VersionBase) if kind in known}
        try:
            with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
                yield
        finally:
            known.update(outer)


def config_of(*overrides: str) -> Config:
    """The checked configuration of ``python train.py <overrides>``, for scripts, notebooks and tests; without the
    recipe that an env alone may stand for (:func:`with_recipe`).

    Raises:
        ConfigError: naming every problem found.
        UserError: the folder of ``--config-dir`` does not exist.
    """
    given, folders = own_folders(understood(overrides))
    with hydra_of_our_own():
        composed = compose("train", overrides=[*given, *folders])
    return from_hydra(composed, value_keys(given))


def env_of(preset: str, init_params: Mapping[str, Any]) -> EnvConfig:
    """The checked section ``env`` of ``env=<preset>`` with the simulator's options as they are: texts go neither
    through Hydra's grammar nor through OmegaConf's interpolation.

    Raises:
        ConfigError: naming every problem found.
    """
    # A preset's own name may be made of options, and these are put in last.
    given = ["task=embodied", f"env={preset}", f"env.name={preset}"]
    with hydra_of_our_own():
        composed = compose("train", overrides=given)
    with open_dict(composed):
        for name in init_params:
            composed.env.init_params.pop(name, None)
    raw = _plain(composed)
    raw["env"]["init_params"] |= {name: _as_json(f"env.init_params.{name}", init_params[name]) for name in init_params}
    config: Any = build_config(raw)
    return config.env


def _as_json(key: str, value: Any) -> Any:
    """A value of Python's in JSON's types; a path is a text, and what numpy has its numbers."""
    try:
        return json.loads(json.dumps(value, default=lambda v: v.tolist() if hasattr(v, "tolist") else os.fspath(v)))
    except (TypeError, ValueError):
        raise ConfigError([f"{key}: got {value!r}, expected numbers, texts, lists and dicts of them"]) from None


def stored(path: Path, overrides: Sequence[str], *, resume_dir: Path) -> Config:
    """The configuration that a run wrote down, to go on from ``resume_dir``, with ``key=value`` on top. Keys that are
    newer than the run have their defaults.

    Raises:
        CheckpointError: the file is damaged.
        ConfigError: naming every problem found.
        UserError: an override is no ``key=value``.
    """
    saved = read_config(path)
    task = at(saved, "runner.task_type")
    if not isinstance(task, str) or task not in TASKS:
        got = f"runner.task_type: got {task!r}, expected one of {', '.join(TASKS)}"
        raise CheckpointError(f"{path}: {got}; {DAMAGED}")
    config = OmegaConf.create(_with_defaults(saved, task))
    OmegaConf.update(config, "runner.resume_dir", str(resume_dir))
    for text in overrides:
        given = parsed([text])
        key, value = (given[0].key_or_group, given[0].value()) if given else ("", None)
        if not given or key in GROUPS or (key == "eval_env" and isinstance(value, str)):
            got = f"{text}: expected key=value, such as env.eval.episodes_per_task=2; groups are the run's own"
            if key in ("env", "eval_env"):
                got += "; to play another env, repeat the command that trained and add "
                got += f"eval_env={value} runner.only_eval=true {argument('runner.resume_dir', str(resume_dir))}"
            raise UserError(got)
        OmegaConf.update(config, key, value, force_add=True)
    return from_hydra(config, value_keys(overrides))


def _with_defaults(saved: dict[str, Any], task: str) -> dict[str, Any]:
    with hydra_of_our_own():
        composed = compose("train", overrides=[f"task={task}"])
    defaults: Any = OmegaConf.to_container(composed)
    if saved.get("eval_env"):
        defaults["eval_env"] = defaults["env"]

    def filled(section: dict[str, Any], by: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Sections whose keys are not the schema's are the run's own as a whole."""
        both = {**by, **section}
        for key, value in section.items():
            name, default = f"{prefix}{key}.", by.get(key)
            if isinstance(value, dict) and isinstance(default, dict):
                both[key] = value if name in (*FREE_FORM, *_OF_COMPONENTS) else filled(value, default, name)
        return both

    return filled(saved, defaults, "")


def from_hydra(composed: DictConfig, overridden: Sequence[str] = ()) -> Config:
    """Resolve and check a composed configuration.

    Raises:
        ConfigError: naming every problem found.
    """
    return build_config(_plain(composed), overridden)


def _plain(composed: DictConfig) -> Any:
    """A composed configuration as dicts and lists, resolved.

    Raises:
        ConfigError: a key has no value, or one that cannot be resolved.
    """
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError([f"{error.full_key}: missing; set it with {error.full_key}=..."]) from None
    except InterpolationKeyError as error:
        lacking = first_line(error).split("'")[1]
        raise ConfigError([f"{error.full_key}: is made of {lacking}, which is set nowhere"]) from None
    except OmegaConfBaseException as error:
        raise ConfigError([f"{getattr(error, 'full_key', None) or 'configuration'}: {first_line(error)}"]) from None


def choices(arguments: Sequence[str] = ()) -> dict[str, list[str]]:
    """Group -> its choices, those of the user's own YAML included.

    Raises:
        UserError: the folder of ``--config-dir`` does not exist.
    """
    _, folders = own_folders(arguments)
    with hydra_of_our_own():
        return {group: choices_of(group, folders) for group in GROUPS}


def choices_of(group: str, folders: list[str]) -> list[str]:
    """A group's choices, without what its files share."""
    loader = GlobalHydra.instance().config_loader()
    return [name for name in loader.get_group_options(group, overrides=folders) if name != "base"]


def parsed(arguments: Sequence[str]) -> list[Override]:
    """The overrides among ``arguments``; flags and what Hydra itself must complain of are left to Hydra."""
    texts = [text for text in arguments if (not text.startswith("-") and "=" in text) or text.startswith("~")]
    try:
        return OverridesParser.create().parse_overrides(texts)
    except HydraException:
        return []


def value_keys(arguments: Sequence[str]) -> list[str]:
    """The dotted keys that the user set, group choices left out."""
    return [o.key_or_group for o in parsed(arguments) if "." in o.key_or_group and "@" not in o.key_or_group]


def own_folders(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without those that name folders of the user's own YAML, and the one override that names these.

    Raises:
        UserError: the folder of ``--config-dir`` does not exist.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cfg", "-c")  # unknown, -c would be taken for the beginning of -cd
    options, rest = parser.parse_known_args(arguments)
    searchpath = [o for o in parsed(rest) if o.key_or_group == "hydra.searchpath"]
    values: list[Any] = [override.value() for override in searchpath]
    folders = [folder for value in values if isinstance(value, list) for folder in value]
    if options.config_dir is not None:
        if not options.config_dir.is_dir():
            raise UserError(f"--config-dir {options.config_dir}: no such directory")
        folders.insert(0, f"file://{options.config_dir.resolve()}")
    others = [text for text in rest if text not in [override.input_line for override in searchpath]]
    return others, [f"hydra.searchpath={json.dumps(folders, ensure_ascii=False)}"] if folders else []


def folders_of(folders: Sequence[str]) -> list[Path]:
    """Of the override that :func:`own_folders` makes."""
    return [Path(folder.removeprefix("file://")) for text in folders for folder in json.loads(text.partition("=")[2])]


def understood(arguments: Sequence[str]) -> list[str]:
    """The arguments as Hydra wants them. ``task=sft`` imitates language, and together with an env what was done in it:
    then it means ``task=embodied_sft``. ``eval_env`` is a second choice of the group ``env``."""
    acts = any(text.startswith("env=") for text in arguments)
    plain = [part for text in arguments for part in separate_overrides(text)]
    chosen = [f"env@{text}" if text.startswith("eval_env=") else text for text in plain]
    return ["task=embodied_sft" if acts and text == "task=sft" else _settable(text) for text in chosen]


def with_recipe(arguments: Sequence[str]) -> list[str]:
    """The arguments of a run, with ``experiment=`` where an env alone stands for a recipe (:data:`RECIPES`).

    Not for an evaluation alone, nor where the arguments choose tasks, a model, an algorithm, another env for
    evaluations or a recipe (``experiment=none``: none), set options of the simulator or the model, or go on with a run
    of other tasks.

    Raises:
        CheckpointError: the configuration of the run to go on with cannot be read.
        ConfigError: that run would have one that is wrong.
    """
    given = parsed(understood(arguments))
    values = {o.key_or_group if o.package is None else f"{o.key_or_group}@{o.package}": o for o in given}
    chosen = {name: values[name].value() for name in ("env", "task", "runner.only_eval") if name in values}
    env, own = chosen.get("env"), (name for name in values if name in _OWN_GROUPS or name.startswith(_OWN_KEYS))
    trains = chosen.get("task", "embodied") == "embodied" and not chosen.get("runner.only_eval", False)
    if not trains or not isinstance(env, str) or env not in RECIPES or any(own):
        return list(arguments)
    place = next(i for i, text in enumerate(arguments, 1) if "env=" in text)  # not after an option of Hydra's
    added = [*arguments[:place], f"experiment={RECIPES[env]}", *arguments[place:]]
    return added if "runner.resume_dir" not in values or _plays_the_same(added) else list(arguments)


def _plays_the_same(arguments: Sequence[str]) -> bool:
    """Whether the run that ``runner.resume_dir`` names has the tasks of this one; if there is none, nothing differs."""
    config = config_of(*(text for text in arguments if "=" in text and not text.startswith("-")))
    try:
        checkpoint = find_checkpoint(config)
    except CheckpointError:  # said when the run begins
        return True
    file = None if checkpoint is None else config_of_checkpoint(checkpoint)
    return file is None or at(read_config(file), "env.task_ids") == config.env.task_ids  # type: ignore[attr-defined]


def _settable(argument: str) -> str:
    """Let adapters' and models' own options be set like any other: Hydra wants ``++`` for keys not in its YAML."""
    return f"++{argument}" if argument.startswith(FREE_FORM) and "=" in argument else argument
