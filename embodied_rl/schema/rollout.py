"""``rollout``: how a policy acts or a language model answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from embodied_rl.schema.types import NonEmptyString, NonNegativeInt, PositiveFloat, PositiveInt, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRolloutConfig(Section):
    """Keys of both."""

    enable_offload: bool
    """Keep the policy in host memory except while it acts, where it shares an accelerator with the actor."""
    max_staleness: NonNegativeInt
    """Maximum policy lag, in updates: how far the weights of a training step's rollout may trail the newest ones. 0:
    the next rollout waits for the update; 1: it runs while the actor updates; more: further ahead."""
    interruptible: bool
    """Take new weights in the middle of a rollout that runs ahead, instead of after it."""
    dtype: Literal["bfloat16", "float16"] | None
    """Type of the weights that policies act or generate with, in evaluations, too, and of what travels to them; the
    actor's stay as they are. null: the actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(SharedRolloutConfig):
    chunks_ahead: PositiveInt | None
    """With ``max_staleness=1``: only so many chunks of a rollout, its first ones, are played while the actor updates;
    the rest waits for the weights of this update. null, or as many as it has: all of them are played meanwhile."""
    pipeline_stage_num: PositiveInt
    """Groups of envs per env worker that take turns: while the policy infers for one, the simulators step another."""
    micro_batch_size: PositiveInt | None
    """Observations that a rollout worker's policy sees at once, beside rounding without influence on the result; null:
    those of all envs that wait for it. Where memory runs out, half as many from then on."""
    torch_compile: bool
    """Compile what a policy runs for each denoising step (pi0, pi05, smolvla) or action token (openvla), or else its
    blocks, with ``torch.compile``; the first decisions take a minute or more. Padding of prompts is then computed, too,
    so that shapes stay. For acting; ``actor.torch_compile`` is for training."""
    cuda_graphs: bool
    """Record what ``torch_compile`` makes as CUDA graphs, one for each number of envs that act at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig(SharedRolloutConfig):
    backend: str
    """Engine that decodes: a name in ``language/engines/base.py``, of an entry point, ``module:Class`` or
    ``path/to/file.py:Class``."""
    max_new_tokens: PositiveInt
    """Longest completion; one that has not ended by then is cut (truncated)."""
    min_new_tokens: NonNegativeInt
    """A completion cannot end before it has so many tokens, its end token included."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Training samples from the most likely tokens that together have this probability. The recorded
    log-probabilities are those of the whole distribution, which the update computes too."""
    top_k: PositiveInt | None
    """Training samples from so many most likely tokens; null: all."""
    repetition_penalty: PositiveFloat
    """Training divides a token's positive logit by it, and multiplies a negative one, if the token is in the prompt or
    in the completion so far (arXiv:1909.05858); 1: off. The recorded log-probabilities are those without it."""
    stop: list[NonEmptyString]
    """A completion ends with the token that completes one of these texts, in training and evaluation, and is scored
    without it. Beside the model's end tokens."""
    max_batch_size: PositiveInt
    """Completions decoded at once by a worker: bounds memory, no influence on the result."""
    engine_kwargs: dict[str, Any]
    """Arguments of the engine's own, such as vLLM's ``max_model_len`` or ``gpu_memory_utilization``."""
