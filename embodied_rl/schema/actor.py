"""``actor``: the training engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from embodied_rl.schema.types import (
    DType,
    Fraction,
    MicroBatchSize,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig(Section):
    lr: PositiveFloat
    value_lr: PositiveFloat | None
    """Learning rate of the value head; null: ``lr``."""
    adam_beta1: Fraction
    adam_beta2: Fraction
    adam_eps: PositiveFloat
    weight_decay: NonNegativeFloat
    state_dtype: Literal["float32", "bfloat16", "int8"]
    """Type of Adam's two moments. bfloat16 halves them, int8 (blocks of 256 with a scale each) makes them a quarter;
    they are rounded stochastically, and a step is computed in float32."""
    clip_grad: PositiveFloat | None
    """Largest global norm of the gradient; null: no limit."""
    skip_nonfinite: bool
    """Skip an optimiser step whose gradient is NaN or infinite and count it in ``actor/nonfinite_steps``; false:
    stop the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRScheduleConfig(Section):
    """Schedule of all learning rates alike, in training steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "wsd"]
    """wsd: stable, then linear."""
    lr_warmup_iters: NonNegativeInt
    """Training steps in which the rate rises to its value."""
    lr_warmup_fraction: Fraction | None
    """Instead: of all training steps."""
    lr_decay_iters: PositiveInt | None
    """The training step in which the decay ends; null: ``runner.max_steps``."""
    min_lr_ratio: Fraction
    """Share of the rate that is left at the decay's end."""
    wsd_decay_fraction: Annotated[float, Field(gt=0, le=1)]
    """wsd: the part of the steps after the warm-up that decays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionConfig(Section):
    """Weights, optimiser state and the mathematics of losses stay as they are, float32 as a rule."""

    param_dtype: DType | None
    """Type of gathered parameters, and so of forward and backward passes; null: that of the weights. float16 scales
    the loss so that gradients do not underflow."""
    reduce_dtype: DType
    """In which gradients are summed over ranks, and over micro-batches until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig(Section):
    sharding_strategy: Literal["full_shard", "hybrid_shard", "no_shard"]
    """Over which ranks parameters, gradients and optimiser state are split: all of them; those of a group of
    ``fsdp_size``, each group being a replica; none, every rank being a replica."""
    fsdp_size: PositiveInt | None
    """hybrid_shard: ranks of a group, a divisor of the actor's ranks."""
    reshard_after_forward: bool
    """Free the gathered parameters between forward and backward: less memory, one more all-gather."""
    cpu_offload: bool
    """Keep parameters, gradients and optimiser state in host memory, and step the optimiser there. For accelerators."""
    enable_gradient_accumulation: bool
    """Reduce gradients over ranks once an optimiser step instead of after each micro-batch: less communication, but
    until then every rank holds a whole gradient."""
    mixed_precision: MixedPrecisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig(Section):
    seed: NonNegativeInt
    """Seed of the initial weights, the sampled actions and the mini-batches' order."""
    micro_batch_size: MicroBatchSize
    """Samples (chunks) per forward and backward pass of one rank; no influence on the result. auto: all that an
    optimiser step has, or a half, a quarter and so on where memory runs out on any rank; several ranks need
    ``fsdp_config.sharding_strategy=full_shard``."""
    max_tokens_per_micro_batch: PositiveInt | None
    """Instead of ``micro_batch_size``, for language: tokens of a rank's forward and backward pass, padding included.
    A longer sample goes alone. null: off."""
    skip_zero_advantages: bool
    """Leave samples out of the update's passes whose loss has no gradient, since all their advantages are 0 and no
    entropy, value or divergence is asked for. The gradient is the same; diagnostics are then of the others.
    Not with ``algorithm.early_stop_imp_ratio``, which asks for the ratio of all."""
    encode_once: bool
    """Compute what frozen encoders make of pictures once for a training step, not in each pass of
    ``algorithm.update_epoch``: for policies with encoders that are not trained (tiny_vla, pi0, pi05, smolvla). The
    result is the same; host memory holds it, as float32, beside the pictures."""
    recompute_logprobs: bool
    """Compute the rollout's log-probabilities again before the update, use those, and log how far they are off.
    Where both compute alike it changes nothing but rounding."""
    logprob_micro_batch_size: PositiveInt | None
    """Samples per forward pass where there is no backward: recomputed, proximal and reference log-probabilities.
    null: as ``micro_batch_size``."""
    logprob_gap_warning: PositiveFloat | None
    """Warn when ``actor/logprob_gap``, the mean distance of the rollout's log-probabilities from the recomputed, is
    above. null: never."""
    enable_offload: bool
    """Keep what ``offload`` names in host memory but during the update, where a rollout worker shares the
    accelerator."""
    offload: list[Literal["weights", "gradients", "optimizer"]]
    """Of ``enable_offload``. weights: those of the policy and of the reference. gradients: dropped after the update,
    which begins without any; with the weights, too. optimizer: Adam's moments."""
    gradient_checkpointing: bool
    """Keep only the inputs of the model's blocks for the backward pass, which computes the rest again: less memory, one
    more forward pass, the same result."""
    torch_compile: bool
    """Compile the model's blocks with ``torch.compile``; the first passes take minutes."""
    global_batch_size: PositiveInt | None
    """Samples per optimiser step over all ranks. Give this or ``algorithm.n_minibatches``."""
    sync_bucket_mb: PositiveInt
    """MiB of weights that travel to a rollout worker at once: bounds memory."""
    reference_dtype: Literal["bfloat16", "float16"] | None
    """Type of the reference policy's weights (``algorithm.kl_beta``), and of its passes; null: as the policy's. Where
    it is the policy without its adapters it has none of its own."""
    sync_backend: Literal["channel", "collective", "cuda_ipc", "auto"]
    """Way of the weights to the rollout workers. channel: host memory, shared by the workers of a node and sent once to
    each other node; collective: torch's broadcast, NCCL between accelerators (gloo between CPUs, which is slower);
    cuda_ipc: memory of the accelerator that rollout worker and actor rank share; auto: cuda_ipc or collective where the
    placement allows it and accelerators are used, else channel."""
    sync_dtype: Literal["bfloat16", "float16"] | None
    """Type that floating-point weights are rounded to on their way to the rollout workers; null: not at all."""
    verify_weight_sync: bool
    """Compare checksums of the whole policy after every weight sync, and stop where they differ. For debugging."""
    optim: OptimConfig
    lr_sched: LRScheduleConfig
    fsdp_config: FSDPConfig
