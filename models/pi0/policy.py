"""The policy ``pi0``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PI0ForConditionalGeneration
from transformers.initialization import no_init_weights

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
from embodied_rl.models.flow.prefix_attention import AfterPrefix, PrefixCache, places, run_prefix
from embodied_rl.models.pi0 import files, tiny
from embodied_rl.models.weights.folder import read_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Pi0Params(FlowPolicyParams):
    """``model.params`` of ``pi0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefix:
    cache: PrefixCache
    zero: Tensor
    seen: Tensor
    """[N,L] bool: false where the prompt is padding."""
    state: Tensor
    """[N,max_state_dim], normalised."""


class Pi0Policy(FlowPolicy):
    """π0 from a folder of lerobot or of transformers. It has no fresh weights."""

    Params = Pi0Params
    new_line_step = "pi0_new_line_processor"

    def __init__(
        self,
        spec: PolicySpec,
        params: Pi0Params,
        folder: LerobotFolder | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        if folder is None or weights is None:
            raise UserError(
                "model_type 'pi0' needs model.path, a folder such as lerobot/pi0_libero_finetuned; "
                "python train.py make-tiny model=pi0 <folder> writes a small one"
            )
        config = files.model_config(folder.config, folder.path)
        super().__init__(
            spec,
            params,
            folder,
            horizon=config.chunk_size,
            max_action_dim=config.max_action_dim,
            width=config.dit_config.hidden_size,
        )
        self.image_size = int(config.vlm_config.vision_config.image_size)
        self.max_state_dim = config.max_state_dim
        self._check_room()
        self.model = build_model(config)
        load_weights(self.model, weights, getattr(torch, params.dtype), folder.path)
        self._freeze()

    @classmethod
    def from_pretrained(cls, path: str, spec: PolicySpec, params: Pi0Params) -> Self:
        directory = Path(path)
        config = read_config(directory)
        sizes = files.model_config(config, path)
        weights = read_weights(directory)
        statistics: dict[str, Tensor] = {}
        if "vlm_config" in config:
            statistics = files.processor_statistics(directory)
            cameras = {name: int(sizes.vlm_config.vision_config.image_size) for name in files.CAMERAS}
            config = files.lerobot_config(sizes, state_dim=spec.state_dim, action_dim=spec.action_dim, cameras=cameras)
        folder = read_folder(directory, config, weights, params.tokenizer, files.TOKENIZER_NAME, statistics)
        policy = cls(spec, params, folder, files.to_transformers(without_statistics(weights), path))
        policy._read_heads(directory)
        return policy

    def save_pretrained(self, directory: Path) -> None:
        weights = files.to_lerobot(self.model.state_dict())
        write_folder(self.folder, weights, directory, self.new_line_step)
        self._write_heads(directory)

    @classmethod
    def write_tiny(cls, directory: Path) -> None:
        """Write a folder of lerobot's layout with a small random model for LIBERO."""
        tiny.write(directory, cls.new_line_step)

    def vision_language_model(self) -> nn.Module:
        return self.model.model.vlm

    def prefix(self, images: Mapping[str, Tensor], tokens: Tensor, state: Tensor) -> _Prefix:
        vlm: Any = self.model.model.vlm
        with torch.set_grad_enabled(self._trains_prefix()):
            size = (self.image_size, self.image_size)
            pixels = torch.cat([resize_with_padding(image, size, centered=True) for image in images.values()])
            words = vlm.language_model.embed_tokens(tokens.clamp(min=0))
            pictures = vlm.get_image_features(pixels.to(self._dtype)).pooler_output.to(words.dtype)
            # Cameras were stacked as samples; now they follow each other in the sequence.
            x = torch.cat((*pictures.chunk(len(images)), words), 1)
            seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            seen[:, x.shape[1] - tokens.shape[1] :] = tokens >= 0
            cache, zero = run_prefix(vlm.language_model, x, seen[:, None, None], places(seen))
        state = nn.functional.pad(state, (0, self.max_state_dim - state.shape[1]))
        return _Prefix(cache=cache, zero=zero, seen=seen, state=state)

    def features(self, prefix: _Prefix, x: Tensor, t: Tensor) -> Tensor:
        expert: Any = self.model.model.dit
        embedded = self.model.embed_action_time(prefix.state.to(self._dtype), x.to(self._dtype), t) + prefix.zero
        count, length = embedded.shape[:2]
        # The state does not look at the actions; all look at the prefix.
        own = torch.ones(length, length, dtype=torch.bool, device=x.device)
        own[0, 1:] = False
        mask = torch.cat((prefix.seen[:, None].expand(-1, length, -1), own.expand(count, -1, -1)), 2)[:, None]
        positions = prefix.seen.sum(1, keepdim=True) + torch.arange(length, device=x.device)
        rotary = expert.rotary_emb(embedded, position_ids=positions)
        cache, hidden = AfterPrefix(prefix.cache), embedded
        for layer in expert.layers:
            hidden = layer(hidden, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
        return expert.norm(hidden)[:, 1:]

    def velocity(self, features: Tensor) -> Tensor:
        return self.model.action_out_proj(features.to(self._dtype))

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.model.action_out_proj.parameters())

    def adapter_root(self) -> nn.Module:
        return self.model.model.dit if self.params.train_expert_only else self.model

    def shard_units(self) -> list[nn.Module]:
        model: Any = self.model.model
        return [*model.vlm.vision_tower.encoder.layers, *model.vlm.language_model.layers, *model.dit.layers]

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.action_out_proj.weight.dtype


def build_model(config: Any) -> PI0ForConditionalGeneration:
    """Without weights, and without the expert's table of words, which nothing reads."""
    with no_init_weights():
        model = PI0ForConditionalGeneration(config)
    expert: Any = model.model.dit
    expert.embed_tokens = None
    return model
