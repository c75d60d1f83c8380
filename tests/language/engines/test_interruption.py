"""New weights in the middle of completions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied_rl.language.engines.base import Completion
from tests.language.engines.test_hf import NEW_TOKENS, PROMPTS, SEEDS, backend, sampling
from tests.models.causal_lm.language import language_policy, language_spec, replay_inputs

SWITCH = 5
"""Tokens that the old weights make."""


def weights(seed: int) -> dict[str, torch.Tensor]:
    state = language_policy(language_spec(NEW_TOKENS)).state_dict()
    torch.manual_seed(seed)
    return {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in state.items()}


def logprobs(state: dict[str, torch.Tensor], completions: list[list[Completion]], temperature: float) -> Any:
    """Of every token under these weights, in one pass."""
    policy = language_policy(language_spec(NEW_TOKENS))
    policy.load_state_dict(state)
    flat = [completion for group in completions for completion in group]
    prompts = [prompt for prompt in PROMPTS for _ in range(len(completions[0]))]
    inputs = replay_inputs(
        prompts, [list(completion.token_ids) for completion in flat], max_prompt=8, max_response=NEW_TOKENS, pad=0
    )
    with torch.no_grad():
        return policy.evaluate(inputs, temperature=temperature).logprobs[..., 0]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_each_token_is_of_the_weights_that_were_there(temperature: float) -> None:
    old, new = weights(1), weights(2)
    engine = backend()
    for name, tensor in old.items():
        engine.weights()[name].copy_(tensor)
    calls: list[int] = []

    def interrupt() -> bool:
        calls.append(1)
        if len(calls) != SWITCH:
            return False
        for name, tensor in new.items():
            engine.weights()[name].copy_(tensor)
        return True

    # No completion ends early, so that the number of calls is the number of tokens.
    options = sampling(temperature=temperature, min_new_tokens=NEW_TOKENS, n=3)
    found = engine.generate(PROMPTS, options, SEEDS, lambda done, of: None, interrupt)
    assert len(calls) == NEW_TOKENS - 1
    expected = [logprobs(state, found, temperature or 1.0) for state in (old, new)]
    for row, completion in enumerate(c for group in found for c in group):
        own = torch.tensor(completion.logprobs)
        assert torch.allclose(own[:SWITCH], expected[0][row, :SWITCH], atol=1e-5)
        assert torch.allclose(own[SWITCH:], expected[1][row, SWITCH:], atol=1e-5)
        assert not torch.allclose(own[SWITCH:], expected[0][row, SWITCH:], atol=1e-2), "the weights are the same"


def test_completions_that_have_ended_stay_as_they_are() -> None:
    engine = backend()
    plain = engine.generate(PROMPTS, sampling(), SEEDS, lambda done, of: None)
    # The same weights again: the tokens are read again, and nothing may come of it.
    again = engine.generate(PROMPTS, sampling(), SEEDS, lambda done, of: None, lambda: True)
    for one, other in zip(plain, again, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        for left, right in zip(one, other, strict=True):
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)
    assert len({len(c.token_ids) for group in plain for c in group}) > 1, "none ended before the others"
