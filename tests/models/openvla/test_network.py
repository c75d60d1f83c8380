"""The network by itself; that it computes what upstream's does is tested in test_golden.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.models.openvla.network import OpenVlaNetwork, TokenCache, ValueHead
from tests.models.openvla.published import config, layout, weights_of


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return weights_of(layout())


@pytest.fixture(scope="module")
def network(weights: dict[str, Tensor]) -> OpenVlaNetwork:
    with torch.device("meta"):
        network = OpenVlaNetwork(config())
    network.materialize(weights, torch.float32)
    return network.requires_grad_(False)


def test_the_value_head_is_small_beside_the_network() -> None:
    with torch.device("meta"):
        value = ValueHead(4096, 8)
    assert [tuple(p.shape) for p in value.parameters() if p.ndim == 2] == [(512, 4096), (128, 512), (8, 128)]


def test_what_nothing_reads_is_frozen(network: OpenVlaNetwork) -> None:
    with torch.device("meta"):
        fresh = OpenVlaNetwork(config())
    frozen = {name for name, p in fresh.named_parameters() if not p.requires_grad}
    roots = [f"vision_backbone.{name}." for name in ("featurizer", "fused_featurizer")]
    parts = [root + part for root in roots for part in ("blocks.2.", "norm.", "attn_pool.")]
    assert frozen == {name for name in layout() if name.startswith(tuple(parts))}
    units = fresh.blocks()
    assert len(units) == 2 + 2 + 2
    assert all(p.requires_grad for unit in units for p in unit.parameters())


def prompt(length: int, padding: int = 0) -> tuple[Tensor, Tensor]:
    words = torch.arange(length - 1) + 40
    ids = torch.cat([torch.tensor([1]), torch.full((padding,), 32000), words])[None]
    return ids, ids != 32000


def test_logits_of_the_action_tokens(network: OpenVlaNetwork, weights: dict[str, Tensor]) -> None:
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    expected = hidden @ weights["language_model.lm_head.weight"].T
    assert network.first_action_token == 31744
    assert torch.allclose(network.action_logits(hidden), expected[:, 31744:32000], atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_who_sees_whom(network: OpenVlaNetwork, causal: bool) -> None:
    """A later token changes an earlier one's hidden state if and only if attention is bidirectional."""
    images = torch.zeros(1, 1, 6, 28, 28)
    ids, mask = prompt(5)
    tail = torch.zeros(1, 4, 32)
    other = tail.clone()
    other[0, 3] = 1.0
    before, after = (
        network.hidden(*network.sequence(images, ids, mask, None, x), causal=causal)[0, :-1] for x in (tail, other)
    )
    difference = (before - after).abs().amax(-1)
    if causal:
        assert difference.max() == 0
    else:
        assert difference.min() > 1e-4


def test_padding_is_not_seen(network: OpenVlaNetwork) -> None:
    images, tail = torch.zeros(1, 1, 6, 28, 28), torch.zeros(1, 4, 32)
    for causal in (False, True):
        results = [
            network.hidden(*network.sequence(images, *prompt(5, padding), None, tail), causal=causal)[:, -8:]
            for padding in (0, 1, 6)
        ]
        assert torch.allclose(results[0], results[1], atol=1e-5)
        assert torch.allclose(results[0], results[2], atol=1e-5)


def test_the_cache_changes_nothing(network: OpenVlaNetwork) -> None:
    images, tail = torch.zeros(1, 1, 6, 28, 28), torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    whole, mask = network.sequence(images, *prompt(5, padding=2), None, tail)
    expected = network.hidden(whole, mask, causal=True)
    cache = TokenCache(mask.shape[1], mask.device)
    parts = [slice(0, -3), slice(-3, -2), slice(-2, None)]
    got = [network.hidden(whole[:, part], mask, causal=True, cache=cache) for part in parts]
    assert torch.allclose(torch.cat(got, 1)[:, -7:], expected[:, -7:], atol=1e-5)


def test_an_unknown_image_encoder() -> None:
    other = {**config(), "timm_model_ids": ["vit_small_dino", "vit_tiny_test_siglip"]}
    with pytest.raises(UserError, match=r"timm_model_ids 'vit_small_dino', expected some of vit_large.*"):
        OpenVlaNetwork(other)


def test_bfloat16(weights: dict[str, Tensor], tmp_path: Path) -> None:
    with torch.device("meta"):
        network = OpenVlaNetwork(config())
    network.materialize(weights, torch.bfloat16)
    images, tail = torch.zeros(2, 1, 6, 28, 28), torch.zeros(2, 4, 32)
    ids, mask = (x.expand(2, -1) for x in prompt(5))
    hidden = network.hidden(*network.sequence(images.bfloat16(), ids, mask, None, tail), causal=False)
    assert hidden.dtype == torch.bfloat16
    assert network.action_logits(hidden).dtype == torch.float32
