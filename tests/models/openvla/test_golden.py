"""Against what upstream's own code gave: ``golden/*``, written by ``scripts/golden/openvla.py``.

Whole numbers and texts are equal. Floating-point numbers differ by rounding alone: upstream's of float64 to ours of
float32 (1e-6 of numbers up to 1), and sums of float32 that other kernels add in another order (1e-4 of hidden states of
a size of about 1 behind two layers).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.models.openvla.actions import ActionCodec, bins_of
from embodied_rl.models.openvla.inputs import ImageProfile, PromptTokenizer, jpeg_round_trip, normalize, prompt_text
from embodied_rl.models.openvla.network import L1ActionHead, Mlp, OpenVlaNetwork
from embodied_rl.models.openvla.oft import OpenVlaOftPolicy
from embodied_rl.models.openvla.policy import OpenVlaPolicy
from embodied_rl.models.registry import build_policy
from tests.models.openvla import golden_inputs as given
from tests.models.openvla.published import config, facts, spec, tensors, write_checkpoint

ROUNDED = 1e-6
SUMMED = 1e-4
CODEC = ActionCodec(given.STATISTICS["libero_10_no_noops"], 32000)
OPENVLA, OFT = tensors("openvla"), tensors("openvla_oft")
ROWS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_checkpoint(directory, l1=True)
    return directory


def test_the_sources_are_named() -> None:
    commits = {source["repository"]: source["commit"] for v in ("openvla", "openvla_oft") for source in sources(v)}
    assert {repository: commit[:8] for repository, commit in commits.items()} == {
        "openvla/openvla": "c8f03f48",
        "moojink/openvla-oft": "213c5ff8",
        "moojink/transformers-openvla-oft": "bc339d9a",
    }


def sources(variant: str) -> list[dict[str, str]]:
    return facts(variant)["made"]["sources"]


# --- Names and shapes.


def test_the_full_size_is_the_published_one() -> None:
    with torch.device("meta"):
        state = OpenVlaNetwork(config(full=True)).state_dict()
    assert folded(state) == facts("openvla")["layout"]["full"]
    assert len(state) == 982
    assert sum(tensor.numel() for tensor in state.values()) == 7_541_237_184


def test_the_heads_are_the_published_ones() -> None:
    with torch.device("meta"):
        heads = {"action_head": L1ActionHead(4096, 7), "proprio_projector": Mlp(8, 4096, 4096)}
    found = {name: {k: list(t.shape) for k, t in head.state_dict().items()} for name, head in heads.items()}
    assert found == facts("openvla_oft")["layout"]["full"]


def folded(state: dict[str, Tensor]) -> dict[str, list[object]]:
    """Name, with ``*`` for a number -> [how many, shape]."""
    lines: dict[str, list[object]] = {}
    for name, tensor in state.items():
        key = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        count = lines.get(key, [0])[0]
        assert isinstance(count, int)
        lines[key] = [count + 1, list(tensor.shape)]
    return lines


# --- Before the network.


def test_prompts() -> None:
    found = facts("openvla")
    assert [prompt_text(instruction) for instruction in given.INSTRUCTIONS] == found["prompts"]
    tokenize = PromptTokenizer(given.word_tokenizer(), 64)
    assert [tokenize.ids(instruction) for instruction in given.INSTRUCTIONS] == found["token_ids"]


@pytest.mark.parametrize("name", given.RESIZED)
@pytest.mark.parametrize("crop", [False, True], ids=["whole", "cropped"])
def test_pictures(name: str, crop: bool) -> None:
    """JPEG and crop are exact; a filter's sum of float32 may fall on the other side of a half: one level then."""
    height, width, side = given.RESIZED[name]
    got = prepare(given.picture(name, height, width), side, crop)
    expected = OFT[f"{'prepared' if crop else 'resized'}.{name}"]
    if not crop:
        assert torch.equal(expected, OPENVLA[f"resized.{name}"])  # both repositories do the same
    check_pictures(got, expected)


def check_pictures(got: Tensor, expected: Tensor) -> None:
    error = (got.int() - expected.int()).abs()
    assert error.max() <= 1
    assert (error > 0).float().mean() < 1e-3


def test_the_jpeg_is_exact() -> None:
    """Where the size stays, nothing but JPEG is done."""
    picture = given.picture("same", 56, 56)
    assert torch.equal(jpeg_round_trip(torch.from_numpy(picture)[None])[0], OFT["resized.same"])
    assert torch.equal(prepare(picture, 56, True), OFT["prepared.same"])


def test_the_crop_is_exact() -> None:
    picture = torch.from_numpy(given.picture("cropped", 224, 224))
    profile = ImageProfile(size=224, jpeg=False, resize="lanczos3", center_crop=True)
    assert torch.equal(sampled(profile(picture[None])[0]), OPENVLA["cropped"])


