"""The fused image encoder of Prismatic models (arXiv:2402.07865): DINOv2 and SigLIP side by side, and the projector.

Modules have the names of the published weights, which are those of timm 0.9 but for ``scale_factor`` (there ``gamma``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-6
"""Of timm's LayerNorms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VitShape:
    """Sizes of a vision transformer."""

    width: int
    depth: int
    num_heads: int
    mlp_width: int
    patch_size: int = 14
    register_tokens: int = 0
    class_token: bool = False
    layer_scale: float | None = None
    """Where the factors behind each residual branch start; None: there are none."""
    attention_pool: bool = False
    """The weights have a pooling head, which these models do not use."""


VIT_SHAPES: Mapping[str, VitShape] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": VitShape(
        width=1024, depth=24, num_heads=16, mlp_width=4096, register_tokens=4, class_token=True, layer_scale=1e-5
    ),
    "vit_so400m_patch14_siglip_224": VitShape(width=1152, depth=27, num_heads=16, mlp_width=4304, attention_pool=True),
    "vit_tiny_test_dinov2": VitShape(
        width=32, depth=3, num_heads=2, mlp_width=64, register_tokens=4, class_token=True, layer_scale=0.5
    ),
    "vit_tiny_test_siglip": VitShape(width=32, depth=3, num_heads=2, mlp_width=64, attention_pool=True),
}
"""``timm_model_ids`` of ``config.json`` -> sizes; the last two are those of the tiny model."""


class VisionTransformer(nn.Module):
    """Images [N,3,H,W] -> patch tokens [N,P,D] of the last block but one, without the final norm.

    What the weights hold and nothing reads (last block, final norm, pooling) is frozen.
    """

    def __init__(self, shape: VitShape, image_size: int) -> None:
        super().__init__()
        width = shape.width
        self.width, self.num_patches = width, (image_size // shape.patch_size) ** 2
        self.num_prefix = shape.register_tokens + shape.class_token
        self.patch_embed = _PatchEmbed(width, shape.patch_size)
        # Positions belong to patches alone.
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.num_patches, width))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if shape.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, shape.register_tokens, width)) if shape.register_tokens else None
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.attn_pool = _AttentionPool(shape) if shape.attention_pool else None
        for unread in self.unread_modules():
            unread.requires_grad_(False)

    def unread_modules(self) -> list[nn.Module]:
        return [part for part in (self.blocks[-1], self.norm, self.attn_pool) if part is not None]

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images) + self.pos_embed
        prefix = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        x = torch.cat([*prefix, x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, self.num_prefix :]


class VisionBackbone(nn.Module):
    """Images normalised for each encoder [N,6,H,W] (first DINOv2's three channels, then SigLIP's) -> [N,P,D1+D2]."""

    def __init__(self, shapes: tuple[VitShape, VitShape], image_size: int) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(shapes[0], image_size)
        self.fused_featurizer = VisionTransformer(shapes[1], image_size)
        self.width = self.featurizer.width + self.fused_featurizer.width
        self.num_patches = self.featurizer.num_patches

    def forward(self, images: Tensor) -> Tensor:
        first, second = images.split(3, 1)
        return torch.cat([self.featurizer(first), self.fused_featurizer(second)], 2)


class Projector(nn.Module):
    """Patch features [N,P,D] -> tokens of the language model [N,P,H]."""

    def __init__(self, vision_width: int, text_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, text_width)
        self.fc3 = nn.Linear(text_width, text_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(functional.gelu(self.fc2(functional.gelu(self.fc1(x)))))


class _PatchEmbed(nn.Module):
    def __init__(self, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(attended.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class _LayerScale(nn.Module):
    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Block(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        width, start = shape.width, shape.layer_scale
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attn = _Attention(width, shape.num_heads)
        self.ls1 = nn.Identity() if start is None else _LayerScale(width, start)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = _Mlp(width, shape.mlp_width)
        self.ls2 = nn.Identity() if start is None else _LayerScale(width, start)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class _AttentionPool(nn.Module):
    """SigLIP's pooling head: in the weights, not in the computation."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        width = shape.width
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.mlp = _Mlp(width, shape.mlp_width)
