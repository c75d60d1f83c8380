"""A tokenizer like Llama's with the same special ids, trained on a few sentences."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors, trainers
from tokenizers.models import BPE

from embodied_rl.models.openvla.prompts import BOS, EOS, PAD, SPACE, prompt_text

_SENTENCES = (
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "pick up the alphabet soup and place it in the basket",
    "open the middle drawer of the cabinet and put the bowl inside",
    "put both the cream cheese box and the butter in the basket",
    "turn on the stove and put the moka pot on it",
    "put the white mug on the left plate and put the yellow and white mug on the right plate",
    "put the yellow and white mug in the microwave and close it",
    "pick up the book and place it in the back compartment of the caddy",
    "push the plate to the front of the stove",
    "put the wine bottle on top of the rack",
    "move the point to the goal in the upper right quadrant",
)
_PIECES = 600
"""Of words that are learned."""
_BYTES = 256


def tiny_tokenizer() -> Tokenizer:
    """Ids as in Llama 2: <unk> 0, <s> 1, </s> 2, the bytes, then pieces of words; "▁" 29871, <PAD> 32000."""
    pieces, merges = _learned()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(_BYTES)]
    names = {0: "<unk>", BOS: "<s>", EOS: "</s>", SPACE: "▁", PAD: "<PAD>"}
    names |= dict(enumerate([*bytes_, *pieces], 3))
    # Without holes, as the format wants it.
    vocabulary = {names.get(index, f"<unused_{index}>"): index for index in range(PAD + 1)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>", "<PAD>")]
    )
    return tokenizer


def _learned() -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces of words but "▁", in the order in which they were learned, and what they were merged from."""
    learner = Tokenizer(BPE())
    texts = [prompt_text(sentence).replace(" ", "▁") for sentence in _SENTENCES]
    learner.train_from_iterator(
        ["▁" + word for text in texts for word in text.split("▁")],
        trainers.BpeTrainer(vocab_size=_PIECES, special_tokens=[], show_progress=False),
    )
    model = json.loads(learner.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    return [piece for piece in pieces if piece != "▁"], [(left, right) for left, right in merges]
