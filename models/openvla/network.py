"""Image encoder, projector and Llama 2 as one network with the published names: 982 tensors, 7.5 billion parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from embodied_rl.errors import UserError, suggestion
from embodied_rl.models.openvla.vision import VIT_SHAPES, Projector, VisionBackbone

NUM_ACTION_TOKENS = 256


class OpenVlaNetwork(nn.Module):
    """``BOS | patches of each image | extra tokens | rest of the prompt | tail`` through the language model.

    Args:
        config: the checkpoint's ``config.json``.

    Raises:
        UserError: a config of another model.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        text = LlamaConfig(**{**config["text_config"], "attn_implementation": "sdpa"})
        self.image_size: int = config["image_sizes"][0]
        shapes = [_shape(name) for name in config["timm_model_ids"]]
        self.vision_backbone = VisionBackbone((shapes[0], shapes[1]), self.image_size)
        self.projector = Projector(self.vision_backbone.width, text.hidden_size)
        self.language_model = LlamaForCausalLM(text)
        self.width: int = text.hidden_size
        # The vocabulary was padded to a multiple; actions are the last tokens before that.
        self.first_action_token: int = text.vocab_size - config["pad_to_multiple_of"] - NUM_ACTION_TOKENS

    def materialize(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Take the weights as they are, without a copy where the type allows; the network may be on the meta device."""
        self.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
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
        """What the language model reads.

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

    def hidden(self, embeddings: Tensor, mask: Tensor, *, causal: bool, cache: Cache | None = None) -> Tensor:
        """Final hidden states [N,Q,H] of the last Q tokens.

        Args:
            embeddings: [N,Q,H]; with a cache, those that it has not seen.
            mask: [N,S] bool, of all tokens.
            causal: each token sees itself and those before it; else all see all.
        """
        total, new = mask.shape[1], embeddings.shape[1]
        seen = mask[:, None, None, :]
        if causal:
            rows = torch.arange(total - new, total, device=mask.device)[:, None]
            columns = torch.arange(total, device=mask.device)
            # Padding sees itself, so that no row of the attention is empty.
            seen = (seen & (columns <= rows)) | (columns == rows)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, total - new :]
        output = self.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=seen.expand(-1, 1, new, -1),
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
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


def _shape(name: str) -> Any:
    if name not in VIT_SHAPES:
        raise UserError(
            f"model.path: config.json has timm_model_ids {name!r}, expected some of {', '.join(VIT_SHAPES)}."
            + suggestion(name, VIT_SHAPES)
        )
    return VIT_SHAPES[name]
