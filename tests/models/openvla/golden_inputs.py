"""What upstream's code and ours are both run on: weights, pictures, states, texts.

``scripts/golden/*.py`` read this file in upstream's environments, so it needs numpy and tokenizers alone. Numbers
come from the counter-based generator Philox (Salmon et al. 2011), whose raw words numpy promises not to change.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = (
    *("In:", "What", "action", "should", "the", "robot", "take", "to", "Out:", "open", "close", "pick", "up", "put"),
    *("drawer", "bowl", "red", "blue", "on", "plate", "and", "place", "it", "in", "basket", "?"),
)
INSTRUCTIONS = ("Open the drawer", "put the RED bowl on the blue plate ", "pick it up and place it in the basket")
ACTION: dict[str, Any] = {
    "q01": [-0.5, -1.0, -0.25, -0.1, -0.2, -0.3, 0.0],
    "q99": [0.5, 0.5, 0.75, 0.1, 0.2, 0.3, 1.0],
    "mask": [True] * 6 + [False],
    # As in published statistics; LIBERO's policies do not use them.
    "min": [-0.9] * 6 + [0.0],
    "max": [0.9] * 6 + [1.0],
}
PROPRIO = {"q01": [-1.0] * 8, "q99": [1.0, 3.0] + [1.0] * 6, "min": [-4.0] * 8, "max": [5.0] * 8}
STATISTICS = {"libero_10_no_noops": {"action": ACTION, "proprio": PROPRIO}}
MEANS, STDS = ((0.5, 0.4, 0.3), (0.5, 0.5, 0.5)), ((0.2, 0.3, 0.4), (0.5, 0.5, 0.5))
IMAGE = 28
"""Side of the images that the small network sees."""
CAMERAS = {"agentview": (40, 40), "wrist": (IMAGE, IMAGE)}
"""One that has to be resized, and one that is cut alone."""
RESIZED = {
    "square": (64, 64, 56),
    "oblong": (50, 70, 56),
    "smaller": (40, 40, 56),
    "same": (56, 56, 56),
    "libero": (256, 256, 224),
}
"""Height, width and new side of a picture."""
LEROBOT = {"image": (40, 32), "image2": (96, 80)}
"""SmolVLA's cameras: one to enlarge, one to shrink, both to fill up to a square."""
_FIRST_ACTION, _END_OF_ACTIONS = 31744, 32000


def uniform(name: str, shape: tuple[int, ...], scale: float = 1.0) -> NDArray[np.float32]:
    """In [-scale, scale), determined by ``name``."""
    words = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return ((words >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0).reshape(shape).astype(np.float32) * scale


def weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Of a tensor with this name: large enough that every one matters."""
    if len(shape) == 2 and "embed" not in name:
        values = uniform(name, shape, 1.5 / math.sqrt(shape[-1]))
    else:
        values = uniform(name, shape, 0.5)
    if name.endswith("lm_head.weight"):
        # Upstream takes the best of all words; the best is to be an action.
        values[:_FIRST_ACTION] *= 0.01
        values[_END_OF_ACTIONS:] *= 0.01
    return values + np.float32(1.0) if "norm" in name and name.endswith("weight") else values


def picture(name: str, height: int, width: int) -> NDArray[np.uint8]:
    """[H,W,3]: blocks of colour with sharp edges, a ramp, some noise; whole numbers throughout."""
    blocks = uniform(f"{name} blocks", (-(-height // 8), -(-width // 8), 3), 100.0).astype(np.int64)
    coarse = np.kron(blocks, np.ones((8, 8, 1), dtype=np.int64))[:height, :width]
    ramp = np.arange(width)[:, None] * 60 // width - np.arange(height)[:, None, None] * 60 // height
    noise = uniform(f"{name} noise", (height, width, 3), 8.0).astype(np.int64)
    return np.clip(128 + coarse + ramp + noise, 0, 255).astype(np.uint8)


def images(row: int) -> dict[str, NDArray[np.uint8]]:
    """Of one observation: camera -> [H,W,3]."""
    return {camera: picture(f"{camera} {row}", *size) for camera, size in CAMERAS.items()}


def simulated(row: int) -> dict[str, NDArray[Any]]:
    """An observation as LIBERO has it: pictures upside down, the hand's turn as a quaternion x, y, z, w."""
    found = images(row)
    turn = uniform(f"turn {row}", (4,)).astype(np.float64)
    return {
        "agentview_image": found["agentview"][::-1, ::-1],
        "robot0_eye_in_hand_image": found["wrist"][::-1, ::-1],
        "robot0_eef_pos": uniform(f"place {row}", (3,), 1.4).astype(np.float64),
        "robot0_eef_quat": turn / np.linalg.norm(turn),
        "robot0_gripper_qpos": uniform(f"fingers {row}", (2,), 1.4).astype(np.float64),
    }


def state(row: int) -> NDArray[np.float32]:
    """[8], some of it beyond the statistics' bounds."""
    return uniform(f"state {row}", (8,), 1.4)


def noise(row: int, horizon: int, dim: int) -> NDArray[np.float32]:
    """[horizon,dim] that SmolVLA starts from."""
    return uniform(f"noise {row}", (horizon, dim), 1.7)


def actions() -> NDArray[np.float64]:
    """Normalised ones: the edges of the 256 bins, what lies just beside and between them, and more than 1."""
    edges = np.linspace(-1.0, 1.0, 256)
    return np.concatenate([edges, edges - 1e-9, edges + 1e-9, edges + 1 / 255, [-1.5, 1.5, 0.0]])


def tokens() -> NDArray[np.int64]:
    """All action tokens, and some beside them."""
    return np.arange(_FIRST_ACTION - 9, _END_OF_ACTIONS + 1)


def normalized_actions() -> NDArray[np.float64]:
    """[16,7] in [-1, 1], grippers in [0, 1]; one gripper is exactly between open and closed."""
    found = uniform("actions", (16, 7)).astype(np.float64)
    found[:, 6] = np.abs(found[:, 6])
    found[0, 6] = 0.5
    return found


def word_tokenizer() -> Tokenizer:
    """A token a word, with the special ids of Llama's."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 10 + index for index, word in enumerate(WORDS)}
    vocabulary |= {f"<{index}>": index for index in range(32001) if index not in set(vocabulary.values())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer
