"""Choosing tokens from logits, each completion with random numbers of its own: the same in every engine."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.language.engines.base import Sampling
from embodied_rl.models.categorical import most_likely, scaled_log_softmax
from embodied_rl.seeding import derived_seed


def draw_uniforms(seed: int, n: int, length: int) -> Tensor:
    """[n,length] float64 in [0, 1): what decides a prompt's ``n`` completions, token by token."""
    return torch.rand(n, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def next_tokens(
    logits: Tensor,
    *,
    uniforms: Tensor,
    lengths: Tensor,
    seen: Tensor | None,
    stops: Tensor,
    vocabulary: int,
    sampling: Sampling,
) -> tuple[Tensor, Tensor]:
    """[B] int64 tokens and [B] float32 log-probabilities of the whole distribution at the temperature.

    Args:
        logits: [B,V].
        uniforms: [B] float64 in [0, 1).
        lengths: [B] int64, tokens that each completion has so far.
        seen: [B,V] bool, tokens of the prompt and of the completion so far; None without repetition penalty.
        stops: int64, tokens that end a completion.
        vocabulary: tokens that the tokenizer knows; ids from there on are padding of the model's and are never chosen.
    """
    whole = scaled_log_softmax(logits, sampling.temperature or 1.0)
    allowed = whole
    if seen is not None:
        penalised = penalise(logits.float(), seen, sampling.repetition_penalty)
        allowed = penalised / (sampling.temperature or 1.0)
    if sampling.min_new_tokens > 1:
        early = (lengths + 1 < sampling.min_new_tokens)[:, None]
        ends = torch.zeros_like(allowed[:1], dtype=torch.bool).index_fill(1, stops, True)
        allowed = allowed.masked_fill(early & ends, -torch.inf)
    if vocabulary < allowed.shape[-1]:
        allowed = torch.cat([allowed[:, :vocabulary], torch.full_like(allowed[:, vocabulary:], -torch.inf)], -1)
    if sampling.temperature == 0:
        chosen = allowed.argmax(-1)
    else:
        chosen = choose(allowed, uniforms, top_p=sampling.top_p, top_k=sampling.top_k)
    return chosen, whole.gather(1, chosen[:, None])[:, 0]


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """The repetition penalty of CTRL (arXiv:1909.05858), as in transformers: logits of tokens that were ``seen`` are
    divided by it where positive, multiplied where negative."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def choose(logprobs: Tensor, uniforms: Tensor, *, top_p: float, top_k: int | None) -> Tensor:
    """[B] int64 tokens by inversion of the distribution function.

    Args:
        logprobs: [B,V] float32, -inf for tokens that are out of the question; need not be normalised.
        uniforms: [B] float64 in [0, 1).
    """
    weights = most_likely(logprobs, top_p=top_p, top_k=top_k)
    cumulative = weights.cumsum(-1)
    return torch.searchsorted(cumulative, (uniforms[:, None] * cumulative[:, -1:]), right=True)[:, 0].clamp(
        max=weights.shape[-1] - 1
    )


def prompt_seed(seed: int, *, held_out: bool, step: int, prompt: int) -> int:
    """A prompt's seed from the run's and its position in the run, so that nothing has to be remembered to resume and no
    number of workers changes it."""
    return derived_seed(seed, held_out, step, prompt)
