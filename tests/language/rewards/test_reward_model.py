"""A sequence classifier as the reward: its logit by hand, in batches of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.language.rewards.scoring import Item, Scorer
from embodied_rl.models.causal_lm import character_tokenizer
from embodied_rl.models.flow.lerobot_folder import tiny_tokenizer
from tests.configs import small_math
from tests.language.rewards.test_scoring import config

CHARACTERS = "0123456789+= "
TEXTS = [("1+1=", "2"), ("12+30=", "42 and more"), ("7+8=", ""), ("1+1=", "3")]


def small(**options: Any) -> LlamaConfig:
    tokenizer: Any = character_tokenizer(CHARACTERS + "abcdefghijklmnopqrstuvwxyz")
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForSequenceClassification(small(num_labels=1)).save_pretrained(tmp_path)
    character_tokenizer(CHARACTERS + "abcdefghijklmnopqrstuvwxyz").save_pretrained(tmp_path)
    return tmp_path


def scores(path: Path, texts: list[tuple[str, str]] = TEXTS, **options: Any) -> list[float | None]:
    scorer = Scorer(config("reward_model", {"path": str(path), **options}))
    return scorer.score([Item(prompt=prompt, completion=completion, answer="") for prompt, completion in texts])


def by_hand(path: Path, text: str) -> float:
    """One text alone: the head on the state of its last token."""
    network: Any = LlamaForSequenceClassification.from_pretrained(path)
    tokenizer = character_tokenizer(CHARACTERS + "abcdefghijklmnopqrstuvwxyz")
    ids = torch.tensor([tokenizer(text).input_ids])
    with torch.no_grad():
        return float(network.model(ids).last_hidden_state[0, -1] @ network.score.weight[0])


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_score_is_the_classifiers(model: Path, batch_size: int) -> None:
    expected = [by_hand(model, prompt + completion) for prompt, completion in TEXTS]
    assert len({round(value, 4) for value in expected}) == 4
    assert scores(model, batch_size=batch_size) == pytest.approx(expected, abs=1e-5)


def test_a_conversation_begins_once(tmp_path: Path) -> None:
    """Its template writes the token that the tokenizer puts before a plain text."""
    tokenizer: Any = tiny_tokenizer("<bos>", "<eos>", "<pad>")
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_labels": 1}
    sizes |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_attention_heads": 2}
    settings = LlamaConfig(**sizes)
    network: Any = LlamaForSequenceClassification(settings).eval()
    for part in (network, tokenizer):
        part.save_pretrained(tmp_path)
    ids = tokenizer("put it there").input_ids
    assert ids.count(tokenizer.bos_token_id) == 1 == ids.index(tokenizer.bos_token_id) + 1
    with torch.no_grad():
        expected = float(network.model(torch.tensor([ids])).last_hidden_state[0, -1] @ network.score.weight[0])
    texts = [("<bos>put it ", "there"), ("put it ", "there")]
    assert scores(tmp_path, texts) == pytest.approx([expected, expected], abs=1e-5)


def test_a_long_text_loses_its_beginning(model: Path) -> None:
    text = "1234567890" * 4
    assert scores(model, [("", text)]) == pytest.approx([by_hand(model, text[-32:])], abs=1e-5)
    assert scores(model, [("", text)], max_length=5) == pytest.approx([by_hand(model, text[-5:])], abs=1e-5)


def test_it_may_be_a_part_of_a_sum(model: Path) -> None:
    parts = [
        {"function": "last_number", "weight": 2.0},
        {"function": "reward_model", "weight": 0.5, "params": {"path": str(model)}},
    ]
    scorer = Scorer(config("weighted", {"functions": parts}))
    items = [Item(prompt="1+1=", completion="2", answer=answer) for answer in ("2", "3", "none")]
    alone = by_hand(model, "1+1=2")
    assert scorer.score(items) == [pytest.approx(2 + alone / 2, abs=1e-5), pytest.approx(alone / 2, abs=1e-5), None]


def test_models_that_are_none_are_one_message(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match=r"reward.params.path=.*no: no sequence classifier"):
        scores(tmp_path / "no")
    language = tmp_path / "language"
    LlamaForCausalLM(small()).save_pretrained(language)
    character_tokenizer(CHARACTERS).save_pretrained(language)
    with pytest.raises(UserError, match=r"no trained reward model with one label: .*: score.weight is missing"):
        scores(language)
    three = tmp_path / "three"
    LlamaForSequenceClassification(small(num_labels=3)).save_pretrained(three)
    character_tokenizer(CHARACTERS).save_pretrained(three)
    with pytest.raises(UserError, match="with one label"):
        scores(three)
    with pytest.raises(ConfigError, match=r"reward.params.pth: no such key. Did you mean 'reward.params.path'"):
        scores(model, pth="x")
    with pytest.raises(ConfigError, match=r"a reward model works in the worker itself"):
        small_math("reward.function=reward_model", f"reward.params.path={model}", "reward.num_processes=2")
