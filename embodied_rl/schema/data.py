"""``data``, ``reward`` and ``collect``: prompts and their scores, demonstrations and their recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from embodied_rl.schema.types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Section):
    name: str
    """The data group's name, for the run's."""
    dataset: str
    """Name in ``language/datasets/registry.py``, of an entry point, ``module:Class`` or ``path/to/file.py:Class``."""
    params: dict[str, Any]
    """The data set's own options: its ``Params`` dataclass documents them."""
    seed: NonNegativeInt
    """Seed of the choice of prompts."""
    rollout_batch_size: PositiveInt
    """Prompts of a training step; each gets ``algorithm.group_size`` completions."""
    eval_size: PositiveInt | None
    """Held-out prompts of an evaluation, always the same; null: all there are."""
    eval_completions: PositiveInt
    """Completions of each in an evaluation. Several need ``algorithm.sampling_params.temperature_eval`` above 0."""
    max_prompt_length: PositiveInt
    """Tokens; a longer prompt ends the run with a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(Section):
    function: str
    """Name in ``language/rewards/functions.py``, of an entry point, ``module:function`` or
    ``path/to/file.py:function``; ``weighted``: a sum of several; ``reward_model``: a sequence classifier."""
    params: dict[str, Any]
    """The function's own keyword options."""
    num_processes: NonNegativeInt
    """Processes in which each generation worker scores completions; 0: in its own."""
    timeout: PositiveFloat
    """Seconds for one completion in such a process. After them it is unverified, and the process is replaced."""
    success_threshold: float
    """A completion with at least this score counts as solved."""
    overlong_buffer_length: NonNegativeInt
    """DAPO's soft penalty for long completions in training: it grows over this number of tokens before
    ``rollout.max_new_tokens``. 0: off."""
    overlong_penalty_factor: NonNegativeFloat
    """Loss of score of a completion of the longest length."""
    mask_truncated: bool
    """Leave completions that were cut by their length out of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentationConfig(Section):
    """Random changes of a demonstration's images and instruction, drawn for each sample anew."""

    random_shift: NonNegativeInt
    """Largest shift in pixels, along each axis and for each camera; what comes in repeats the border. 0: off."""
    brightness: Fraction
    """Largest relative change, equal for a sample's cameras, as are the next two. 0: off."""
    contrast: Fraction
    saturation: Fraction
    words: Fraction
    """Share of an instruction's words that are left out or replaced by made-up ones, half of them each; one stays in
    any case. 0: off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationConfig(Section):
    name: str
    """The data group's name."""
    path: str | list[str]
    """A LeRobot data set's folder: recorded episodes with the env's cameras, state and actions. Several folders are
    taken together, every frame once in a pass."""
    weights: list[PositiveFloat] | None
    """Each folder's share of a training step's frames, in their order and in any unit; in ``task=dagger`` one more, for
    what all rounds add. Each folder has passes of its own. null: as many as it has frames."""
    cameras: dict[str, str] | None
    """The env's camera -> the data set's feature, such as ``observation.images.image``; null: they have the same
    names."""
    resize: bool
    """Stretch recorded images to the sizes of the env's (Pillow, bicubic) when they are decoded. Else other sizes are
    refused."""
    clip_actions: bool
    """Cut recorded actions off at -1 and 1, as the env does with a policy's. Else actions beyond are refused."""
    seed: NonNegativeInt
    """Seed of the frames' order and of the augmentation."""
    batch_size: PositiveInt
    """Frames of a training step, each with the chunk of actions that follows it; a pass over the data set has every
    frame once. ``actor.global_batch_size`` or ``algorithm.n_minibatches`` divides them into optimiser steps."""
    prefetch: NonNegativeInt
    """Training steps whose frames are read ahead while the actor updates."""
    augmentation: AugmentationConfig

    @property
    def paths(self) -> list[str]:
        """The folders, one or more."""
        return [self.path] if isinstance(self.path, str) else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySection(Section):
    """How demonstrations are played: what ``collect`` and ``dagger`` have in common."""

    expert: str | None
    """The scripted expert: a name, an entry point, ``module:Class`` or ``path/to/file.py:Class``; null: the env's
    own."""
    expert_params: dict[str, Any]
    """The expert's own options: its ``Params`` dataclass, if any, documents them."""
    teacher: str | None
    """A checkpoint, or a run, whose policy plays in the expert's place, as a large policy that a small one is to
    imitate; null: the scripted expert."""
    takeover_after: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)] | None
    """Control steps, at least and at most, that the model plays before the expert takes over; drawn for each episode.
    Only what the expert does is recorded: the way back from where the model leads (HG-DAgger, arXiv:1810.02890). null:
    one plays alone."""
    episodes_per_task: PositiveInt
    """Demonstrations of each task; of a round, in ``task=dagger``."""
    max_attempts: PositiveInt
    """Episodes played for a demonstration until one succeeds."""
    max_episode_steps: PositiveInt
    """Horizon: an episode without success is a failure here."""
    skip_states: NonNegativeInt
    """Number of each task's first initial states that are left to evaluation, which takes the first
    ``env.eval.episodes_per_task``; the demonstrations start from the others, in their order."""
    seed: NonNegativeInt
    """Seed of the noise, of the takeovers and of a model's actions."""
    noise: NonNegativeFloat
    """Standard deviation of the noise on the executed actions. The recorded action is the one without noise, so the
    data show the way back from where it leads (DART, arXiv:1703.09327). 0: off."""
    noise_correlation: Annotated[float, Field(ge=0, lt=1)]
    """Correlation of the noise from one control step to the next; 0: white. Noise that lasts teaches chunks to correct
    too far, since the expert's answers to noise yet to come are recorded."""
    noise_bursts: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None
    """Steps of a burst of noise, which is the same in all of them, and steps without noise between two bursts, on
    average. Frames of a burst are marked, and imitation leaves them out: chunks end before one, and what the expert
    does after one is undisturbed. null: there is noise at all times."""
    expert_noise: bool
    """Let the expert vary its motions by itself, where it does no harm; these actions are recorded as executed."""
    temperature: NonNegativeFloat
    """Temperature of a model's or teacher's actions; 0 takes the most likely."""
    image_format: Literal["video", "png"]
    """video: H.264, nearly without loss; png: without loss, several times larger."""

    @property
    def scripted(self) -> bool:
        """Whether a scripted expert plays."""
        return self.teacher is None

    @property
    def learner_plays(self) -> bool:
        """Whether ``model`` plays, for a while at least."""
        return self.takeover_after is not None

    @property
    def varies(self) -> bool:
        """Whether two episodes from the same initial state differ."""
        own = self.expert_noise if self.scripted else self.temperature > 0
        return self.noise > 0 or own or self.takeover_after is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSection(PlaySection):
    path: str
    """The LeRobot data set's folder. A collection that was begun there goes on; more demonstrations are added."""
    policy: Literal["expert", "model"]
    """Player whose episodes are recorded: the expert (``expert``, ``teacher``), or the model with the weights of
    ``model.path`` or ``runner.init_from``."""
    keep_failures: bool
    """Keep failed attempts, too, marked as such."""

    @property
    def scripted(self) -> bool:
        return self.policy == "expert" and self.teacher is None

    @property
    def learner_plays(self) -> bool:
        return self.policy == "model" or self.takeover_after is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaggerSection(PlaySection):
    takeover_after: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]
    """As in ``task=collect``; there is always a takeover."""
    interval: PositiveInt
    """Training steps between two rounds of demonstrations, each played with the weights of the moment."""
    rounds: PositiveInt
    """Rounds at most; ``runner.max_steps`` may end before."""
    beta: Fraction
    """The expert plays an episode of round r = 1, 2, ... alone with probability beta^r (Ross et al. 2011,
    arXiv:1011.0686, section 3); 0: the model always begins."""
