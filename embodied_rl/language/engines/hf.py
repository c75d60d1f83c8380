"""``hf``: decoding on the policy's own model, with a key-value cache. Needs nothing beyond transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from embodied_rl.errors import UserError
from embodied_rl.language.engines.base import Completion, GenerationBackend, Sampling, StopStrings, causal_lm
from embodied_rl.language.engines.sampling import draw_uniforms, next_tokens
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.causal_lm import position_ids
from embodied_rl.models.weights.host import HostWeights, require_accelerator
from embodied_rl.models.weights.precision import hold_in
from embodied_rl.schema import GenerationConfig, ModelConfig

_SHRINK = 0.75
"""Sequences that have ended are taken out of the batch when no more than this share is left: copying the cache costs
about as much as a token."""
_MIN_GROWTH = 32
"""Tokens by which a cache's buffer grows at least; a long one grows by half."""


class HfBackend(GenerationBackend):
    """Batches of prompts, as many as fit into ``rollout.max_batch_size`` completions."""

    interruptible = True

    def __init__(self, model: ModelConfig, spec: PolicySpec, config: GenerationConfig, device: str) -> None:
        if config.engine_kwargs:
            raise UserError(
                f"rollout.engine_kwargs: got {', '.join(config.engine_kwargs)}, but rollout.backend=hf takes none; "
                "leave them out, or use the engine that they belong to, such as rollout.backend=vllm"
            )
        policy = causal_lm("hf", model, spec)
        if config.dtype is not None:
            hold_in(policy, getattr(torch, config.dtype))
        self._policy, self._resident = policy, None
        if config.enable_offload:
            require_accelerator("rollout.enable_offload", device)
            self._resident = HostWeights(policy, device)
        else:
            policy.to(device)
        self._device, self._max_batch_size = device, config.max_batch_size
        self.tokenizer = policy.tokenizer
        self.stop_token_ids, self.max_length = policy.stop_token_ids, policy.max_length

    def weights(self) -> Mapping[str, Tensor]:
        return self._policy.state_dict()

    def wake(self) -> None:
        if self._resident:
            self._resident.load()

    def sleep(self) -> None:
        if self._resident:
            self._resident.drop()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        report: Callable[[int, int], None],
        interrupt: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        n, total = sampling.n, len(prompts) * sampling.n
        at_once = max(1, self._max_batch_size // n)
        parts = [range(first, min(first + self._max_batch_size, n)) for first in range(0, n, self._max_batch_size)]
        # Prompts of like length together: less padding.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found: dict[int, list[Completion]] = {index: [] for index in order}
        done = 0
        for start, part in itertools.product(range(0, len(order), at_once), parts):
            indices = order[start : start + at_once]
            batch = self._decode(
                [prompts[i] for i in indices],
                part,
                sampling,
                [seeds[i] for i in indices],
                lambda ended, done=done: report(done + ended, total),
                interrupt or (lambda: False),
            )
            done += len(batch)
            for row, index in enumerate(indices):
                found[index] += batch[row * len(part) : (row + 1) * len(part)]
        return [found[index] for index in range(len(prompts))]

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        part: range,
        sampling: Sampling,
        seeds: Sequence[int],
        report: Callable[[int], None],
        interrupt: Callable[[], bool],
    ) -> list[Completion]:
        """Of the first prompt's ``sampling.n`` completions those with these numbers, then of the second's, ..."""
        n, length = len(part), sampling.max_new_tokens
        stops = torch.tensor(sorted(self.stop_token_ids), device=self._device)
        drawn = [draw_uniforms(seed, sampling.n, length)[part.start : part.stop] for seed in seeds]
        uniforms = torch.cat(drawn).to(self._device)
        found = _Found(len(prompts) * n, length, StopStrings(self.tokenizer, sampling.stop), self._device)

        ids, mask = _left_padded(prompts, self._device)
        width = ids.shape[1]
        # A prompt is read once, whatever the number of its completions.
        cache = roomy_cache(self._policy.model.config)
        logits = self._forward(ids, mask, cache).repeat_interleave(n, 0)
        cache.batch_repeat_interleave(n)
        ids, mask = ids.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
        seen = None
        if sampling.repetition_penalty != 1:
            # Padding adds nothing to the token that it is written as.
            seen = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, ids, mask.int()) > 0
        mask = torch.cat([mask, mask.new_ones(len(mask), length)], 1)
        live = torch.arange(len(ids), device=self._device)  # the row's completion
        for step in range(length):
            chosen, logprobs = next_tokens(
                logits,
                uniforms=uniforms[live, step],
                lengths=torch.full_like(live, step),
                seen=seen,
                stops=stops,
                vocabulary=self.vocabulary,
                sampling=sampling,
            )
            found.add(step, live, chosen, logprobs, torch.isin(chosen, stops), sampling.min_new_tokens)
            running = ~found.stopped[live]
            left = int(running.sum())
            if not left or step + 1 == length:
                break
            report(len(found.stopped) - left)
            if seen is not None:
                seen.scatter_(1, chosen[:, None], True)
            if left <= _SHRINK * len(live):
                rows = running.nonzero().squeeze(-1)
                cache.batch_select_indices(rows)
                live, mask, ids, chosen = live[rows], mask[rows], ids[rows], chosen[rows]
                seen = None if seen is None else seen[rows]
            if interrupt():  # the cache is of other weights
                cache = roomy_cache(self._policy.model.config)
                self._forward(torch.cat([ids, found.tokens[live, :step]], 1), mask[:, : width + step], cache)
            logits = self._forward(chosen[:, None], mask[:, : width + step + 1], cache)
        return found.completions()

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """[B,V] logits of the token after ``ids``, the last ones under ``mask``; ``cache`` grows."""
        output = self._policy.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids(mask)[:, -ids.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


class _Found:
    """The completions of a batch, token by token."""

    def __init__(self, count: int, length: int, strings: StopStrings, device: str) -> None:
        self.tokens = torch.zeros(count, length, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(count, length, device=device)
        self._lengths = torch.full((count,), length, device=device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=device)
        self._strings, self._stopped_by = strings, dict[int, str]()

    def add(self, step: int, live: Tensor, chosen: Tensor, logprobs: Tensor, ended: Tensor, min_tokens: int) -> None:
        """Add a token to each of the completions ``live``; those that stopped before keep their length.

        Args:
            ended: whether it is an end token.
            min_tokens: no stop string ends a completion before it has so many.
        """
        self.tokens[live, step], self._logprobs[live, step] = chosen, logprobs
        running = ~self.stopped[live]
        just = live[running & ended]
        self._lengths[just], self.stopped[just] = step + 1, True
        if self._strings:
            for row in live[running & ~ended].tolist():
                string = self._strings.completed_by_last(self.tokens[row, : step + 1].tolist(), min_tokens)
                if string is not None:
                    self._stopped_by[row], self._lengths[row], self.stopped[row] = string, step + 1, True

    def completions(self) -> list[Completion]:
        tokens, logprobs = self.tokens.cpu(), self._logprobs.cpu()
        return [
            Completion(
                token_ids=tuple(tokens[row, :length].tolist()),
                logprobs=tuple(logprobs[row, :length].tolist()),
                finish_reason="stop" if ended else "length",
                stop=self._stopped_by.get(row),
            )
            for row, (length, ended) in enumerate(zip(self._lengths.tolist(), self.stopped.tolist(), strict=True))
        ]


def _left_padded(prompts: Sequence[Sequence[int]], device: str) -> tuple[Tensor, Tensor]:
    """[B,L] int64 ids and mask."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class PreallocatedLayer(DynamicLayer):
    """``DynamicLayer``, whose ``keys`` and ``values`` are the filled part of larger buffers.

    transformers' own allocates both anew for each token, which is what takes longest where completions are long.
    """

    _buffers: Sequence[Tensor] = ()
    _shown: Tensor | None = None
    """``keys`` as :meth:`update` left them; the other methods replace them by tensors of their own."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B,H,T,D] each, and return all of both."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        filled, states = self.get_seq_length(), (key_states, value_states)
        needed = filled + key_states.shape[-2]
        if self.keys is not self._shown or needed > self._buffers[0].shape[-2]:
            old: tuple[Any, Any] = self.keys, self.values
            self._buffers = [_with_room(new, needed) for new in states]
            if filled:
                for buffer, part in zip(self._buffers, old, strict=True):
                    buffer[:, :, :filled] = part
        for buffer, new in zip(self._buffers, states, strict=True):
            buffer[:, :, filled:needed] = new
        self.keys, self.values = (buffer[:, :, :needed] for buffer in self._buffers)
        self._shown = self.keys
        return self.keys, self.values


def _with_room(states: Tensor, tokens: int) -> Tensor:
    """[B,H,more than tokens,D], empty."""
    batch, heads, _, size = states.shape
    return states.new_empty(batch, heads, tokens + max(_MIN_GROWTH, tokens // 2), size)


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """``DynamicCache`` for a model; layers of other kinds than full attention stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
