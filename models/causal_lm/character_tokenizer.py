"""A tokenizer with one token a character, behind Hugging Face's interface."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Tokens 0, 1, 2 are padding, end and unknown; then the distinct ``characters`` in their order.

    ``save_pretrained`` works on it, and ``PreTrainedTokenizerFast.from_pretrained`` reads it back; ``AutoTokenizer``
    may take the tokenizer class of a model that is saved beside it.
    """
    tokens = [PAD, EOS, UNKNOWN, *dict.fromkeys(characters)]
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token=UNKNOWN))
    # `.` would drop line ends.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
