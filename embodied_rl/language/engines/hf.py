"""``hf``: decoding on the policy's own model, with a key-value cache. Needs nothing beyond transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from embodied_rl.errors import UserError
from embodied_rl.language.engines.base import Completion, GenerationBackend, Sampling
from embodied_rl.language.engines.cache import roomy_cache
from embodied_rl.language.engines.sampling import draw_uniforms, next_tokens
from embodied_rl.language.engines.stop_strings import StopStrings
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.causal_lm.policy import CausalLMPolicy, position_ids
from embodied_rl.models.registry import policy_of
from embodied_rl.schema import GenerationConfig, ModelConfig
from embodied_rl.training.offload import HostWeights, require_accelerator

_SHRINK = 0.75
"""Sequences that have ended are taken out of the batch when no more than this share is left: copying the cache costs
about as much as a token."""


class HfBackend(GenerationBackend):
    """Batches of prompts, as many as fit into ``rollout.max_batch_size`` completions."""

    interruptible = True

    def __init__(self, model: ModelConfig, spec: PolicySpec, config: GenerationConfig, device: str) -> None:
        if config.engine_kwargs:
            raise UserError(
                f"rollout.engine_kwargs: got {', '.join(config.engine_kwargs)}, but rollout.backend=hf takes none; "
                "leave them out, or use the engine that they belong to, such as rollout.backend=vllm"
            )
        policy = policy_of(model, spec)
        if not isinstance(policy, CausalLMPolicy):
            raise UserError(f"rollout.backend=hf: got model_type {model.model_type!r}, expected causal_lm")
        self._policy = policy.eval().requires_grad_(False)
        self._resident: HostWeights | None = None
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
        at_once = max(1, self._max_batch_size // sampling.n)
        # Prompts of like length together: less padding.
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        found: dict[int, list[Completion]] = {}
        for start in range(0, len(order), at_once):
            places = order[start : start + at_once]
            done, total = start * sampling.n, len(prompts) * sampling.n
            batch = self._decode(
                [prompts[p] for p in places],
                sampling,
                [seeds[p] for p in places],
                lambda ended, done=done, total=total: report(done + ended, total),
                interrupt or (lambda: False),
            )
            found |= {place: batch[i * sampling.n : (i + 1) * sampling.n] for i, place in enumerate(places)}
        return [found[place] for place in range(len(prompts))]

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        report: Callable[[int], None],
        interrupt: Callable[[], bool],
    ) -> list[Completion]:
        """``n`` completions of the first prompt, then of the second, ..."""
        device, n, length = self._device, sampling.n, sampling.max_new_tokens
        stops = torch.tensor(sorted(self.stop_token_ids), device=device)
        uniforms = torch.cat([draw_uniforms(seed, n, length) for seed in seeds]).to(device)
        count = len(prompts) * n
        tokens = torch.zeros(count, length, dtype=torch.int64, device=device)
        logprobs = torch.zeros(count, length, device=device)
        lengths = torch.full((count,), length, device=device)
        stopped = torch.zeros(count, dtype=torch.bool, device=device)
        strings, stopped_by = StopStrings(self.tokenizer, sampling.stop), dict[int, str]()

        ids, mask = _left_padded(prompts, device)
        # A prompt is read once, whatever the number of its completions.
        cache = roomy_cache(self._policy.model.config)
        logits = self._forward(ids, mask, position_ids(mask), cache)
        cache.batch_repeat_interleave(n)
        logits = logits.repeat_interleave(n, 0)
        mask = torch.cat([mask.repeat_interleave(n, 0), mask.new_ones(count, length)], 1)
        positions = mask[:, : ids.shape[1]].sum(1)
        live = torch.arange(count, device=device)  # the row's completion
        seen = _seen(ids, mask[:, : ids.shape[1]], logits, n) if sampling.repetition_penalty != 1 else None
        for step in range(length):
            chosen, chosen_logprobs = next_tokens(
                logits,
                uniforms=uniforms[live, step],
                lengths=torch.full_like(live, step),
                seen=seen,
                stops=stops,
                vocabulary=self.vocabulary,
                sampling=sampling,
            )
            tokens[live, step], logprobs[live, step] = chosen, chosen_logprobs
            ended = torch.isin(chosen, stops)
            running = ~stopped[live]
            just = live[running & ended]
            lengths[just], stopped[just] = step + 1, True
            if strings:
                for row in live[running & ~ended].tolist():
                    found = strings.completed_by_last(tokens[row, : step + 1].tolist(), sampling.min_new_tokens)
                    if found is not None:
                        stopped_by[row], lengths[row], stopped[row] = found, step + 1, True
            if step + 1 == length:
                break
            keep = ~stopped[live]
            left = int(keep.sum())
            if not left:
                break
            report(count - left)
            if seen is not None:
                seen.scatter_(1, chosen[:, None], True)
            if left <= _SHRINK * len(live):
                rows = keep.nonzero().squeeze(-1)
                cache.batch_select_indices(rows)
                live, mask, positions, chosen = live[rows], mask[rows], positions[rows], chosen[rows]
                seen = None if seen is None else seen[rows]
            if interrupt():  # the cache is of other weights
                cache = roomy_cache(self._policy.model.config)
                known = mask[:, : ids.shape[1] + step]
                read = torch.cat([ids.repeat_interleave(n, 0)[live], tokens[live, :step]], 1)
                self._forward(read, known, position_ids(known), cache)
            logits = self._forward(chosen[:, None], mask[:, : ids.shape[1] + step + 1], positions[:, None], cache)
            positions = positions + 1
        return _completions(tokens.cpu(), logprobs.cpu(), lengths.tolist(), stopped.tolist(), stopped_by)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """[B,V] logits of the next token; ``cache`` grows."""
        output = self._policy.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def _seen(ids: Tensor, mask: Tensor, logits: Tensor, n: int) -> Tensor:
    """[B,V] bool: the tokens of each completion's prompt."""
    seen = torch.zeros_like(logits, dtype=torch.int32)
    # Padding adds nothing to the token that it is written as.
    return seen.scatter_add_(1, ids.repeat_interleave(n, 0), mask.int()) > 0


def _left_padded(prompts: Sequence[Sequence[int]], device: str) -> tuple[Tensor, Tensor]:
    """[B,L] int64 ids and mask."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _completions(
    tokens: Tensor, logprobs: Tensor, lengths: list[int], stopped: list[bool], stopped_by: Mapping[int, str]
) -> list[Completion]:
    return [
        Completion(
            token_ids=tuple(tokens[row, :length].tolist()),
            logprobs=tuple(logprobs[row, :length].tolist()),
            finish_reason="stop" if ended else "length",
            stop=stopped_by.get(row),
        )
        for row, (length, ended) in enumerate(zip(lengths, stopped, strict=True))
    ]
