"""``model``: the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from embodied_rl.schema.types import NonNegativeInt, PositiveInt, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings(Section):
    """Low-rank adapters: the base weights are not trained."""

    path: str | None
    """A folder of adapters in peft's format, which go on being trained. Rank, alpha, layers and scale are the
    folder's; null: fresh ones."""
    rank: NonNegativeInt
    """0: no adapters, all weights are trained (unless there is a ``path``)."""
    alpha: PositiveInt
    """The adapters' output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Dropout of the adapters' inputs, while gradients are taken."""
    target_modules: list[str] | str
    """Names of linear layers, or the last parts of names; ``all-linear``: all but value head and output head."""
    use_rslora: bool
    """Multiply by alpha / sqrt(rank) instead."""
    init_lora_weights: Literal["default", "gaussian", "pissa", "olora", "orthogonal"]
    """As in peft; with ``default`` the first policy is the base."""
    modules_to_save: list[str]
    """Parts of the model that are trained as a whole beside the adapters; the value head always is."""

    @property
    def used(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0 or self.path is not None

    @property
    def leave_base(self) -> bool:
        """Whether the policy without these fresh adapters is its base, and stays so in training."""
        fresh = self.rank > 0 and self.path is None and self.init_lora_weights == "default"
        return fresh and not self.modules_to_save


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    model_type: str
    """Name in ``models/registry.py``, of an entry point, ``module:Class`` or ``path/to/file.py:Class``."""
    path: str | None
    """A folder of weights in the model's published layout (for ``causal_lm`` also a name on the hub), or one that
    ``export`` wrote; null: fresh weights."""
    params: dict[str, Any]
    """The model's own options: its ``Params`` dataclass documents them."""
    lora: LoraSettings
    trainable: dict[str, bool] = field(default_factory=dict)
    """Which parameters are trained: shell patterns of their names -> true or false; of several that match a name the
    last counts, and what none matches is trained. The value head always is. ``{*: false, *.layers.31.*: true}``
    trains that layer. Without adapters, which freeze the base."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """Attention of the layers that are transformers', in actor, reference and rollout: openvla, openvla_oft, pi0 and
    smolvla have sdpa or eager, causal_lm also flash_attention_2 (CUDA, ``model.params.dtype=bfloat16``, the package
    flash-attn). null: torch's scaled dot-product attention, where transformers has it for the model."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Settings of transformers' config that differ from the folder's, such as ``{attention_dropout: 0.1}`` or
    ``{rope_parameters: {rope_type: linear, factor: 2.0}}``, of causal_lm; of openvla and openvla_oft within
    ``text_config``, of pi0 and pi05 within ``vlm_config`` or ``dit_config``, of smolvla within ``vlm_config`` or
    ``expert_config``. None may change a tensor of the weights. Checkpoints and exports keep them."""
    revision: str | None = None
    """Branch, tag or commit of a ``path`` that is a name on the hub (``causal_lm``); null: its newest."""
    trust_remote_code: bool = False
    """Run the code that the folder in ``path`` brings for its model or tokenizer (``causal_lm``), which can do whatever
    you can. false: such a folder is refused."""
    tokenizer_path: str | None = None
    """A folder with the tokenizer, or a name on the hub, where it is not that of ``path`` (``causal_lm``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionModelConfig(ModelConfig):
    num_action_chunks: PositiveInt
    """Actions decided at once and executed open-loop."""
