"""The parts that run inside vLLM: choosing tokens, and taking new weights. Imports vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.logits_processor.builtin import process_dict_updates  # pyright: ignore[reportMissingImports]

from embodied_rl.language.engines.base import Sampling
from embodied_rl.language.engines.sampling import draw_uniforms, next_tokens

_KEY = "embodied_rl"
"""Our key in a request's ``extra_args``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A completion to make, for :class:`TokenChooser`."""

    sampling: Sampling
    seed: int
    """The prompt's."""
    index: int
    """Number among the prompt's completions."""
    stops: Sequence[int]
    vocabulary: int
    """As in :func:`next_tokens`."""

    def params(self) -> SamplingParams:
        """vLLM's parameters of the request.

        vLLM takes the most likely token and reports its logit: :class:`TokenChooser` leaves a single token to choose
        from, whose logit is its log-probability.
        """
        # With stop strings each token is looked at: we know the tokenizer, vLLM does not.
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.sampling.max_new_tokens,
            stop_token_ids=list(self.stops),
            ignore_eos=True,  # the stop tokens are all there are, whatever the model's folder says
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self.sampling.stop else RequestOutputKind.FINAL_ONLY,
            extra_args={_KEY: self},
        )


@dataclass(slots=True, kw_only=True)
class _Row:
    """A completion in vLLM's batch."""

    request: Request
    uniforms: list[float]
    prompt: list[int]
    output: list[int]
    """vLLM's own list, which grows."""
    seen: Tensor | None = None
    """[V] bool: tokens of the prompt and of the first ``counted`` tokens of ``output``."""
    counted: int = 0

    def seen_tokens(self, size: int, device: torch.device) -> Tensor:
        """[V] bool, up to date."""
        if self.seen is None:
            self.seen = torch.zeros(size, dtype=torch.bool, device=device)
            self.seen[self.prompt] = True
        if new := self.output[self.counted :]:
            self.seen[new] = True
            self.counted = len(self.output)
        return self.seen


class TokenChooser(LogitsProcessor):
    """Chooses each token with our own random numbers, as every engine of ours does.

    vLLM's sampler could return log-probabilities of the whole distribution only before the temperature, or at the
    temperature only after ``top_p``, ``top_k`` and the rest have cut it; training needs neither. So nothing is left to
    it: a row of logits becomes the log-probability of the chosen token, and minus infinity everywhere else.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:  # vLLM tries itself out without requests
            return logits
        if len(self._rows) != len(logits):
            raise RuntimeError(f"vLLM has {len(logits)} rows of logits for {len(self._rows)} requests")
        rows = [self._rows[index] for index in range(len(logits))]
        first = rows[0].request
        lengths = [len(row.output) for row in rows]
        seen = None
        if first.sampling.repetition_penalty != 1:
            seen = torch.stack([row.seen_tokens(logits.shape[1], self._device) for row in rows])
        chosen, logprobs = next_tokens(
            logits,
            uniforms=torch.tensor(
                [row.uniforms[length] for row, length in zip(rows, lengths, strict=True)],
                dtype=torch.float64,
                device=self._device,
            ),
            lengths=torch.tensor(lengths, device=self._device),
            seen=seen,
            stops=torch.tensor(first.stops, device=self._device),
            vocabulary=first.vocabulary,
            sampling=first.sampling,
        )
        return logits.fill_(-torch.inf).scatter_(1, chosen[:, None], logprobs[:, None])


def _row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row:
    request: Request = (params.extra_args or {})[_KEY]
    uniforms = _uniforms(request.seed, request.sampling.n, request.sampling.max_new_tokens)[request.index]
    return _Row(request=request, uniforms=uniforms, prompt=prompt or [], output=output)


@lru_cache(maxsize=64)
def _uniforms(seed: int, n: int, length: int) -> list[list[float]]:
    """A prompt's completions mostly enter the batch one after the other."""
    return draw_uniforms(seed, n, length).tolist()


class WeightReload:
    """Methods that vLLM's worker gets (``worker_extension_cls``)."""

    model_runner: Any
    reload_weights: Any

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the model's weights by those with Hugging Face's names."""
        self.reload_weights(weights_iterator=iter(weights))
        repack_tied_head(self.model_runner.get_model())


def repack_tied_head(model: Any) -> None:
    """On a CPU the output layer computes with a packed copy of its weights. Where the input embedding has the same
    weights, loading them leaves the copy as it was, without a word."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # pyright: ignore[reportMissingImports]

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
