"""Choosing tokens: the right frequencies, the right sets, and nothing shared between samples."""

from __future__ import annotations

import pytest
import torch

from embodied_rl.language.engines.sampling import choose, draw_uniforms, prompt_seed

PROBABILITIES = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])


def chosen(uniforms: list[float], *, top_p: float = 1.0, top_k: int | None = None) -> list[int]:
    logprobs = PROBABILITIES.log().expand(len(uniforms), -1)
    return choose(logprobs, torch.tensor(uniforms, dtype=torch.float64), top_p=top_p, top_k=top_k).tolist()


def test_the_distribution_function_is_inverted() -> None:
    assert chosen([0.0, 0.09, 0.11, 0.49, 0.51, 0.79, 0.81, 0.999999]) == [0, 0, 1, 1, 3, 3, 4, 4]


def test_top_k_keeps_the_most_likely_and_their_proportions() -> None:
    assert chosen([0.0, 0.56, 0.58, 0.999999], top_k=2) == [1, 1, 3, 3]  # 4/7 = 0.571
    assert chosen([0.0, 0.5, 0.999999], top_k=1) == [1, 1, 1]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert set(chosen([i / 100 for i in range(100)], top_p=0.39)) == {1}
    assert set(chosen([i / 100 for i in range(100)], top_p=0.41)) == {1, 3}
    assert set(chosen([i / 100 for i in range(100)], top_p=0.71)) == {1, 3, 4}


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_an_impossible_token_is_never_chosen(uniform: float) -> None:
    logprobs = torch.full((1, 50_000), -torch.inf)
    logprobs[0, 1234] = 0.0
    assert choose(logprobs, torch.tensor([uniform], dtype=torch.float64), top_p=1.0, top_k=None).tolist() == [1234]


def test_frequencies() -> None:
    uniforms = draw_uniforms(seed=3, n=20_000, length=1)[:, 0]
    tokens = choose(PROBABILITIES.log().expand(20_000, -1), uniforms, top_p=1.0, top_k=None)
    torch.testing.assert_close(torch.bincount(tokens, minlength=5) / 20_000, PROBABILITIES, atol=0.01, rtol=0)


def test_more_completions_do_not_change_the_first_ones() -> None:
    """Not needed for reproducibility, but a seed decides by rows: prompts never share numbers."""
    assert torch.equal(draw_uniforms(5, 2, 7), draw_uniforms(5, 4, 7)[:2])
    assert not torch.equal(draw_uniforms(5, 2, 7), draw_uniforms(6, 2, 7))


def test_every_place_in_a_run_has_a_seed_of_its_own() -> None:
    seeds = {
        prompt_seed(seed, held_out=held_out, step=step, prompt=prompt)
        for seed in (0, 1)
        for held_out in (False, True)
        for step in range(4)
        for prompt in range(8)
    }
    assert len(seeds) == 2 * 2 * 4 * 8