def prepare(picture: object, side: int, crop: bool) -> Tensor:
    profile = ImageProfile(size=side, jpeg=True, resize="lanczos3", center_crop=crop)
    return sampled(profile(torch.as_tensor(picture)[None])[0])


def sampled(picture: Tensor) -> Tensor:
    """As the script stores large pictures."""
    return picture if len(picture) < 200 else picture[::7, ::7]


def test_pixels_of_both_encoders() -> None:
    picture = torch.from_numpy(given.images(0)["wrist"])
    got = normalize(picture, torch.tensor(given.MEANS), torch.tensor(given.STDS))
    assert torch.allclose(got, OPENVLA["pixel_values"], rtol=0, atol=ROUNDED)


def test_proprioception() -> None:
    states = torch.stack([torch.from_numpy(given.state(row)) for row in range(4)])
    assert torch.allclose(CODEC.normalize_state(states).double(), OFT["proprio"], rtol=0, atol=ROUNDED)


# --- After the network.


def test_bins() -> None:
    assert bins_of(torch.from_numpy(given.actions())).tolist() == facts("openvla")["bins"]


def test_decoded_tokens() -> None:
    got = CODEC.normalized(torch.from_numpy(given.tokens()))
    assert torch.allclose(got.double(), OPENVLA["decoded_tokens"], rtol=0, atol=ROUNDED)


def test_actions_for_the_env() -> None:
    """Scaled back by mask, the gripper made -1 or 1 and turned."""
    got = CODEC.to_env(torch.from_numpy(given.normalized_actions())).double()
    assert torch.allclose(got, OFT["executed"], rtol=0, atol=ROUNDED)
    assert torch.allclose(got[:, :6], OFT["unnormalized"][:, :6], rtol=0, atol=ROUNDED)


# --- The network and all around it.


def observation(states: Tensor | None = None) -> EnvObs:
    found = [given.images(row) for row in ROWS]
    return EnvObs(
        env_ids=torch.arange(len(ROWS)),
        images={
            camera: torch.stack([torch.from_numpy(images[camera]) for images in found]) for camera in given.CAMERAS
        },
        state=torch.zeros(len(ROWS), 8) if states is None else states.float(),
        instructions=given.INSTRUCTIONS[: len(ROWS)],
    )


def test_openvla(folder: Path) -> None:
    """Its 7 tokens one after another; two prompts of different length in one batch of ours, alone in upstream's."""
    params = {"camera": "wrist", "jpeg": False, "center_crop": False}
    policy = build_policy("openvla", spec(chunks=1, values=0), params, str(folder))
    assert isinstance(policy, OpenVlaPolicy)
    decided = policy.act(observation(), greedy=True, temperature=1.6, generator=None)
    assert decided.tokens is not None
    logits = OPENVLA["logits"]
    assert torch.equal(decided.tokens[:, 0], 31744 + logits.argmax(-1))
    expected = (logits / 1.6).log_softmax(-1)
    assert torch.allclose(decided.logprobs[:, 0], expected.amax(-1), rtol=0, atol=SUMMED)
    again = policy(decided.replay_inputs, temperature=1.6, with_distribution=True)
    assert again.distribution is not None
    assert torch.allclose(again.distribution["logits"][:, 0], expected, rtol=0, atol=SUMMED)
    assert torch.allclose(decided.actions[:, 0].double(), OPENVLA["executed"], rtol=0, atol=ROUNDED)


@pytest.mark.parametrize("cameras", [1, 2])
@pytest.mark.parametrize("head", ["discrete", "l1"])
def test_openvla_oft(folder: Path, cameras: int, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From LIBERO's pictures and state to the chunk of 8 that it executes."""
    names = ["agentview", "wrist"][:cameras]
    params = {"cameras": names, "action_head": head, "use_proprio": head == "l1"}
    policy = build_policy("openvla_oft", spec(chunks=8, values=0), params, str(folder))
    assert isinstance(policy, OpenVlaOftPolicy)
    inputs = policy._inputs(observation(OFT["states"]))
    images = OFT["images"][:, :cameras]
    check_pictures(inputs["images"], images)
    monkeypatch.setattr(policy, "_inputs", lambda _: {**inputs, "images": images})
    decided = policy.act(observation(OFT["states"]), greedy=True, temperature=1.0, generator=None)
    with torch.no_grad():
        hidden = policy._states(decided.replay_inputs).flatten(1, 2)
    assert torch.allclose(hidden, OFT[f"{head}_{cameras}.hidden"], rtol=0, atol=SUMMED)
    executed = OFT[f"{head}_{cameras}.executed"].clamp(-1.0, 1.0)  # upstream leaves that to the simulator
    tolerance = ROUNDED if head == "discrete" else SUMMED
    assert torch.allclose(decided.actions.double(), executed, rtol=0, atol=tolerance)
