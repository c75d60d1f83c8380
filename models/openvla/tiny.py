"""A folder in the published layout that a CPU can train: the same names, files and special tokens, small sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors, trainers
from tokenizers.models import BPE

from embodied_rl.files import write_json
from embodied_rl.models.openvla.files import (
    CONFIG_FILE,
    PROCESSOR_FILE,
    TOKENIZER_FILE,
    read_folder,
    write_folder,
)
from embodied_rl.models.openvla.inputs import BOS, EOS, PAD, SPACE, prompt_text
from embodied_rl.models.openvla.network import L1ActionHead, Mlp, OpenVlaNetwork

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
IMAGE_SIZE = 56
HIDDEN_SIZE = 64
_SEED = 0
_MEANS = ((0.484375, 0.455078125, 0.40625), (0.5, 0.5, 0.5))
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
"""Size of the learned vocabulary."""
_BYTES = 256
_STDS = ((0.228515625, 0.2236328125, 0.224609375), (0.5, 0.5, 0.5))


def write_tiny(directory: Path, *, with_l1_head: bool) -> None:
    """Write it, with random weights that are the same each time.

    Args:
        with_l1_head: OpenVLA-OFT's ``action_head`` and ``proprio_projector``, for LIBERO's actions and states, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_companions(directory)
    folder = read_folder(directory)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        network = OpenVlaNetwork(folder.config)
        heads = {
            "action_head": L1ActionHead(HIDDEN_SIZE, action_dim=7),
            "proprio_projector": Mlp(8, HIDDEN_SIZE, HIDDEN_SIZE),
        }
    parts = {name: head.state_dict() for name, head in heads.items()} if with_l1_head else {}
    write_folder(directory, folder, network.state_dict(), parts)


def _write_companions(directory: Path) -> None:
    write_json(directory / CONFIG_FILE, _config())
    write_json(
        directory / PROCESSOR_FILE,
        {
            "image_processor_type": "PrismaticImageProcessor",
            "processor_class": "PrismaticProcessor",
            "image_resize_strategy": "resize-naive",
            "input_sizes": [[3, IMAGE_SIZE, IMAGE_SIZE]] * 2,
            "interpolations": ["bicubic", "bicubic"],
            "means": _MEANS,
            "stds": _STDS,
            "use_fused_vision_backbone": True,
        },
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<PAD>"}
    (directory / TOKENIZER_FILE).write_text(tiny_tokenizer().to_str())
    write_json(directory / "special_tokens_map.json", tokens)
    write_json(directory / "added_tokens.json", {"<PAD>": 32000})
    write_json(
        directory / "tokenizer_config.json",
        {
            **tokens,
            "tokenizer_class": "LlamaTokenizer",
            "processor_class": "PrismaticProcessor",
            "add_bos_token": True,
            "add_eos_token": False,
            "model_max_length": 2048,
            "padding_side": "right",
        },
    )


def _config() -> dict[str, Any]:
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [IMAGE_SIZE, IMAGE_SIZE],
        "llm_max_length": 2048,
        "n_action_bins": 256,
        "norm_stats": {
            **{f"{suite}_no_noops": _libero() for suite in SUITES},
            "bridge_orig": _bridge(),
            "dummy": _point(),
        },
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "pad_token_id": 32000,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "timm_model_ids": ["vit_tiny_test_dinov2", "vit_tiny_test_siglip"],
        "timm_override_act_layers": [None, None],
        "torch_dtype": "float32",
        "use_fused_vision_backbone": True,
    }


def _libero() -> dict[str, Any]:
    """Statistics like those of LIBERO's demonstrations."""
    moves = [0.75, 0.75, 0.9375, 0.11, 0.16, 0.2]
    low, high = [-0.23, -0.29, 0.45, 2.2, -0.8, -0.5, 0.001, -0.04], [0.13, 0.33, 1.3, 3.7, 0.9, 0.5, 0.04, -0.001]
    return {
        "action": {
            "q01": [*(-move for move in moves), 0.0],
            "q99": [*moves, 1.0],
            "mask": [True] * 6 + [False],
        },
        "proprio": {"q01": low, "q99": high},
    }


def _bridge() -> dict[str, Any]:
    """Statistics like those of BridgeData V2: metres and radians in a fifth of a second."""
    moves = [0.03, 0.04, 0.04, 0.08, 0.09, 0.2]
    return {"action": {"q01": [*(-move for move in moves), 0.0], "q99": [*moves, 1.0], "mask": [True] * 6 + [False]}}


def _point() -> dict[str, Any]:
    """Statistics of the dummy env: a point moves in a square."""
    return {"action": {"q01": [-1.0] * 2, "q99": [1.0] * 2}, "proprio": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}


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
