"""``pi05``: π0.5 (arXiv:2504.16054), in lerobot's layout.

π0 with three changes. The state is text in the prompt. Time scales, shifts and gates the expert's layers (adaptive
RMSNorm, after adaLN of DiT, arXiv:2212.09748) instead of being joined to the actions. The actions alone are the
expert's input, and all of them look at each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaMLP

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.flow.lerobot_folder import STATE_PROMPT_STEP, prompt_tokens, tiny_features
from embodied_rl.models.flow.policy import FlowPolicyParams
from embodied_rl.models.flow.prefix import Prefix, Steps, run_after_prefix, steps_after
from embodied_rl.models.flow.sde import time_embedding
from embodied_rl.models.pi0 import TOWERS, Pi0Policy

BINS = 256
"""Of [-1, 1], for each number of the state."""
_MAX_LENGTH = 200
_REFUSED = ("use_relative_actions", "use_visual_memory", "use_proprioceptive_memory")
"""Settings of lerobot's that are not done here; published policies do not have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pi05Params(FlowPolicyParams):
    """``model.params`` of ``pi05``."""

    padded_state: bool = False
    """The prompt holds the state filled with zeros to ``max_state_dim``, as for policies that lerobot trained until
    0.4; openpi and later versions write its own numbers alone, and folders do not say which."""


class Pi05Policy(Pi0Policy):
    """π0.5 from a folder of lerobot."""

    Params = Pi05Params
    name = "pi05"
    example = "lerobot/pi05_libero_finetuned"
    prompt_step = STATE_PROMPT_STEP
    own_names = (
        *TOWERS,
        (r"^action_time_mlp_", "time_mlp_"),
        (r"^(?=action_in_proj|time_mlp)", "embed_action_time."),
    )
    params: Pi05Params

    @classmethod
    def network_config(cls, config: Mapping[str, Any], path: str) -> Any:
        for key in _REFUSED:
            if config.get(key):
                raise UserError(f"model.path={path}: config.json has {key}={config[key]!r}, expected false")
        return super().network_config(config, path)

    @classmethod
    def tiny_config(cls, vocabulary: int) -> dict[str, Any]:
        return {**super().tiny_config(vocabulary), **tiny_features(mode="QUANTILES", max_length=_MAX_LENGTH)}

    @classmethod
    def build_network(cls, config: Any) -> nn.Module:
        """π0's, with an expert whose norms are adaptive."""
        model: Any = super().build_network(config)
        expert = model.model.dit
        sizes, expert.layers = expert.config, None  # not two of them at once
        expert.layers = nn.ModuleList(AdaptiveLayer(sizes, index) for index in range(sizes.num_hidden_layers))
        expert.norm = AdaptiveNorm(sizes.hidden_size, sizes.rms_norm_eps)
        model.embed_action_time = ActionTimeEmbedding(config)
        return model

    def prompts(self, obs: EnvObs) -> list[str]:
        """Instruction and state, which the network reads nowhere else.

        Raises:
            UserError: an instruction leaves no room for the longest state.
        """
        state = self.state_normalizer.normalize(obs.state.to(self.device).float())
        if self.params.padded_state:
            state = functional.pad(state, (0, self.max_state_dim - state.shape[1]))
        for text in set(obs.instructions):  # at once, not when a state happens to have more digits
            prompt_tokens(self.folder, prompt(text, [BINS - 1] * state.shape[1]))
        return [prompt(text, bins) for text, bins in zip(obs.instructions, state_bins(state).tolist(), strict=True)]

    def steps(self, prefix: Prefix, *, in_place: bool) -> Steps:
        own = torch.ones(self.horizon, self.horizon, dtype=torch.bool, device=prefix.seen.device)
        return steps_after(self.model.model.dit, prefix, own, in_place=in_place)

    def features(self, prefix: Prefix, steps: Steps, x: Tensor, t: Tensor) -> Tensor:
        expert: Any = self.model.model.dit
        embedded, condition = self.model.embed_action_time(x.to(self._dtype), t)
        hidden = run_after_prefix(expert, embedded + prefix.zero, steps, condition=condition)
        return expert.norm(hidden, condition)[0]


def state_bins(state: Tensor) -> Tensor:
    """Normalised states -> int64 of the same shape: which of 256 bins of [-1, 1] a number is in.

    As openpi and lerobot count them: 255 from 1 on, and -1 below -1.
    """
    edges = torch.arange(BINS, device=state.device) * (2.0 / BINS) - 1.0
    return torch.bucketize(state, edges, right=True) - 1


def prompt(instruction: str, bins: list[int]) -> str:
    """What the language model reads."""
    task = instruction.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {task}, State: {' '.join(map(str, bins))};\nAction: "


class AdaptiveNorm(nn.Module):
    """RMSNorm whose scale and shift come from a condition, and with them a gate for what is computed of its output."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """[N,L,W] and the condition [N,W] -> the normalised [N,L,W] and the gate [N,1,W]; computed in float32."""
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, -1)
        normed = x.float() * (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (normed * (1.0 + scale.float()) + shift.float()).to(x.dtype), gate


class AdaptiveLayer(nn.Module):
    """Gemma's layer with adaptive norms, whose gates multiply what attention and MLP add."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(config, index)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, *, condition: Tensor, **attention: Any) -> Tensor:
        """[N,L,W]; ``attention`` is what transformers' ``GemmaAttention`` takes."""
        # Gradients of the two norms are added up here before other layers', as where FSDP shards: to the same bits.
        condition = condition.view_as(condition)
        x, gate = self.input_layernorm(hidden_states, condition)
        x, _ = self.self_attn(hidden_states=x, **attention)
        hidden_states = hidden_states + gate * x
        x, gate = self.post_attention_layernorm(hidden_states, condition)
        return hidden_states + gate * self.mlp(x)


class ActionTimeEmbedding(nn.Module):
    """The expert's input and the condition of its norms."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.dit_config.hidden_size
        self.periods = (config.min_period, config.max_period)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy actions [N,H,D] in the weights' type and times [N] float32 -> [N,H,W] and [N,W]."""
        times = time_embedding(t, self.time_mlp_in.in_features, *self.periods).to(x.dtype)
        condition = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(times))))
        return self.action_in_proj(x), condition
