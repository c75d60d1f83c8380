"""``causal_lm``: right log-probabilities, whatever the padding, and Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Categorical
from transformers import AutoTokenizer

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.causal_lm import CausalLMPolicy, character_tokenizer
from embodied_rl.models.registry import build_policy
from tests.models.causal_lm.language import SMALL, language_policy, language_spec, replay_inputs

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]
RESPONSES = [[20, 21, 22], [23, 24, 25, 26, 1], [27]]


def padded(max_prompt: int = 9, pad: int = 0) -> dict[str, torch.Tensor]:
    return replay_inputs(PROMPTS, RESPONSES, max_prompt=max_prompt, max_response=8, pad=pad)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_logprobs_and_entropies_are_those_of_the_plain_model(family: str) -> None:
    policy = language_policy(family=family)
    found = policy.evaluate(padded(), temperature=0.7)
    assert found.logprobs.shape == found.entropy.shape == (3, 8, 1)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = Categorical(logits=logits / 0.7)
        n = len(response)
        torch.testing.assert_close(found.logprobs[row, :n, 0], expected.log_prob(torch.tensor(response)))
        torch.testing.assert_close(found.entropy[row, :n, 0], expected.entropy())
        assert not found.logprobs[row, 5:].any(), "columns that are padding in all samples are not computed"


@pytest.mark.parametrize("values_per_chunk", [1, 8])
@pytest.mark.parametrize("pad", [0, 20])
def test_padding_changes_nothing(values_per_chunk: int, pad: int) -> None:
    """Neither its amount nor its token, which may be one of the text's."""
    policy = language_policy(language_spec(values_per_chunk=values_per_chunk))
    together = policy.evaluate(padded(pad=pad), temperature=1.0)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        single = replay_inputs([prompt], [response], max_prompt=len(prompt), max_response=8, pad=0)
        alone = policy.evaluate(single, temperature=1.0)
        n = len(response)
        assert (together.logprobs[row, :n] - alone.logprobs[0, :n]).abs().max() <= 1e-6
        assert (together.entropy[row, :n] - alone.entropy[0, :n]).abs().max() <= 2e-6
        assert together.values is not None
        assert alone.values is not None
        m = min(n, values_per_chunk)
        assert together.values.shape == (3, values_per_chunk)
        assert (together.values[row, :m] - alone.values[0, :m]).abs().max() <= 2e-6


