"""What vLLM gives back, put together to completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embodied_rl.language.engines.base import Completion
from embodied_rl.language.engines.stop_strings import StopStrings


class Answers:
    """The completions of a call, each numbered by its request's id.

    Args:
        engine: vLLM's, which is told to leave a completion that a stop string has ended.
        min_tokens: no stop string ends a completion before it has so many.
    """

    def __init__(self, engine: Any, strings: StopStrings, min_tokens: int) -> None:
        self._engine, self._strings, self._min_tokens = engine, strings, min_tokens
        self._token_ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[float]] = {}
        self.complete: dict[int, Completion] = {}

    def take(self, outputs: Sequence[Any]) -> None:
        """Add what a step of the engine brought: new tokens of each request, or all of them at its end."""
        for output in outputs:
            [answer], number = output.outputs, int(output.request_id)
            token_ids = self._token_ids.setdefault(number, [])
            logprobs = self._logprobs.setdefault(number, [])
            token_ids += answer.token_ids
            logprobs += (answer.logprobs.logprobs[start] for start in answer.logprobs.start_indices)
            by_token = answer.finish_reason == "stop"
            string = None
            if self._strings and not by_token:
                string = self._strings.completed_by_last(token_ids, self._min_tokens)
            if string is not None and not output.finished:
                self._engine.abort_request([output.request_id])
            if output.finished or string is not None:
                self.complete[number] = Completion(
                    token_ids=tuple(token_ids),
                    logprobs=tuple(logprobs),
                    finish_reason="stop" if by_token or string is not None else "length",
                    stop=string,
                )
