"""The ``hf`` engine: what it reports is what training computes, and prompts do not influence each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from embodied_rl.errors import UserError
from embodied_rl.language.engines.base import Completion, Sampling
from embodied_rl.language.engines.hf import HfBackend
from embodied_rl.models.causal_lm import CausalLMParams, CausalLMPolicy
from tests.configs import small_math
from tests.models.causal_lm.language import SMALL, language_policy, language_spec, replay_inputs

NEW_TOKENS = 16
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17], [20]]
SEEDS = [11, 12, 13, 14]


def backend(max_batch_size: int = 512, **changes: Any) -> HfBackend:
    config = replace(small_math().rollout, max_new_tokens=NEW_TOKENS, max_batch_size=max_batch_size, **changes)
    model = replace(small_math().model, params={"architecture": SMALL})
    engine = HfBackend(model, language_spec(NEW_TOKENS), config, "cpu")
    for name, tensor in language_policy(language_spec(NEW_TOKENS)).state_dict().items():
        engine.weights()[name].copy_(tensor)
    return engine


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"n": 4, "temperature": 0.8, "max_new_tokens": NEW_TOKENS, **changes})


def generate(
    engine: HfBackend, options: Sampling, prompts: Sequence[Sequence[int]] = PROMPTS, seeds: Sequence[int] = SEEDS
) -> list[list[Completion]]:
    return engine.generate(prompts, options, seeds, lambda done, of: None)


@pytest.mark.parametrize("temperature", [0.8, 1.0, 0.0])
def test_logprobs_are_those_of_evaluate(temperature: float) -> None:
    engine = backend()
    groups = generate(engine, sampling(temperature=temperature))
    lengths = {len(completion.token_ids) for group in groups for completion in group}
    assert temperature == 0 or len(lengths) > 1, "a test with one length says little"
    inputs = replay_inputs(
        [prompt for prompt, group in zip(PROMPTS, groups, strict=True) for _ in group],
        [completion.token_ids for group in groups for completion in group],
        max_prompt=9,
        max_response=NEW_TOKENS,
        pad=0,
    )
    policy = language_policy(language_spec(NEW_TOKENS))
    expected = policy.evaluate(inputs, temperature=temperature or 1.0).logprobs[..., 0]
    for row, completion in enumerate(completion for group in groups for completion in group):
        difference = expected[row, : len(completion.token_ids)] - torch.tensor(completion.logprobs)
        assert difference.abs().max() <= 1e-5


def test_greedy_takes_the_most_likely_token_of_the_plain_model() -> None:
    engine = backend()
    [[completion], *_] = generate(engine, sampling(n=1, temperature=0.0))
    policy, text = language_policy(language_spec(NEW_TOKENS)), list(PROMPTS[0])
    for token in completion.token_ids:
        assert token == int(policy.model(input_ids=torch.tensor([text])).logits[0, -1].argmax())
        text.append(token)


def test_prompts_batches_and_their_order_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backend()
    together = generate(engine, sampling())
    assert [len(group) for group in together] == [4] * 4
    for size in (1, 3, 8, 12):
        smaller, rows = backend(size), []
        forward = smaller._forward

        def seen(ids: torch.Tensor, *others: Any, forward: Any = forward, rows: list[int] = rows) -> torch.Tensor:
            rows.append(len(ids))
            return forward(ids, *others)

        monkeypatch.setattr(smaller, "_forward", seen)
        again = generate(smaller, sampling())
        assert max(rows) == size
        assert [[c.token_ids for c in g] for g in again] == [[c.token_ids for c in g] for g in together]
    for prompt, seed, group in reversed(list(zip(PROMPTS, SEEDS, together, strict=True))):
        [alone] = generate(engine, sampling(), [prompt], [seed])
        assert [c.token_ids for c in alone] == [c.token_ids for c in group]
        for one, other in zip(alone, group, strict=True):
            assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5)


def test_completions_of_a_prompt_differ_and_the_seed_decides() -> None:
    engine = backend()
    first, again = generate(engine, sampling()), generate(engine, sampling())
    assert first == again
    assert len({completion.token_ids for completion in first[0]}) > 1
    other = generate(engine, sampling(), seeds=[s + 100 for s in SEEDS])
    assert [c.token_ids for c in first[0]] != [c.token_ids for c in other[0]]


def test_a_completion_ends_with_its_end_token_or_is_cut() -> None:
    engine = backend()
    completions = [c for group in generate(engine, sampling(n=16, temperature=1.5)) for c in group]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        ends = [token in engine.stop_token_ids for token in completion.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (completion.finish_reason == "stop")
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == NEW_TOKENS
        assert len(completion.logprobs) == len(completion.token_ids)


def test_an_end_comes_no_sooner_than_allowed_and_keeps_the_whole_distributions_logprobs() -> None:
    engine = backend()
    options = sampling(n=16, temperature=1.5, min_new_tokens=6)
    completions = [c for group in generate(engine, options) for c in group]
    lengths = [len(c.token_ids) for c in completions if c.finish_reason == "stop"]
    assert lengths
    assert min(lengths) >= 6
    free = [c for group in generate(engine, sampling(n=16, temperature=1.5)) for c in group]
    assert min(len(c.token_ids) for c in free) < 6
    # Where both chose the same first token, the token's log-probability is the same, though the end was forbidden.
    pairs = [(a, b) for a, b in zip(completions, free, strict=True) if a.token_ids[0] == b.token_ids[0]]
    assert pairs
    assert all(abs(a.logprobs[0] - b.logprobs[0]) < 1e-6 for a, b in pairs)


def test_top_k_of_one_is_greedy() -> None:
    engine = backend()
    greedy, narrow = generate(engine, sampling(n=1, temperature=0.0)), generate(engine, sampling(n=1, top_k=1))
    assert [c.token_ids for [c] in greedy] == [c.token_ids for [c] in narrow]
    tiny = generate(engine, sampling(n=1, top_p=1e-6))
    assert [c.token_ids for [c] in greedy] == [c.token_ids for [c] in tiny]


def test_repeated_tokens_are_penalised_as_transformers_does_and_the_recorded_logprobs_are_not() -> None:
    engine, penalty = backend(), 1.8
    groups = generate(engine, sampling(n=1, temperature=0.0, repetition_penalty=penalty))
    assert [c.token_ids for [c] in groups] != [c.token_ids for [c] in generate(engine, sampling(n=1, temperature=0.0))]
    policy, processor = language_policy(language_spec(NEW_TOKENS)), RepetitionPenaltyLogitsProcessor(penalty)
    for prompt, [completion] in zip(PROMPTS, groups, strict=True):
        text = list(prompt)
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            ids = torch.tensor([text])
            logits = policy.model(input_ids=ids).logits[:, -1]
            assert token == int(processor(ids, logits.clone()).argmax())  # type: ignore[arg-type]
            assert abs(float(logits.detach().log_softmax(-1)[0, token]) - logprob) <= 1e-5
            text.append(token)


def test_the_penalty_of_a_prompt_depends_on_no_other_prompt() -> None:
    engine, options = backend(), sampling(temperature=1.5, repetition_penalty=1.8)
    together = generate(engine, options)
    for prompt, seed, group in zip(PROMPTS, SEEDS, together, strict=True):
        [alone] = generate(engine, options, [prompt], [seed])
        assert [c.token_ids for c in alone] == [c.token_ids for c in group]


def test_ids_that_the_tokenizer_does_not_know_are_never_chosen(tmp_path: Path) -> None:
    """Published models have more embeddings than tokens, and any weights there."""
    policy = language_policy(language_spec(NEW_TOKENS))
    known = len(policy.tokenizer)
    policy.model.resize_token_embeddings(known + 60)
    policy.save_pretrained(tmp_path)
    config = replace(small_math().rollout, max_new_tokens=NEW_TOKENS)
    model = replace(small_math().model, path=str(tmp_path), params={})
    engine = HfBackend(model, language_spec(NEW_TOKENS), config, "cpu")
    completions = [c for group in generate(engine, sampling(n=16, temperature=3.0)) for c in group]
    assert max(token for c in completions for token in c.token_ids) < engine.vocabulary == known
    # The distribution that is trained has them, so their probability is missing from the recorded ones.
    inputs = replay_inputs([PROMPTS[0]], [completions[0].token_ids], max_prompt=4, max_response=NEW_TOKENS, pad=0)
    trained = CausalLMPolicy.from_pretrained(str(tmp_path), language_spec(NEW_TOKENS), CausalLMParams())
    expected = trained.evaluate(inputs, temperature=3.0).logprobs[0, : len(completions[0].token_ids), 0]
    assert torch.allclose(expected, torch.tensor(completions[0].logprobs), atol=1e-5)


def test_a_stop_string_ends_a_completion_and_is_no_part_of_its_text() -> None:
    engine = backend()
    free = [c for group in generate(engine, sampling(temperature=1.5)) for c in group]
    options = sampling(temperature=1.5, stop=("7", "3", "z"), min_new_tokens=2)
    completions = [c for group in generate(engine, options) for c in group]
    assert {(c.finish_reason, c.stop is None) for c in completions} >= {("stop", False), ("length", True)}
    for completion, unstopped in zip(completions, free, strict=True):
        text = engine.text(completion)
        assert completion.stop in (None, "7", "3", "z")
        assert not set(text[1:]) & set("73z"), "only the first token may be one of them: it comes too early"
        if completion.stop is not None:
            assert engine.tokenizer.decode(list(completion.token_ids)) == text + completion.stop
            assert len(completion.logprobs) == len(completion.token_ids)
            if unstopped.token_ids[0] == completion.token_ids[0] and len(unstopped.token_ids) >= len(
                completion.token_ids
            ):
                assert unstopped.token_ids[: len(completion.token_ids)] == completion.token_ids


def test_arguments_of_another_engine_are_refused() -> None:
    with pytest.raises(UserError, match=r"rollout.engine_kwargs: got max_model_len, but rollout.backend=hf takes none"):
        backend(engine_kwargs={"max_model_len": 64})


def test_progress_reaches_the_caller() -> None:
    said: list[tuple[int, int]] = []
    backend(8).generate(PROMPTS, sampling(), SEEDS, lambda done, of: said.append((done, of)))
    assert len(said) >= sampling().max_new_tokens - 1, "one a token, however long it takes"
    assert all(0 <= done <= 16 and of == 16 for done, of in said)
    assert said == sorted(said)
