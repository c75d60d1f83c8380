from __future__ import annotations

import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.models.openvla import inputs
from embodied_rl.models.openvla.inputs import PromptTokenizer, prompt_text, trim
from embodied_rl.models.openvla.tiny import tiny_tokenizer
from tests.models.openvla.golden_inputs import WORDS, word_tokenizer


def ids(text: str) -> list[int]:
    return [10 + WORDS.index(word) for word in text.split()]


def test_tokens_by_hand() -> None:
    """BOS, padding, the words, and 29871 at the end. ("drawer?" is no word of the tokenizer.)"""
    rows = PromptTokenizer(word_tokenizer(), 16)(["open the drawer ", "pick it up "])
    words = "In: What action should the robot take to"
    end = ids("? Out:")
    assert rows[0].tolist() == [1, 32000, *ids(f"{words} open the drawer"), *end, 29871]
    assert rows[1].tolist() == [1, 32000, *ids(f"{words} pick it up"), *end, 29871]


def test_trimming_leaves_out_what_is_padding_everywhere() -> None:
    rows = torch.tensor([[1, 32000, 32000, 5, 6], [1, 32000, 7, 8, 9]])
    assert trim(rows).tolist() == [[1, 32000, 5, 6], [1, 7, 8, 9]]


def test_a_long_instruction() -> None:
    with pytest.raises(UserError, match=r"makes a prompt of 14 tokens, expected at most 13; raise .*max_prompt_tokens"):
        PromptTokenizer(word_tokenizer(), 13)(["open the drawer"])


def test_the_empty_word_is_there_once() -> None:
    tokenizer = tiny_tokenizer()
    found = PromptTokenizer(tokenizer, 64).ids("open the drawer")
    assert found[-1] == 29871 and found.count(29871) == 1
    # A text that ends with a space has the empty word of itself.
    assert tokenizer.encode("Out: ").ids[-1] == 29871


def test_the_tiny_tokenizer_keeps_texts_and_ids() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("pick up the book and place it in the back", "zürich 7!?\nOut:"):
        encoded = tokenizer.encode(text)
        assert encoded.ids[0] == 1
        assert tokenizer.decode(encoded.ids) == text
    expected = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 13, "▁": 29871, "<PAD>": 32000}
    assert {name: tokenizer.token_to_id(name) for name in expected} == expected
    assert tokenizer.get_vocab_size() == 32001
    assert len(tokenizer.encode(prompt_text("put the white mug on the left plate")).ids) < 30
    assert tiny_tokenizer().to_str() == tokenizer.to_str()


def test_no_more_prompts_are_remembered_than_a_few_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_REMEMBERED", 2)
    tokenizer = PromptTokenizer(word_tokenizer(), 16)
    first = tokenizer(["open the drawer"])
    for instruction in ("pick it up", "open it", "pick the drawer up"):
        tokenizer([instruction])
        assert len(tokenizer._known) <= 2
    assert torch.equal(tokenizer(["open the drawer"]), first)
