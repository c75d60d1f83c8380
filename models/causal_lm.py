"""``causal_lm``: a causal language model of Hugging Face, or a small fresh one, as a policy whose actions are tokens.

A completion is one chunk of C token actions, padded on the right. ``replay_inputs`` are

===================  =========  ===================================================
``prompt_ids``       [N,P]      int64, padded on the left
``prompt_lengths``   [N]        int64, tokens of the prompt
``response_ids``     [N,C]      int64, padded on the right
``response_lengths`` [N]        int64, tokens of the completion, its end token included
===================  =========  ===================================================

The lengths tell padding apart, since a padding token may also be a token of the text. Columns that are padding in all
samples are left out of the computation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import ConfigDict, PositiveInt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from embodied_rl.errors import UserError, first_line
from embodied_rl.models.base import Evaluation, Policy, PolicySpec
from embodied_rl.models.categorical import scaled_log_softmax
from embodied_rl.models.weights.folder import LOADING_ERRORS, VALUE_HEAD_FILE, load_head, load_model, write_tensors
from embodied_rl.models.weights.loading import (
    AS_IT_IS,
    Loading,
    check_shapes,
    names_code,
    override,
    read_config,
    refusal,
    untrusted,
)
from embodied_rl.params import NOT_OF_WEIGHTS

if TYPE_CHECKING:
    import transformers

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names under which a tokenizer is saved that is all in its ``tokenizer.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """``model.params.architecture``: a model made fresh, with a token for each character. The defaults have a million
    parameters."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    type: Literal["llama", "qwen2"]
    """The family, as in Hugging Face's ``model_type``."""
    characters: str = "0123456789+-*/=;,.()?: abcdefghijklmnopqrstuvwxyz\n"
    """The vocabulary."""
    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    intermediate_size: PositiveInt = 512
    max_length: PositiveInt = 512
    """Tokens of prompt and completion together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMParams:
    """``model.params`` of ``causal_lm``."""

    architecture: Architecture | None = None
    """Architecture of a fresh small model; beside ``model.path`` the folder's model must have it."""
    dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata=NOT_OF_WEIGHTS)
    """Type of the weights."""


