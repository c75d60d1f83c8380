"""Whether an engine computes what the policy does: asked once, when the first weights are in it."""

from __future__ import annotations

from typing import Final

import torch

from embodied_rl.errors import UserError
from embodied_rl.language.engines.base import GenerationBackend, Sampling
from embodied_rl.models.causal_lm.policy import CausalLMPolicy

_PROMPT_LENGTHS: Final = (3, 5)
_NEW_TOKENS: Final = 8
_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.25}
"""Of a token's log-probability. In bfloat16 two correct programs differ by so much; wrong weights, by far more."""


def check_engine(engine: GenerationBackend, policy: CausalLMPolicy) -> None:
    """Compare the log-probabilities of short greedy completions.

    Args:
        policy: with the weights that the engine should have.

    Raises:
        UserError: they differ.
    """
    prompts = [[(7 * place + length) % engine.vocabulary for place in range(length)] for length in _PROMPT_LENGTHS]
    longest = max(_PROMPT_LENGTHS) + _NEW_TOKENS
    if engine.max_length is not None and engine.max_length < longest:
        prompts = [[0]]
    new_tokens = min(_NEW_TOKENS, (engine.max_length or longest) - len(prompts[-1]))
    sampling = Sampling(n=1, temperature=0.0, max_new_tokens=new_tokens)
    groups = engine.generate(prompts, sampling, [0] * len(prompts), lambda done, of: None)
    worst = 0.0
    for prompt, [completion] in zip(prompts, groups, strict=True):
        response = torch.tensor([completion.token_ids])
        with torch.no_grad():
            evaluation = policy.evaluate(
                {
                    "prompt_ids": torch.tensor([prompt]),
                    "prompt_lengths": torch.tensor([len(prompt)]),
                    "response_ids": response,
                    "response_lengths": torch.tensor([response.shape[1]]),
                },
                temperature=1.0,
            )
        difference = evaluation.logprobs[0, :, 0] - torch.tensor(completion.logprobs)
        worst = max(worst, float(difference.abs().nan_to_num(torch.inf).max()))
    allowed = _TOLERANCE[policy.params.dtype]
    if worst > allowed:
        raise UserError(
            f"the generation engine does not compute what the policy does: with the same weights, log-probabilities of "
            f"the same tokens differ by {worst:.3g}, expected at most {allowed:g} in {policy.params.dtype}; this model "
            "or these rollout.engine_kwargs do not work with this release of the engine; use rollout.backend=hf"
        )
