"""The interface of engines that complete prompts, and their names. A new engine adds one line to :data:`BACKENDS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.models.registry import policy_of
from embodied_rl.registry import Registry
from embodied_rl.schema import GenerationConfig, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BACKENDS: Final = Registry(
    "rollout.backend",
    {
        "hf": "embodied_rl.language.engines.hf:HfBackend",
        "vllm": "embodied_rl.language.engines.vllm_backend:VllmBackend",
    },
    group="embodied_rl.engines",
)
"""``rollout.backend`` -> "module:Class"."""
FinishReason = Literal["stop", "length"]
_TOKENS_PER_CHARACTER: Final = 4
"""At the most: a token may be a single byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options for choosing tokens."""

    n: int
    """Completions of each prompt."""
    temperature: float
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int | None = None
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end a completion, beside the model's end tokens."""
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of a prompt."""

    token_ids: tuple[int, ...]
    """The end token included, where there is one."""
    logprobs: tuple[float, ...]
    """Each token's, under the whole distribution at the temperature (1 where that is 0), before ``top_p``, ``top_k``,
    ``min_new_tokens`` and ``repetition_penalty``: what ``Policy.evaluate`` gives."""
    finish_reason: FinishReason
    """stop: it ended with a stop token or a stop string; length: it was cut."""
    stop: str | None = None
    """The stop string that its last token completed."""


class StopStrings:
    """Texts that end a completion, whatever tokens they are made of."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._window = _TOKENS_PER_CHARACTER * (max(map(len, strings), default=0) + 1)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def completed_by_last(self, token_ids: Sequence[int], min_tokens: int) -> str | None:
        """The first of them that the last token completes; none in fewer than ``min_tokens``."""
        if len(token_ids) < min_tokens:
            return None
        tail = list(token_ids[-self._window :])
        return next((string for string in self._strings if self._find(tail, string)[1] >= 0), None)

    def before(self, token_ids: Sequence[int], string: str) -> str:
        """The completion's text without the string that its last token completed, and what followed that."""
        text, start = self._find(list(token_ids), string)
        return text[:start]

    def _find(self, ids: list[int], string: str) -> tuple[str, int]:
        """The text, and where the string that ends in the last token begins; -1: nowhere."""
        text, before = str(self._tokenizer.decode(ids)), str(self._tokenizer.decode(ids[:-1]))
        return text, text.find(string, max(0, len(before) - len(string) + 1))


class GenerationBackend:
    """An engine with one model.

    Args:
        model: the config's section; weights come through :meth:`weights`.
        spec: of the policy, whose weights the engine gets.
        config: the config's ``rollout`` section.
        device: a torch device.
    """

    interruptible: ClassVar[bool] = False
    """True if it takes new weights in the middle of a completion."""
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    max_length: int | None
    """Tokens of prompt and completion that the model takes together; None: it does not say."""

    def __init__(self, model: ModelConfig, spec: PolicySpec, config: GenerationConfig, device: str) -> None:
        raise NotImplementedError

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's whole state dict; a new version is copied into its tensors between two :meth:`generate`."""
        raise NotImplementedError

    def refresh(self) -> None:
        """A whole version is in :meth:`weights` now. An engine that decodes on those tensors has nothing to do.

        Raises:
            UserError: the engine cannot take it.
        """

    def wake(self) -> None:
        """Get ready to :meth:`generate`, after :meth:`sleep`. At first the engine is awake unless
        ``config.enable_offload`` is set."""

    def sleep(self) -> None:
        """Free the accelerator for others; :meth:`weights` may still be written to."""

    def close(self) -> None:
        """Release everything; the engine is not used any more."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        report: Callable[[int, int], None],
        interrupt: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        """``sampling.n`` completions of each prompt.

        Args:
            prompts: token ids, at least one each.
            seeds: one a prompt. A prompt's completions are a function of the weights, its tokens, ``sampling`` and its
                seed, up to rounding, whatever other prompts there are.
            report: called with (completions that have ended, all) after each token.
            interrupt: called between tokens now and then by an :attr:`interruptible` engine; True says that
                :meth:`weights` are others since. What has been decoded stays, and is read again with the new ones.
        """
        raise NotImplementedError

    @cached_property
    def vocabulary(self) -> int:
        """Token ids from here on are padding of the model's vocabulary, which the tokenizer does not know."""
        return 1 + max(self.tokenizer.get_vocab().values())

    @property
    def pad_token_id(self) -> int:
        """Padding after a text; any id will do, since lengths tell it apart."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in candidates if isinstance(token, int)), 0)

    def text(self, completion: Completion) -> str:
        """The completion's text, without its end token or stop string."""
        ids = list(completion.token_ids)
        if completion.stop is not None:
            return StopStrings(self.tokenizer, [completion.stop]).before(ids, completion.stop)
        return str(self.tokenizer.decode(ids[:-1] if completion.finish_reason == "stop" else ids))


def causal_lm(backend: str, model: ModelConfig, spec: PolicySpec) -> CausalLMPolicy:
    """The policy whose weights an engine gets, not to be trained.

    Raises:
        UserError: no language model.
    """
    policy = policy_of(model, spec)
    if not isinstance(policy, CausalLMPolicy):
        raise UserError(f"rollout.backend={backend}: got model_type {model.model_type!r}, expected causal_lm")
    return policy.eval().requires_grad_(False)