def test_padding_columns_are_not_computed() -> None:
    policy = language_policy()
    shapes: list[tuple[int, ...]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    policy.model.register_forward_pre_hook(note, with_kwargs=True)
    policy.evaluate(padded(max_prompt=30), temperature=1.0)
    assert shapes == [(3, 6 + 5)]


def test_a_value_is_that_of_the_state_before_the_token() -> None:
    """The value of a state cannot depend on the tokens that are chosen in it."""
    policy = language_policy(language_spec(values_per_chunk=8))
    other = [[*response[:-1], 30] for response in RESPONSES]
    before = policy.evaluate(padded(), temperature=1.0).values
    after = policy.evaluate(replay_inputs(PROMPTS, other, max_prompt=9, max_response=8, pad=0), temperature=1.0).values
    assert before is not None
    assert after is not None
    for row, response in enumerate(RESPONSES):
        torch.testing.assert_close(before[row, : len(response)], after[row, : len(response)])
    chunk = language_policy(language_spec(values_per_chunk=1)).evaluate(padded(), temperature=1.0).values
    assert chunk is not None
    torch.testing.assert_close(chunk[:, 0], before[:, 0])


def test_a_fresh_value_head_says_zero() -> None:
    policy = build_policy("causal_lm", language_spec(values_per_chunk=1), {"architecture": SMALL})
    values = policy.evaluate(padded(), temperature=1.0).values
    assert values is not None
    assert not values.any()
    assert {id(p) for p in policy.value_parameters()} == {
        id(p) for name, p in policy.named_parameters() if name.startswith("value_head")
    }
    assert len(policy.value_parameters()) == 2


def test_the_distribution_is_that_of_the_logprobs() -> None:
    policy = language_policy()
    inputs = padded()
    found = policy.evaluate(inputs, temperature=0.5, with_distribution=True)
    assert found.distribution is not None
    assert policy.distribution_type is Categorical
    logprobs = Categorical(logits=found.distribution["logits"]).log_prob(inputs["response_ids"][..., None])
    for row, response in enumerate(RESPONSES):
        torch.testing.assert_close(logprobs[row, : len(response)], found.logprobs[row, : len(response)])


def test_gradients_reach_every_weight() -> None:
    policy = language_policy(language_spec(values_per_chunk=1))
    found = policy(padded(), temperature=1.0)
    (found.logprobs.sum() + found.values.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.parameters())


def test_a_folder_gives_the_same_model_and_tokenizer(tmp_path: Path) -> None:
    policy = language_policy()
    policy.save_pretrained(tmp_path)
    loaded = build_policy("causal_lm", language_spec(), {}, str(tmp_path)).eval()
    assert isinstance(loaded, CausalLMPolicy)
    torch.testing.assert_close(
        loaded.evaluate(padded(), temperature=1.0).logprobs, policy.evaluate(padded(), temperature=1.0).logprobs
    )
    for text in ("12+3=", "1 2\n+ 3"):
        assert loaded.tokenizer(text).input_ids == policy.tokenizer(text).input_ids
        assert loaded.tokenizer.decode(loaded.tokenizer(text).input_ids) == text
    assert loaded.stop_token_ids == policy.stop_token_ids == {1}
    assert loaded.max_length == 64
    assert len(loaded.shard_units()) == 2


def test_the_character_tokenizer_keeps_every_character(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("ab\n =b")
    assert tokenizer("ba =\n").input_ids == [4, 3, 6, 7, 5]
    assert tokenizer.decode([4, 3, 6, 7, 5]) == "ba =\n"
    assert tokenizer("c").input_ids == [tokenizer.unk_token_id]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("ba =\n").input_ids == [4, 3, 6, 7, 5]
    assert again.decode([4, 3, 6, 7, 5]) == "ba =\n"
    assert (again.pad_token_id, again.eos_token_id) == (0, 1)


def test_a_folder_holds_the_value_head(tmp_path: Path) -> None:
    policy = language_policy(language_spec(values_per_chunk=1))
    assert policy.value_head is not None
    torch.nn.init.normal_(policy.value_head.weight)
    policy.save_pretrained(tmp_path)
    loaded = build_policy("causal_lm", language_spec(values_per_chunk=1), {}, str(tmp_path)).eval()
    torch.testing.assert_close(loaded(padded(), temperature=1.0).values, policy(padded(), temperature=1.0).values)
    assert build_policy("causal_lm", language_spec(), {}, str(tmp_path)).value_parameters() == []


@pytest.mark.parametrize(
    ("params", "path", "message"),
    [
        ({}, None, "got neither path nor params.architecture"),
        ({}, "/nowhere", "model.path=/nowhere: not a causal language model's folder"),
        ({"architecture": {"type": "gpt"}}, None, "model.params.architecture.type: got 'gpt'"),
        ({"architecture": {"type": "llama", "hidden": 3}}, None, "model.params.architecture.hidden: no such key"),
    ],
)
def test_a_model_that_cannot_be_is_one_message(
    params: dict[str, Any], path: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((UserError, ConfigError)) as refused:
        build_policy("causal_lm", language_spec(), params, path)
    assert message in str(refused.value)


def test_an_architecture_beside_a_folder_must_be_its_own(tmp_path: Path) -> None:
    language_policy().save_pretrained(tmp_path)
    build_policy("causal_lm", language_spec(), {"architecture": SMALL}, str(tmp_path))
    for other, message in (
        ({**SMALL, "hidden_size": 64}, "hidden_size is 32, expected 64."),
        (
            {**SMALL, "type": "llama", "num_layers": 3},
            "model_type is 'qwen2', expected 'llama'; num_hidden_layers is 2",
        ),
        ({**SMALL, "characters": "01"}, "its tokens are not those of characters"),
    ):
        with pytest.raises(UserError) as refused:
            build_policy("causal_lm", language_spec(), {"architecture": other}, str(tmp_path))
        assert message in str(refused.value)
        assert "Set model.params.architecture=null to take the folder's" in str(refused.value)


def test_it_does_not_act_in_envs() -> None:
    spec = PolicySpec(action_dim=2, num_action_chunks=4, state_dim=3, image_shapes={}, values_per_chunk=0)
    with pytest.raises(UserError, match="use task=math"):
        build_policy("causal_lm", spec, {"architecture": SMALL})
