"""What an evaluation ran under: the ``meta`` of ``eval.json``, by which two of them are known to be comparable."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import TypeAdapter

from embodied_rl import __version__
from embodied_rl.envs.registry import adapter_class
from embodied_rl.language.datasets.registry import dataset_params
from embodied_rl.params import parse_params
from embodied_rl.schema import EmbodiedConfig, MathConfig

_PACKAGES: Final = ("torch", "numpy")
_LANGUAGE_PACKAGES: Final = ("transformers", "vllm", "math-verify", "reasoning-gym")


def episode_conditions(
    config: EmbodiedConfig, *, image_shapes: Mapping[str, tuple[int, int]], task_ids: Sequence[int]
) -> dict[str, Any]:
    """What decides how a policy's episodes go, beside the policy.

    Args:
        image_shapes: camera -> (height, width) of the images that the policy was given.
        task_ids: the tasks that were evaluated.
    """
    env, adapter = config.env, adapter_class(config.env.env_type)
    params = parse_params(adapter.Params, env.init_params, "env.init_params")
    return {
        "env": env.name,
        "env_type": env.env_type,
        "task_ids": sorted(task_ids),
        "episodes_per_task": env.eval.episodes_per_task,
        "max_episode_steps": env.eval.max_episode_steps,
        "ignore_terminations": env.eval.ignore_terminations,
        "temperature": config.algorithm.sampling_params.temperature_eval,
        "num_action_chunks": config.model.num_action_chunks,
        "cameras": {name: list(shape) for name, shape in sorted(image_shapes.items())},
        "init_params": _jsonable(params),
        "use_rel_reward": env.use_rel_reward,
        "reward_coef": env.reward_coef,
        "seed": env.seed,
        "versions": versions(*_PACKAGES, *getattr(adapter, "packages", ())),
    }


def episode_seed(config: EmbodiedConfig) -> int | None:
    """The seed that the initial states are functions of, beside their number; None where the number is enough."""
    seeded = getattr(adapter_class(config.env.env_type), "states_need_seed", True)
    return config.env.seed if seeded else None


def completion_conditions(config: MathConfig) -> dict[str, Any]:
    """What decides how a language model's completions go and are scored, beside the model."""
    data, reward, rollout = config.data, config.reward, config.rollout
    return {
        "data": data.name,
        "dataset": data.dataset,
        "params": _jsonable(dataset_params(data.dataset, data.params)),
        "eval_size": data.eval_size,
        "max_prompt_length": data.max_prompt_length,
        "reward": reward.function,
        "reward_params": _jsonable(reward.params),
        "success_threshold": reward.success_threshold,
        "backend": rollout.backend,
        "max_new_tokens": rollout.max_new_tokens,
        "min_new_tokens": rollout.min_new_tokens,
        "stop": list(rollout.stop),
        "temperature": config.algorithm.sampling_params.temperature_eval,
        "completions_per_prompt": data.eval_completions,
        "versions": versions(*_PACKAGES, *_LANGUAGE_PACKAGES),
    }


def versions(*packages: str) -> dict[str, str]:
    """Of Python, the project and those ``packages`` that are installed."""
    found = {"python": platform.python_version(), "embodied_rl": __version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _jsonable(value: Any) -> Any:
    return TypeAdapter(Any).dump_python(value, mode="json")
