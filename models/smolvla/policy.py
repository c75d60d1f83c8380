"""The policy ``smolvla``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.flow.lerobot_folder import (
    LerobotFolder,
    load_weights,
    read_config,
    read_folder,
    without_statistics,
    write_folder,
)
from embodied_rl.models.flow.policy import FlowPolicy, FlowPolicyParams, resize_with_padding
from embodied_rl.models.flow.prefix_attention import PrefixCache, places, run_prefix
from embodied_rl.models.smolvla import files, tiny
from embodied_rl.models.smolvla.network import build_network
from embodied_rl.models.weights.folder import read_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVlaParams(FlowPolicyParams):
    """``model.params`` of ``smolvla``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefix:
    cache: PrefixCache
    zero: Tensor
    seen: Tensor
    """[N,L] bool: false where the prompt is padding."""


class SmolVlaPolicy(FlowPolicy):
    """SmolVLA from a folder of lerobot. It has no fresh weights.

    The state is a token of the prefix. With ``train_expert_only`` its projection stays as it is, too: to train it,
    gradients would have to pass through the whole language model.
    """

    Params = SmolVlaParams
    new_line_step = "smolvla_new_line_processor"

    def __init__(
        self,
        spec: PolicySpec,
        params: SmolVlaParams,
        folder: LerobotFolder | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        if folder is None or weights is None:
            raise UserError(
                "model_type 'smolvla' needs model.path, a folder such as HuggingFaceVLA/smolvla_libero; "
                "python train.py make-tiny model=smolvla <folder> writes a small one"
            )
        sizes = files.read_sizes(folder.config, folder.path)
        super().__init__(
            spec,
            params,
            folder,
            horizon=sizes.chunk_size,
            max_action_dim=sizes.max_action_dim,
            width=sizes.expert.hidden_size,
        )
        self.image_size, self.max_state_dim = sizes.image_size, sizes.max_state_dim
        self._check_room()
        self.model = build_network(sizes)
        own = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        load_weights(self.model, own, getattr(torch, params.dtype), folder.path)
        self._freeze()
        if params.train_expert_only:
            self.model.state_proj.requires_grad_(False)

    @classmethod
    def from_pretrained(cls, path: str, spec: PolicySpec, params: SmolVlaParams) -> Self:
        directory = Path(path)
        config = read_config(directory)
        files.read_sizes(config, path)  # of another policy: said before its weights are read
        weights = read_weights(directory)
        folder = read_folder(directory, config, weights, params.tokenizer, files.VLM_NAME)
        policy = cls(spec, params, folder, files.without_head(without_statistics(weights)))
        policy._read_heads(directory)
        return policy

    def save_pretrained(self, directory: Path) -> None:
        weights = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        write_folder(self.folder, files.with_head(weights), directory, self.new_line_step)
        self._write_heads(directory)

    @classmethod
    def write_tiny(cls, directory: Path) -> None:
        """Write a folder of lerobot's layout with a small random model for LIBERO."""
        tiny.write(directory, cls.new_line_step)

    def vision_language_model(self) -> nn.Module:
        return self.model.vlm_with_expert.vlm

    def prefix(self, images: Mapping[str, Tensor], tokens: Tensor, state: Tensor) -> _Prefix:
        vlm: Any = self.model.vlm_with_expert.vlm.model
        state = functional.pad(state, (0, self.max_state_dim - state.shape[1]))
        with torch.set_grad_enabled(self._trains_prefix()):
            pixels = torch.cat(
                [resize_with_padding(image, self.image_size, centered=False) for image in images.values()]
            )
            words = vlm.text_model.embed_tokens(tokens.clamp(min=0))
            pictures = vlm.connector(vlm.vision_model(pixels.to(self._dtype)).last_hidden_state).to(words.dtype)
            scale = math.sqrt(words.shape[-1])
            last = self.model.state_proj(state.to(self._dtype))[:, None]
            # Cameras were stacked as samples; now they follow each other in the sequence.
            x = torch.cat((*(scale * pictures).chunk(len(images)), scale * words, last.to(words.dtype)), 1)
            seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            seen[:, x.shape[1] - 1 - tokens.shape[1] : -1] = tokens >= 0
            # Pictures and words do not look at the state, which looks at all.
            mask = seen[:, None, None].repeat(1, 1, x.shape[1], 1)
            mask[:, :, :-1, -1] = False
            cache, zero = run_prefix(vlm.text_model, x, mask, places(seen))
        return _Prefix(cache=cache, zero=zero, seen=seen)

    def features(self, prefix: _Prefix, x: Tensor, t: Tensor) -> Tensor:
        return self.model.expert(prefix.cache, prefix.seen, x.to(self._dtype), t, prefix.zero)

    def velocity(self, features: Tensor) -> Tensor:
        return self.model.action_out_proj(features.to(self._dtype))

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.model.action_out_proj.parameters())

    def adapter_root(self) -> nn.Module:
        return self.model.vlm_with_expert.lm_expert if self.params.train_expert_only else self.model

    def shard_units(self) -> list[nn.Module]:
        parts: Any = self.model.vlm_with_expert
        vlm = parts.vlm.model
        return [*vlm.vision_model.encoder.layers, *vlm.text_model.layers, *parts.lm_expert.layers]

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.action_out_proj.weight.dtype
