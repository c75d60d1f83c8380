"""Whether a data set fits the env and the configuration, by its description and its numbers: no picture is decoded.

No torch: a run asks before it starts anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.demonstrations.collection import executed_noise, settings_of_collection
from embodied_rl.demonstrations.lerobot import metadata
from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.demonstrations.plan import other_params
from embodied_rl.envs.base import KnownSpaces, params_of_the_reward
from embodied_rl.errors import ConfigError, UserError, listed, suggestion
from embodied_rl.params import at
from embodied_rl.schema import AugmentationConfig, DemonstrationConfig, EnvConfig

if TYPE_CHECKING:  # imports torch
    from embodied_rl.models.base import PolicySpec

DATA: Final = "data.path"
"""The key of what a run imitates, whose other keys say how it is read; elsewhere a folder is all."""
_ROUNDING: Final = 1e-3
"""Actions may be so much larger than 1: nobody can tell."""


def check_data(config: DemonstrationConfig, spaces: KnownSpaces, *, key: str = DATA) -> None:
    """See that each data set is whole and what the env gives and takes, as far as that is known.

    Args:
        key: where ``config.path`` is from, for messages.

    Raises:
        UserError: there is no data set, or a damaged one.
        ConfigError: it has other cameras, pictures, states or actions; all of them in the message.
    """
    for path in config.paths:
        _check(replace(config, path=path), Path(path), spaces, key)


def _check(config: DemonstrationConfig, root: Path, spaces: KnownSpaces, key: str) -> None:
    try:
        source = DataSet.open(root)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    # As the env, as far as is known.
    pictures_only = spaces.state_dim == 0 or (
        spaces.state_dim is None and metadata.STATE not in source.info["features"]
    )
    if not pictures_only:
        source.require(metadata.STATE, "the state")
    source.require(metadata.ACTION, "the actions")
    episodes = source.used_episodes()
    problems = []
    if spaces.image_shapes is not None:
        problems += _camera_problems(config, source, spaces.image_shapes, key)
    for name, wanted, advice in (
        (metadata.STATE, spaces.state_dim, "the policy would be shown other numbers than it learned from"),
        (metadata.ACTION, spaces.action_dim, "the env could not execute them"),
    ):
        if pictures_only and name == metadata.STATE:
            continue
        found = source.rows(name)
        if wanted is not None and found.shape[1] != wanted:
            problems.append(
                f"{key}={config.path}: {name} has {found.shape[1]} numbers, and the env's {wanted}: {advice}; use "
                "the env that it was recorded in, or another data set"
            )
        elif name == metadata.ACTION and spaces.action_choices is not None:
            used = np.concatenate([found[e["dataset_from_index"] : e["dataset_to_index"]] for e in episodes])
            if spaces.action_choices:
                problems += _choice_problems(config, used, spaces.action_choices, key)
            elif key != DATA or not config.clip_actions:
                problems += _range_problems(config, used, key)
    if problems:
        raise ConfigError(problems)


def spaces_of(spec: PolicySpec) -> KnownSpaces:
    """What a policy was built for."""
    return KnownSpaces(
        action_dim=spec.action_dim,
        state_dim=spec.state_dim,
        image_shapes=spec.image_shapes,
        action_choices=spec.action_choices,
    )


def check_outcomes(path: str, env: EnvConfig, *, key: str) -> None:
    """See that a data set's rewards are those of its actions, and of ``env``'s kind, as far as is known.

    Args:
        key: where ``path`` is from, for messages.

    Raises:
        UserError: what tells it is damaged.
        ConfigError: they are not.
    """
    played = settings_of_collection(Path(path))
    if played is not None and at(played, "env.env_type") == env.env_type:
        decisive, others = params_of_the_reward(env.env_type), other_params(played, env)
        if what := [f"{k} was {was!r}, now {now!r}" for k, (was, now) in others.items() if k in decisive]:
            raise ConfigError(
                [
                    f"{key}={path}: was played with other env.init_params than this run's, so its rewards are of "
                    f"another kind: {listed(what)}; set them as they were, or use another data set"
                ]
            )
    reason = ""
    if noise := executed_noise(Path(path)):
        reason = (
            f"was played with a noise of {noise:g} on the actions (collect.noise, dagger.noise), and has them "
            "without it"
        )
    elif metadata.DISTURBED in DataSet.open(Path(path)).info["features"]:
        reason = "has frames that are marked as disturbed, where other actions were executed than it has"
    if reason:
        raise ConfigError(
            [
                f"{key}={path}: {reason}, so its rewards are those of other actions; use a set that was played without "
                "noise, or imitate this one (task=sft, algorithm.bc_path)"
            ]
        )


def kept_to(path: str | list[str]) -> DemonstrationConfig:
    """The configuration of demonstrations that reinforcement learning takes (``algorithm.bc_path``,
    ``algorithm.replay.demonstrations``): pictures are stretched to the env's sizes, actions beyond by rounding cut off
    as the env does."""
    unchanged = AugmentationConfig(random_shift=0, brightness=0.0, contrast=0.0, saturation=0.0, words=0.0)
    return DemonstrationConfig(
        name="", path=path, weights=None, cameras=None, resize=True, clip_actions=True, seed=0, batch_size=1,
        prefetch=0, augmentation=unchanged,
    )  # fmt: skip


def camera_features(config: DemonstrationConfig, cameras: Mapping[str, object]) -> dict[str, str]:
    """The env's camera -> the data set's feature."""
    return {camera: metadata.IMAGES + camera for camera in cameras} | (config.cameras or {})


def _camera_problems(
    config: DemonstrationConfig, source: DataSet, shapes: Mapping[str, tuple[int, int]], key: str
) -> Iterator[str]:
    for camera in config.cameras or {}:
        if camera not in shapes:
            yield (
                f"data.cameras: the env has no camera {camera!r}, only {', '.join(shapes) or 'none'}."
                f"{suggestion(camera, shapes)}"
            )
    features = {camera: feature for camera, feature in camera_features(config, shapes).items() if camera in shapes}
    known = source.image_features()
    missing = {camera: feature for camera, feature in features.items() if feature not in known}
    if missing and not known:
        yield (
            f"{key}={config.path}: was recorded without images, and the env has the cameras {', '.join(shapes)}; "
            "use another data set, or an env without cameras (env.init_params)"
        )
        return
    if missing:
        wanted = listed(f"{feature} for the env's camera {camera}" for camera, feature in missing.items())
        near = "".join(dict.fromkeys(suggestion(feature, known) for feature in missing.values()))
        mend = f"say which is which with 'data.cameras={{{', '.join(f'{camera}: <feature>' for camera in shapes)}}}'"
        if key != DATA:
            mend = "use an env with those cameras, or another data set"
        yield f"{key}={config.path}: has no images {wanted}, only {', '.join(known)}; {mend}.{near}"
        return
    source.require_videos(list(features.values()))
    if config.resize:
        return
    sizes = {camera: source.image_size(feature) for camera, feature in features.items()}
    if others := {camera: size for camera, size in sizes.items() if size != tuple(shapes[camera])}:
        what = listed(f"{camera} {_size(size)}, the env's {_size(shapes[camera])}" for camera, size in others.items())
        yield (
            f"{key}={config.path}: images have other sizes than the env's (height x width): {what}; stretch them "
            "with data.resize=true, or have the env draw them as large as they were recorded (env.init_params)"
        )


def _choice_problems(
    config: DemonstrationConfig, actions: NDArray[np.float32], choices: tuple[int, ...], key: str
) -> Iterator[str]:
    """``actions`` is [F,A], each number one of so many choices."""
    wrong = (actions != np.round(actions)) | (actions < 0) | (actions >= np.asarray(choices))
    for d in np.flatnonzero(wrong.any(0)):
        yield (
            f"{key}={config.path}: the env's action {d} is one of {choices[d]} choices, 0 to {choices[d] - 1}, and the "
            f"data set has {actions[wrong[:, d], d][0]:g}; use the env that it was recorded in, or convert the actions"
        )


def _range_problems(config: DemonstrationConfig, actions: NDArray[np.float32], key: str) -> Iterator[str]:
    """``actions`` is [F,A]."""
    beyond = np.abs(actions) > 1.0 + _ROUNDING
    if not beyond.any():
        return
    ranges = listed(
        f"{d} from {actions[:, d].min():.3g} to {actions[:, d].max():.3g}" for d in np.flatnonzero(beyond.any(0))
    )
    mend = "data.clip_actions=true trains on what the env would do" if key == DATA else "cut them off in the data set"
    yield (
        f"{key}={config.path}: {beyond.any(1).mean():.1%} of the actions have numbers outside [-1, 1], where the "
        f"env cuts them off (number {ranges}). If they are in the env's units, {mend}; if not (metres, degrees, ...), "
        "convert them: -1 and 1 are the most that a control step does"
    )


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