class CausalLMPolicy(Policy):
    """Categorical over the vocabulary for each token, given the prompt and the tokens before it.

    With a value head, a value at chunk level (V=1) is that of the prompt; at action level (V=C) it is that of the state
    before each token.
    """

    Params = CausalLMParams
    distribution_type = Categorical
    attentions = ("sdpa", "eager", "flash_attention_2")
    loading_keys = ("hf_overrides", "revision", "trust_remote_code", "tokenizer_path")

    def __init__(
        self,
        spec: PolicySpec,
        params: CausalLMParams,
        path: str | None = None,
        loading: Loading = AS_IT_IS,
    ) -> None:
        super().__init__()
        if spec.state_dim or spec.image_shapes or spec.action_dim != 1:
            raise UserError("model_type 'causal_lm' answers prompts and does not act in an env; use task=math")
        self.spec, self.params = spec, params
        self.model: transformers.PreTrainedModel = _build_model(params, path, loading)
        self.tokenizer: transformers.PreTrainedTokenizerBase = _load_tokenizer(params, path, loading)
        if path is not None and params.architecture is not None:
            _compare(params.architecture, path, self.model, self.tokenizer, loading)
        embedding: Any = self.model.get_input_embeddings()
        vocabulary = len(embedding.weight)
        if len(self.tokenizer) > vocabulary:
            raise UserError(
                f"model.path={path}: the tokenizer{_where(loading)} has {len(self.tokenizer)} tokens and the model "
                f"embeds {vocabulary}; use the tokenizer that the model was trained with"
            )
        hidden = self.model.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden, 1) if spec.values_per_chunk else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            self.value_head.to(self.model.dtype)  # FSDP2 trains one type alone

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        spec: PolicySpec,
        params: CausalLMParams,
        loading: Loading = AS_IT_IS,
    ) -> Self:
        policy = cls(spec, params, path, loading)
        if policy.value_head is not None:
            load_head(policy.value_head, Path(path) / VALUE_HEAD_FILE)
        return policy

    @classmethod
    def try_loading(cls, path: str, params: CausalLMParams, loading: Loading) -> None:
        if loading.given() or names_code(Path(path)):
            _read_config(path, loading)
            _load_tokenizer(params, path, loading)

    @classmethod
    def write_tiny(cls, directory: Path) -> None:
        """Write a folder with a small model, a token for each character; its weights are the same each time."""
        params = CausalLMParams(architecture=Architecture(type="qwen2", hidden_size=64, num_layers=2, num_heads=2))
        spec = PolicySpec(action_dim=1, num_action_chunks=1, state_dim=0, image_shapes={}, values_per_chunk=0)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            cls(spec, params).save_pretrained(directory)

    def save_pretrained(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        if self.value_head is not None:
            write_tensors(directory / VALUE_HEAD_FILE, self.value_head.state_dict())

    @property
    def max_length(self) -> int | None:
        """Tokens of prompt and completion that the model takes together; None: it does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        declared = getattr(self.model.generation_config, "eos_token_id", None)
        ids = declared if isinstance(declared, list) else [declared]
        return frozenset(token for token in [*ids, self.tokenizer.eos_token_id] if token is not None)

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        device = self.model.device
        full = replay_inputs["response_ids"].shape[1]
        before, after = replay_inputs["prompt_lengths"], replay_inputs["response_lengths"]
        prompt, response = int(before.max()), max(int(after.max()), 1)
        prompt_ids = replay_inputs["prompt_ids"][:, replay_inputs["prompt_ids"].shape[1] - prompt :].to(device)
        response_ids = replay_inputs["response_ids"][:, :response].to(device)
        mask = torch.cat(
            [
                torch.arange(prompt, device=before.device) >= prompt - before[:, None],
                torch.arange(response, device=after.device) < after[:, None],
            ],
            dim=1,
        ).to(device)
        output = self.model(
            input_ids=torch.cat([prompt_ids, response_ids], 1),
            attention_mask=mask.long(),
            position_ids=position_ids(mask),
            use_cache=False,
            logits_to_keep=response + 1,
            output_hidden_states=self.value_head is not None,
        )
        log_probabilities = scaled_log_softmax(output.logits[:, :-1], temperature)
        logprobs = log_probabilities.gather(-1, response_ids[..., None])
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1, keepdim=True)
        values = None
        if self.value_head is not None:
            states = output.hidden_states[-1][:, prompt - 1 : -1].to(self.value_head.weight.dtype)
            if self.spec.values_per_chunk == 1:
                values = self.value_head(states[:, 0]).float()
            else:
                values = _pad(self.value_head(states).float(), full).squeeze(-1).clone()  # FSDP warns of views
        distribution = None
        if with_distribution:
            logits = _pad(log_probabilities, full)
            distribution = {"logits": logits[:, :, None].clone()}  # FSDP warns of views
        return Evaluation(
            logprobs=_pad(logprobs, full),
            entropy=_pad(entropy, full),
            values=values,
            distribution=distribution,
        )

    def sample_lengths(self, replay_inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([replay_inputs["prompt_lengths"], replay_inputs["response_lengths"]], 1)

    def sample_of(self, lengths: tuple[int, ...]) -> dict[str, Tensor]:
        prompt, response = lengths
        return {
            "prompt_ids": torch.zeros(1, prompt, dtype=torch.int64),
            "prompt_lengths": torch.tensor([prompt]),
            "response_ids": torch.zeros(1, response, dtype=torch.int64),
            "response_lengths": torch.tensor([response]),
        }

    def head_parameters(self) -> list[nn.Parameter]:
        head = self.model.get_output_embeddings()
        return [] if head is None else list(head.parameters())

    def adapter_root(self) -> nn.Module:
        return self.model

    def shard_units(self) -> list[nn.Module]:
        decoder: Any = self.model.get_decoder()
        return list(decoder.layers)


def character_tokenizer(characters: str) -> transformers.PreTrainedTokenizerFast:
    """Tokens 0, 1, 2 are padding, end and unknown; then the distinct ``characters`` in their order.

    ``save_pretrained`` works on it, and ``PreTrainedTokenizerFast.from_pretrained`` reads it back; ``AutoTokenizer``
    may take the tokenizer class of a model that is saved beside it.
    """
    import transformers  # in functions: it takes a second, and a plan of the run needs only the parameters

    tokens = [PAD, EOS, UNKNOWN, *dict.fromkeys(characters)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    # `.` would drop line ends.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def position_ids(mask: Tensor) -> Tensor:
    """[N,L] int64: positions in the text, counted from its first token, from the attention mask [N,L]."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _where(loading: Loading) -> str:
    return "" if loading.tokenizer_path is None else f" in model.tokenizer_path={loading.tokenizer_path}"


def _load_tokenizer(params: CausalLMParams, path: str | None, loading: Loading) -> transformers.PreTrainedTokenizerBase:
    source: str | None = path
    options: dict[str, Any] = loading.hub_options()
    if loading.tokenizer_path is not None:
        source, options = loading.tokenizer_path, {"trust_remote_code": loading.trust_remote_code}
    if source is None:
        assert params.architecture is not None  # else there would be no model
        return character_tokenizer(params.architecture.characters)
    import transformers

    try:
        tokenization_auto = transformers.models.auto.tokenization_auto
        found = tokenization_auto.get_tokenizer_config(source, revision=options.get("revision"))
        kind, has_code = str(found.get("tokenizer_class")), "AutoTokenizer" in found.get("auto_map", {})
        if kind in GENERIC_TOKENIZERS and not has_code:
            # AutoTokenizer would go by the model's family instead, and cut texts as that family's tokenizer does.
            return transformers.PreTrainedTokenizerFast.from_pretrained(source, **options)
        if has_code and not loading.trust_remote_code and tokenization_auto.tokenizer_class_from_name(kind) is None:
            raise refusal(source, loading, "tokenizer_config.json")  # AutoTokenizer would take the family's here, too
        return transformers.AutoTokenizer.from_pretrained(source, **options)
    except LOADING_ERRORS as error:
        if refused := untrusted(error, source, loading, "tokenizer_config.json"):
            raise refused from None
        key = "path" if source is path else "tokenizer_path"
        raise UserError(f"model.{key}={source}: no tokenizer: {first_line(error)}") from error


def _read_config(path: str, loading: Loading) -> transformers.PreTrainedConfig:
    """The config of the model in ``path``, overridden."""
    from transformers import AutoModelForCausalLM

    try:
        plain = read_config(path, loading)
        if not loading.hf_overrides:
            return plain
        config, key = copy.deepcopy(plain), f"{loading.key}.hf_overrides"
        override(config, loading.hf_overrides, key)
        build = partial(AutoModelForCausalLM.from_config, trust_remote_code=loading.trust_remote_code)
        check_shapes(build, plain, config, key)
        return config
    except LOADING_ERRORS as error:
        raise UserError(
            f"model.path={path}: not a causal language model's folder, nor one on the hub: {first_line(error)}"
        ) from error


def _build_model(params: CausalLMParams, path: str | None, loading: Loading) -> transformers.PreTrainedModel:
    import transformers

    dtype, architecture = getattr(torch, params.dtype), params.architecture
    if path is not None:
        overridden: dict[str, Any] = {"config": _read_config(path, loading)} if loading.hf_overrides else {}
        try:
            return load_model(transformers.AutoModelForCausalLM, path, loading=loading, dtype=dtype, **overridden)
        except LOADING_ERRORS as error:
            raise UserError(
                f"model.path={path}: not a causal language model's folder, nor one on the hub: {first_line(error)}"
            ) from error
    if architecture is None:
        raise UserError(
            "model: got neither path nor params.architecture; model=causal_lm model.path=... loads a model, "
            "model=tiny_lm makes one"
        )
    tokenizer = character_tokenizer(architecture.characters)
    config = transformers.AutoConfig.for_model(
        architecture.type,
        vocab_size=len(tokenizer),
        **_sizes(architecture),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    build = transformers.AutoModelForCausalLM.from_config
    if loading.hf_overrides:
        plain, key = copy.deepcopy(config), f"{loading.key}.hf_overrides"
        override(config, loading.hf_overrides, key)
        check_shapes(build, plain, config, key)
    return build(config).to(dtype)


def _sizes(architecture: Architecture) -> dict[str, int]:
    """The architecture's sizes by their names in a Hugging Face config."""
    return {
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
        "intermediate_size": architecture.intermediate_size,
        "max_position_embeddings": architecture.max_length,
    }


def _compare(
    architecture: Architecture,
    path: str,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    loading: Loading,
) -> None:
    """Refuse a folder whose model is not of ``model.params.architecture``, as an exported ``model=tiny_lm`` is."""
    sizes = {name: size for name, size in _sizes(architecture).items() if name not in loading.hf_overrides}
    expected = {"model_type": architecture.type, **sizes}
    found = {name: getattr(model.config, name, None) for name in expected}
    differs = [
        f"{name} is {found[name]!r}, expected {expected[name]!r}" for name in expected if found[name] != expected[name]
    ]
    if tokenizer.get_vocab() != character_tokenizer(architecture.characters).get_vocab():
        differs.append("its tokens are not those of characters")
    if differs:
        raise UserError(
            f"model.path={path} has another architecture than model.params.architecture: {'; '.join(differs)}. "
            "Set model.params.architecture=null to take the folder's"
        )


def _pad(tensor: Tensor, length: int) -> Tensor:
    """[N,L,X] -> [N,length,X], zeros at the end."""
    return functional.pad(tensor, (0, 0, 0, length - tensor.shape[1]))
