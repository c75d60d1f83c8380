"""Choosing tokens from logits, each completion with random numbers of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def draw_uniforms(seed: int, n: int, length: int) -> Tensor:
    """[n,length] float64 in [0, 1): what decides a prompt's ``n`` completions, token by token."""
    return torch.rand(n, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def choose(logprobs: Tensor, uniforms: Tensor, *, top_p: float, top_k: int | None) -> Tensor:
    """[B] int64 tokens by inversion of the distribution function.

    Args:
        logprobs: [B,V] float32, -inf for tokens that are out of the question; need not be normalised.
        uniforms: [B] float64 in [0, 1).
    """
    weights = logprobs.double().softmax(-1)
    if top_k is not None and top_k < weights.shape[-1]:
        weights = weights * (weights >= weights.topk(top_k).values[:, -1:])
    if top_p < 1.0:
        weights = weights / weights.sum(-1, keepdim=True)
        ordered, order = weights.sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p  # a token stays if those before it do not reach top_p
        weights = weights.masked_fill(outside.gather(-1, order.argsort(-1)), 0.0)
    cumulative = weights.cumsum(-1)
    return torch.searchsorted(cumulative, (uniforms[:, None] * cumulative[:, -1:]), right=True)[:, 0].clamp(
        max=weights.shape[-1] - 1
    )


def prompt_seed(seed: int, *, held_out: bool, step: int, prompt: int) -> int:
    """A prompt's seed from the run's and its place in the run, so that nothing has to be remembered to resume and no
    number of workers changes it."""
    entropy = np.random.SeedSequence([seed, held_out, step, prompt])
    return int(entropy.generate_state(1, np.uint64)[0] >> 1)
