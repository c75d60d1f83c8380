"""Model names. A new model adds one line to :data:`MODELS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from embodied_rl.errors import UserError
from embodied_rl.models.weights.loading import AS_IT_IS, Loading, check_loading
from embodied_rl.params import parse_params
from embodied_rl.registry import Registry

if TYPE_CHECKING:
    from embodied_rl.models.base import Policy, PolicySpec
    from embodied_rl.schema import ModelConfig

MODELS: Final = Registry(
    "model.model_type",
    {
        "causal_lm": "embodied_rl.models.causal_lm:CausalLMPolicy",
        "cnn": "embodied_rl.models.cnn:CnnPolicy",
        "mlp": "embodied_rl.models.mlp:MlpPolicy",
        "openvla": "embodied_rl.models.openvla.policy:OpenVlaPolicy",
        "openvla_oft": "embodied_rl.models.openvla.oft:OpenVlaOftPolicy",
        "pi0": "embodied_rl.models.pi0:Pi0Policy",
        "pi05": "embodied_rl.models.pi05:Pi05Policy",
        "residual": "embodied_rl.models.residual:ResidualPolicy",
        "smolvla": "embodied_rl.models.smolvla:SmolVlaPolicy",
        "tiny_vla": "embodied_rl.models.tiny_vla:TinyVlaPolicy",
    },
    group="embodied_rl.models",
    needs_params=True,
)
"""``model_type`` -> "module:Class"."""
LANGUAGE_MODELS = ("causal_lm",)
"""Models that answer prompts (``task=math``); the others act in envs."""


def policy_class(model_type: str) -> type[Policy]:
    """The policy that ``model_type`` names, built-in or from outside (:mod:`embodied_rl.registry`).

    Raises:
        UserError: no such name, module or class, or one without ``Params``.
    """
    return MODELS.load(model_type)


def policy_of(
    config: ModelConfig,
    spec: PolicySpec,
    initialize: Callable[[Policy], None] | None = None,
    *,
    params: Any = None,
) -> Policy:
    """The policy that the configuration asks for, with fresh weights or those of ``model.path``, and its adapters.

    Args:
        initialize: gives the policy other weights, before there are adapters.
        params: ``config.params`` that were parsed already.

    Raises:
        UserError: as :func:`build_policy`, adapters or an attention that do not fit the model, or
            names of trained parameters that it does not have.
    """
    policy = build_policy(
        config.model_type, spec, config.params if params is None else params, config.path, Loading.of(config)
    )
    if config.attn_implementation is not None:
        from embodied_rl.models.attention import set_attention  # imports torch

        set_attention(policy, config.attn_implementation)
    if initialize is not None:
        initialize(policy)
    if config.lora.used:
        from embodied_rl.models.weights.lora import add_adapters  # peft takes a second to import

        add_adapters(policy, config.lora)
    if config.trainable:
        from embodied_rl.models.weights.trainable import freeze_others  # imports torch

        freeze_others(policy, config.trainable)
    return policy


def build_policy(
    model_type: str,
    spec: PolicySpec,
    params: Mapping[str, Any] | Any,
    path: str | None = None,
    loading: Loading = AS_IT_IS,
) -> Policy:
    """Construct a policy with fresh weights, or with those of the folder ``path``; ``params`` is the config's
    ``model.params``, or what was parsed of it.

    Raises:
        UserError: an unknown model or parameter, a parameter of the wrong type or out of range, a spec that the model
            cannot serve, a folder that does not fit, or cannot be loaded so.
    """
    model = policy_class(model_type)
    if spec.action_choices and not model.takes_choices:
        raise UserError(
            f"model_type {model_type!r} gives continuous actions, and this env takes choices "
            f"({' x '.join(map(str, spec.action_choices))}); use a model that chooses, such as 'mlp'"
        )
    parsed = parse_params(model.Params, params, "model.params")
    check_loading(model, loading, path)
    options = {"loading": loading} if loading.given() else {}  # else the model need not know of it
    policy = model(spec, parsed, **options) if path is None else model.from_pretrained(path, spec, parsed, **options)
    if not loading.asks_for_dropout():
        from embodied_rl.models.attention import disable_dropout  # imports torch, as the policy did

        disable_dropout(policy)
    return policy
