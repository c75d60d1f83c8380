"""What small random folders for LIBERO have in common: a tokenizer made here, statistics, cameras."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

CAMERAS = {"image": 256, "image2": 256}
"""As in lerobot's LIBERO data sets: name and size."""
STATE_DIM, ACTION_DIM = 8, 7
SEED = 0
_SENTENCES = (
    "put both the alphabet soup and the tomato sauce in the basket",
    "turn on the stove and put the moka pot on it",
    "put the black bowl in the bottom drawer of the cabinet and close it",
    "put the white mug on the left plate and put the yellow and white mug on the right plate",
    "pick up the book and place it in the back compartment of the caddy",
    "pick up the black bowl next to the ramekin and place it on the plate",
    "open the middle drawer of the cabinet",
    "push the plate to the front of the stove",
)


def tokenizer(start: str | None, end: str, padding: str, others: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-pair encoding, trained on a few instructions.

    Args:
        start: put before every text; None: nothing is.
    """
    special = [token for token in (padding, end, start, *others) if token is not None]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(_SENTENCES, trainer)
    if start is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, inner.token_to_id(start))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=start, eos_token=end, pad_token=padding)


def input_features() -> dict[str, Any]:
    """Of ``config.json``."""
    visual = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, size, size]} for name, size in CAMERAS.items()
    }
    return {**visual, "observation.state": {"type": "STATE", "shape": [STATE_DIM]}}


def output_features() -> dict[str, Any]:
    return {"action": {"type": "ACTION", "shape": [ACTION_DIM]}}


def statistics() -> dict[str, Tensor]:
    """Near those of LIBERO's demonstrations."""
    return {
        "observation.state.mean": torch.tensor([-0.05, 0.03, 0.8, 2.9, -0.6, -0.2, 0.03, -0.03]),
        "observation.state.std": torch.tensor([0.1, 0.15, 0.3, 0.35, 1.2, 0.4, 0.01, 0.01]),
        "action.mean": torch.tensor([0.05, 0.06, -0.06, 0.0, 0.0, -0.01, -0.1]),
        "action.std": torch.tensor([0.3, 0.35, 0.4, 0.04, 0.06, 0.08, 1.0]),
    }
