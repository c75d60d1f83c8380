"""The network with the published names: image encoders, projector and Llama 2 (982 tensors, 7.5 billion parameters).

The fused image encoder is that of Prismatic models (arXiv:2402.07865): DINOv2 and SigLIP side by side, with the names
of timm 0.9 but for ``scale_factor`` (there ``gamma``). Fine-tuning adds OpenVLA-OFT's L1 head and proprioception, named
as in the published ``action_head--*`` and ``proprio_projector--*`` files, and RL a value head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from embodied_rl.errors import UserError, suggestion
from embodied_rl.models.attention import attention_mask
from embodied_rl.models.weights.stored import assign

NUM_ACTION_TOKENS = 256
RESIDUAL_BLOCKS = 2
"""Residual blocks of the L1 head."""
EPS = 1e-6
"""Epsilon of timm's LayerNorms."""


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
    """Initial value of the factors behind each residual branch; None: there are none."""
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


class OpenVlaNetwork(nn.Module):
    """``BOS | patches of each image | extra tokens | rest of the prompt | tail`` through the language model.

    Args:
        config: the checkpoint's ``config.json``.
        text: the language model's, where it is another than :func:`text_config` says.

    Raises:
        UserError: a config of another model.
    """

    def __init__(self, config: Mapping[str, Any], text: Any = None) -> None:
        super().__init__()
        text = text_config(config) if text is None else text
        self.image_size: int = config["image_sizes"][0]
        self.vision_backbone = VisionBackbone([_shape(name) for name in config["timm_model_ids"]], self.image_size)
        vision = self.vision_backbone.width
        self.projector = Mlp(vision, 4 * vision, text.hidden_size, text.hidden_size)
        self.language_model = LlamaForCausalLM(text)
        self.width: int = text.hidden_size
        # The vocabulary was padded to a multiple; actions are the last tokens before that.
        self.first_action_token: int = text.vocab_size - config["pad_to_multiple_of"] - NUM_ACTION_TOKENS

    def materialize(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Take the weights, as :func:`~embodied_rl.models.weights.stored.assign` does."""
        assign(self, weights, dtype)
        # Not in the weights.
        self.language_model.model.rotary_emb = LlamaRotaryEmbedding(self.language_model.config)

    @property
    def device(self) -> torch.device:
        return self.projector.fc1.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.projector.fc1.weight.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(token_ids)

    def sequence(
        self, images: Tensor, prompt_ids: Tensor, prompt_mask: Tensor, extra: Tensor | None, tail: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Build the language model's input.

        Args:
            images: [N,I,6,H,W].
            prompt_ids: [N,L] int64, BOS first, padding between BOS and the rest.
            prompt_mask: [N,L] bool.
            extra: [N,E,D], tokens after the patches.
            tail: [N,K,D], tokens after the prompt.

        Returns:
            Embeddings [N,S,D], and [N,S] bool, false at padding.
        """
        rows, num_images = images.shape[:2]
        patches = self.projector(self.vision_backbone(images.flatten(0, 1)))
        prompt = self.embed(prompt_ids)
        middle = [patches.unflatten(0, (rows, num_images)).flatten(1, 2)]
        if extra is not None:
            middle.append(extra)
        parts = [prompt[:, :1], *middle, prompt[:, 1:], tail]
        embeddings = torch.cat([part.to(prompt.dtype) for part in parts], 1)
        whole = prompt_mask.new_ones(rows, sum(part.shape[1] for part in middle))
        mask = torch.cat([prompt_mask[:, :1], whole, prompt_mask[:, 1:], prompt_mask.new_ones(rows, tail.shape[1])], 1)
        return embeddings, mask

    def hidden(self, embeddings: Tensor, mask: Tensor, *, causal: bool, cache: TokenCache | None = None) -> Tensor:
        """Final hidden states [N,Q,H] of the last Q tokens.

        Args:
            embeddings: [N,Q,H]; with a cache, those that follow what it has seen.
            mask: [N,S] bool, of all tokens; with a cache, of all that it has room for.
            causal: each token sees itself and those before it; else all see all.
        """
        total, new = mask.shape[1], embeddings.shape[1]
        seen, rows = mask[:, None, None, :], torch.arange(new, device=mask.device)
        rows = rows + (total - new if cache is None else cache.filled)
        if causal:
            columns = torch.arange(total, device=mask.device)
            # Padding sees itself, so that no row of the attention is empty.
            seen = (seen & (columns <= rows[:, None])) | (columns == rows[:, None])
        positions = (mask.long().cumsum(1) - 1).clamp(min=0).index_select(1, rows)
        output = self.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=attention_mask(self.language_model, seen.expand(-1, 1, new, -1), embeddings.dtype),
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        if cache is not None:
            cache.filled += new
        return output.last_hidden_state

    def action_logits(self, hidden: Tensor) -> Tensor:
        """[...,H] -> [...,256] float32, of the action tokens alone."""
        head, first = self.language_model.lm_head, self.first_action_token
        last = first + NUM_ACTION_TOKENS
        if type(head) is nn.Linear:
            return functional.linear(hidden.float(), head.weight[first:last].float())
        return head(hidden)[..., first:last].float()  # it has adapters

    def blocks(self) -> list[nn.Module]:
        """The transformer layers that are computed: FSDP cannot have one that never is."""
        encoders = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        vision = [block for encoder in encoders for block in encoder.blocks[:-1]]
        return [*vision, *self.language_model.model.layers]


class TokenCache:
    """Keys and values of the language model's layers in buffers with room for all tokens that will come.

    Their shapes never change, and what they are filled to is a number on the device: the pass for a token is compiled
    once.

    Args:
        stays: it serves a recorded graph, which finds its tensors by their addresses.
    """

    def __init__(self, length: int, device: torch.device, *, stays: bool = False) -> None:
        self.length, self._stays = length, stays
        self.filled = self._marked(torch.zeros((), dtype=torch.long, device=device))
        """Tokens that all layers have seen."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put [N,heads,Q,head_dim] each behind what is there; returns the buffers, 0 where nothing was put."""
        if layer not in self.layers:
            self.layers[layer] = (self._buffer(key), self._buffer(value))
        rows = self.filled + torch.arange(key.shape[2], device=key.device)
        for buffer, new in zip(self.layers[layer], (key, value), strict=True):
            buffer.index_copy_(2, rows, new)
        return self.layers[layer]

    def _buffer(self, like: Tensor) -> Tensor:
        count, heads, _, size = like.shape
        return self._marked(like.new_zeros(count, heads, self.length, size))

    def _marked(self, tensor: Tensor) -> Tensor:
        if self._stays:
            torch._dynamo.mark_static_address(tensor)
        return tensor


def text_config(config: Mapping[str, Any]) -> Any:
    """transformers' config of the language model."""
    return LlamaConfig(**{**config["text_config"], "attn_implementation": "sdpa"})


class L1ActionHead(nn.Module):
    """Hidden states of the slots [N,C·A,H] -> normalised actions [N,C,A], trained with the absolute error."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _MlpResNet(width * action_dim, width, action_dim)

    def forward(self, slots: Tensor) -> Tensor:
        # The A slots of an action side by side.
        return self.model(slots.unflatten(1, (-1, self.action_dim)).flatten(2))


class ValueHead(nn.Module):
    """Hidden state of the first slot [N,H] -> values [N,V]; 4096 -> 512 -> 128 -> V for the published width."""

    def __init__(self, width: int, num_values: int) -> None:
        super().__init__()
        first, second = max(width // 8, 16), max(width // 32, 16)
        self.fc1 = nn.Linear(width, first)
        self.fc2 = nn.Linear(first, second)
        self.out = nn.Linear(second, num_values, bias=False)
        nn.init.normal_(self.out.weight, std=0.02)  # values start near 0

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(functional.gelu(self.fc2(functional.gelu(self.fc1(hidden)))))


class Mlp(nn.Module):
    """Linear layers ``fc1``, ``fc2``, ... with GELU between them: the projector, the proprioception's, a block's."""

    fc1: nn.Linear

    def __init__(self, *widths: int) -> None:
        super().__init__()
        for number, (fan_in, fan_out) in enumerate(pairwise(widths), 1):
            self.add_module(f"fc{number}", nn.Linear(fan_in, fan_out))
        self._depth = len(widths) - 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        for number in range(2, self._depth + 1):
            x = self.get_submodule(f"fc{number}")(functional.gelu(x))
        return x


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

    def __init__(self, shapes: Sequence[VitShape], image_size: int) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(shapes[0], image_size)
        self.fused_featurizer = VisionTransformer(shapes[1], image_size)
        self.width = self.featurizer.width + self.fused_featurizer.width
        self.num_patches = self.featurizer.num_patches

    def forward(self, images: Tensor) -> Tensor:
        first, second = images.split(3, 1)
        return torch.cat([self.featurizer(first), self.fused_featurizer(second)], 2)


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
        self.mlp = Mlp(width, shape.mlp_width, width)
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
        self.mlp = Mlp(width, shape.mlp_width, width)


class _MlpResNet(nn.Module):
    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width_in)
        self.fc1 = nn.Linear(width_in, hidden)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(hidden) for _ in range(RESIDUAL_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


def _shape(name: str) -> VitShape:
    if name not in VIT_SHAPES:
        raise UserError(
            f"model.path: config.json has timm_model_ids {name!r}, expected some of {', '.join(VIT_SHAPES)}."
            + suggestion(name, VIT_SHAPES)
        )
    return VIT_SHAPES[name]
