"""``openvla``: one action of A tokens, one token after another (Kim et al. 2024, arXiv:2406.09246), and its base class.

::

    BOS | patches of the image | prompt … 29871 | token 1 | token 2 | … | token A-1
                                            └► 1      └► 2      └► 3           └► A

Acting takes one pass over the prompt and one over each token, with the attention's keys and values kept; evaluating
takes a single pass. The base class, which ``openvla_oft`` shares, has the folder, the inputs, sampling and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError, suggestion
from embodied_rl.models.base import (
    Evaluation,
    Policy,
    PolicyOutput,
    PolicySpec,
    camera_images,
    require_cameras,
    require_values,
)
from embodied_rl.models.categorical import chosen_logprobs, cut, draw, entropy, scaled_log_softmax
from embodied_rl.models.openvla.actions import ActionCodec, Bounds, PolicySetup, choose_statistics
from embodied_rl.models.openvla.files import Folder, read_folder, write_folder
from embodied_rl.models.openvla.inputs import PAD, ImageProfile, PromptTokenizer, normalize, trim
from embodied_rl.models.openvla.network import NUM_ACTION_TOKENS, OpenVlaNetwork, TokenCache, ValueHead, text_config
from embodied_rl.models.openvla.tiny import write_tiny
from embodied_rl.models.weights.folder import VALUE_HEAD_FILE, check_fit, load_head, read_weights, write_tensors
from embodied_rl.models.weights.loading import AS_IT_IS, Loading, check_shapes, override


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaParams:
    """``model.params`` of ``openvla``, and of ``openvla_oft`` with more. The image settings are those of the published
    evaluations; they must be those of the checkpoint's training."""

    unnorm_key: str | None = None
    """Name of the checkpoint's action statistics; null: those of ``suite``, with ``_no_noops`` or without, else those
    of ``policy_setup``, else the only ones."""
    policy_setup: PolicySetup = "libero"
    """How the env takes actions. libero: as they were recorded, the gripper closes at 1. widowx_bridge: metres and
    radians, for ManiSkill's digital twins of BridgeData; the gripper opens at 1. panda: as recorded, opens at 1."""
    bounds: Bounds = "quantiles"
    """What normalised actions of -1 and 1 stand for: the statistics' 1st and 99th percentile, or minimum and
    maximum."""
    suite: str | None = None
    """The env's suite; the config fills it in."""
    jpeg: bool = True
    """Pass images through JPEG, as the data sets were."""
    resize: Literal["lanczos3", "bicubic"] = "lanczos3"
    """Filter to the network's image size."""
    center_crop: bool = True
    """Cut the image to the middle 90 % of its area: for checkpoints trained with random crops."""
    max_prompt_tokens: Annotated[int, Field(ge=2)] = 64
    """Prompts are recorded with so many tokens; a longer one is an error. The padding is not computed on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""


class OpenVlaBase(Policy):
    """A folder's network in ``network``, and what it takes to act with it.

    ``replay_inputs`` are ``prompt_ids`` [N,L] int64, ``images`` [N,I,H,W,3] uint8 as the encoders see them but for
    normalisation, and what the subclass adds.

    Args:
        folder: in the published layout; there are no fresh weights.
        cameras: of the spec, in the order of the checkpoint.

    Raises:
        UserError: no folder, one that does not fit, or an env that does not.
    """

    name: ClassVar[str]
    distribution_type = Categorical
    attentions = ("sdpa", "eager")  # flash attention has no masks of one's own
    truncates = True
    loading_keys = ("hf_overrides",)

    def __init__(
        self,
        spec: PolicySpec,
        params: OpenVlaParams,
        folder: Path | None,
        cameras: tuple[str, ...],
        loading: Loading,
    ) -> None:
        super().__init__()
        if folder is None:
            raise UserError(
                f"model_type {self.name!r} has no fresh weights: set model.path to a folder with a published "
                f"checkpoint, or to a tiny one, which `python train.py make-tiny model={self.name} <folder>` writes"
            )
        require_cameras(self.name, spec)
        for camera in cameras:
            if camera not in spec.image_shapes:
                raise UserError(
                    f"model_type {self.name!r} looks at camera {camera!r} and the env gives "
                    f"{', '.join(spec.image_shapes)}.{suggestion(camera, spec.image_shapes)}"
                )
        self.spec, self.params = spec, params
        self._cameras, self._fixed = cameras, False
        self._folder = files = read_folder(folder)
        text = text_config(files.config)
        if loading.hf_overrides:
            text, files = _overridden(text, files, loading)
            self._folder = files
        with torch.device("meta"):
            self.network = OpenVlaNetwork(files.config, text)
        weights = read_weights(folder)
        check_fit(self.network.state_dict(), weights, f"model.path={folder}")
        self.dtype: torch.dtype = getattr(torch, params.dtype)
        self.network.materialize(weights, self.dtype)
        key = choose_statistics(
            files.norm_stats, unnorm_key=params.unnorm_key, suite=params.suite, setup=params.policy_setup
        )
        self.codec = ActionCodec(
            files.norm_stats[key],
            self.network.first_action_token + NUM_ACTION_TOKENS,
            params.policy_setup,
            params.bounds,
        )
        if self.codec.action_dim != spec.action_dim:
            raise UserError(
                f"model.path={folder}: the action statistics {key!r} are of {self.codec.action_dim} dimensions and the "
                f"env's actions have {spec.action_dim}; choose others with model.params.unnorm_key"
            )
        self._profile = ImageProfile(
            size=self.network.image_size, jpeg=params.jpeg, resize=params.resize, center_crop=params.center_crop
        )
        self._tokenize = PromptTokenizer(files.tokenizer, params.max_prompt_tokens)
        self.means, self.stds = (nn.Buffer(torch.tensor(x), persistent=False) for x in (files.means, files.stds))
        self.value_head: ValueHead | None = None
        if spec.values_per_chunk:
            self.value_head = ValueHead(self.network.width, spec.values_per_chunk)
            load_head(self.value_head, folder / VALUE_HEAD_FILE)
            self.value_head.to(self.dtype)

    @classmethod
    def from_pretrained(cls, path: str, spec: PolicySpec, params: Any, loading: Loading = AS_IT_IS) -> Self:
        return cls(spec, params, Path(path), loading)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def save_pretrained(self, directory: Path) -> None:
        weights = self.network.state_dict()
        if any(".lora_" in name for name in weights):
            raise RuntimeError("published layouts have no adapters: merge them first, with models/weights/lora.py")
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        write_folder(directory, self._folder, weights, parts)
        if self.value_head is not None:
            write_tensors(directory / VALUE_HEAD_FILE, self.value_head.state_dict())

    @torch.no_grad()
    def values(self, obs: EnvObs) -> Tensor:
        return require_values(self._value_of(self._states(self._inputs(obs))[:, 0, 0]))

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        states = self._states(replay_inputs)
        log_probabilities = self._log_probabilities(states, temperature)
        return Evaluation(
            logprobs=self._pick(log_probabilities, replay_inputs["tokens"]),
            entropy=entropy(log_probabilities),
            values=self._value_of(states[:, 0, 0]),
            distribution={"logits": log_probabilities.clone()} if with_distribution else None,  # FSDP warns of views
        )

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        normalized = self.codec.from_env(actions.to(self.network.device))
        return {**self._inputs(obs), "tokens": self.codec.tokens(normalized)}

    def compile_acting(self, compiled: Callable[[Callable[..., Any]], Any], *, cuda_graphs: bool) -> None:
        self._fixed = True
        super().compile_acting(compiled, cuda_graphs=cuda_graphs)

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.network.language_model.lm_head.parameters())

    def unread_modules(self) -> list[nn.Module]:
        vision = self.network.vision_backbone
        return [*vision.featurizer.unread_modules(), *vision.fused_featurizer.unread_modules()]

    def adapter_root(self) -> nn.Module:
        return self.network

    def shard_units(self) -> list[nn.Module]:
        return self.network.blocks()

    def _states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N,C,A,H]: the hidden state that each action is read from."""
        raise NotImplementedError

    def _output(
        self, inputs: Mapping[str, Tensor], tokens: Tensor, logprobs: Tensor, values: Tensor | None
    ) -> PolicyOutput:
        """Decisions for ``tokens`` [N,C,A]."""
        return PolicyOutput(
            actions=self.codec.to_env(self.codec.normalized(tokens)),
            logprobs=logprobs,
            values=values,
            replay_inputs={**inputs, "tokens": tokens},
            tokens=tokens,
        )

    def _parts(self) -> Mapping[str, nn.Module]:
        """Modules that the folder holds beside the network."""
        return {}

    def _inputs(self, obs: EnvObs) -> dict[str, Tensor]:
        """Inputs of the network, exact and small enough to be recorded."""
        device = self.network.device
        images = [self._profile(camera_images(self.name, self.spec, obs, camera)) for camera in self._cameras]
        return {"prompt_ids": self._tokenize(obs.instructions), "images": torch.stack(images, 1).to(device)}

    def _sequence(self, inputs: Mapping[str, Tensor], *, extra: Tensor | None, tail: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`OpenVlaNetwork.sequence` of recorded inputs."""
        device = self.network.device
        prompts = (inputs["prompt_ids"] if self._fixed else trim(inputs["prompt_ids"])).to(device)
        images = normalize(inputs["images"].to(device), self.means, self.stds)
        return self.network.sequence(images, prompts, prompts != PAD, extra, tail)

    def _value_of(self, hidden: Tensor) -> Tensor | None:
        """[N,H] -> [N,V] float32."""
        return None if self.value_head is None else self.value_head(hidden.to(self.value_head.fc1.weight.dtype)).float()

    def _log_probabilities(self, hidden: Tensor, temperature: float) -> Tensor:
        """[...,H] -> [...,256] float32."""
        return scaled_log_softmax(self.network.action_logits(hidden), temperature)

    def _choose(self, log_probabilities: Tensor, *, greedy: bool, generator: torch.Generator | None) -> Tensor:
        """[...] int64 token ids."""
        chosen = log_probabilities.argmax(-1) if greedy else draw(cut(log_probabilities, self.truncation), generator)
        return chosen + self.network.first_action_token

    def _pick(self, log_probabilities: Tensor, tokens: Tensor) -> Tensor:
        """[...,256] and [...] -> [...]: of the chosen tokens."""
        return chosen_logprobs(log_probabilities, tokens.to(log_probabilities.device) - self.network.first_action_token)


def _overridden(text: Any, files: Folder, loading: Loading) -> tuple[Any, Folder]:
    """The language model's config with the overrides, and the folder whose ``config.json`` has them, too."""
    changed, key = copy.deepcopy(text), f"{loading.key}.hf_overrides"
    override({"text_config": changed}, loading.hf_overrides, key)
    check_shapes(lambda config: OpenVlaNetwork(files.config, config), text, changed, key)
    before, after = text.to_dict(), changed.to_dict()
    differing = {name: value for name, value in after.items() if before.get(name) != value}
    config = {**files.config, "text_config": {**files.config["text_config"], **differing}}
    return changed, replace(files, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaSingleParams(OpenVlaParams):
    """``model.params`` of ``openvla``."""

    camera: str = "agentview"


class OpenVlaPolicy(OpenVlaBase):
    """Categorical over 256 tokens for each of A actions, given those before it; ``replay_inputs`` have ``tokens``
    [N,1,A] int64, ids of the vocabulary."""

    Params = OpenVlaSingleParams
    name: ClassVar[str] = "openvla"

    def __init__(
        self,
        spec: PolicySpec,
        params: OpenVlaSingleParams,
        folder: Path | None = None,
        loading: Loading = AS_IT_IS,
    ) -> None:
        if spec.num_action_chunks != 1:
            raise UserError(
                f"model.num_action_chunks: got {spec.num_action_chunks}, expected 1: openvla decides on one action at "
                "a time; openvla_oft decides on several"
            )
        super().__init__(spec, params, folder, (params.camera,), loading)
        self._caches: dict[torch.Size, TokenCache] | None = None
        """Of recorded graphs."""

    @classmethod
    def write_tiny(cls, directory: Path) -> None:
        """Write a small checkpoint for LIBERO and the dummy env, with random weights, for tests and trials."""
        write_tiny(directory, with_l1_head=False)

    @torch.no_grad()
    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        inputs = self._inputs(obs)
        new, mask = self._sequence(inputs, extra=None, tail=self._embedded(inputs))
        mask = functional.pad(mask, (0, self.spec.action_dim - 1), value=True)
        cache = self._cache(mask)
        last = self.network.hidden(new, mask, causal=True, cache=cache)[:, -1]
        values = self._value_of(last)
        tokens, logprobs = [], []
        while True:
            log_probabilities = self._log_probabilities(last, temperature)
            tokens.append(self._choose(log_probabilities, greedy=greedy, generator=generator))
            logprobs.append(self._pick(log_probabilities, tokens[-1]))
            if len(tokens) == self.spec.action_dim:
                break
            last = self._next(tokens[-1], mask, cache)
        return self._output(inputs, torch.stack(tokens, 1)[:, None], torch.stack(logprobs, 1)[:, None], values)

    def compile_acting(self, compiled: Callable[[Callable[..., Any]], Any], *, cuda_graphs: bool) -> None:
        """The pass for one token."""
        self._fixed, self._caches = True, {} if cuda_graphs else None
        self._next = compiled(self._next)

    def free_buffers(self) -> None:
        if self._caches is not None:
            self._caches.clear()  # graphs that are replayed on others are recorded anew

    def _cache(self, mask: Tensor) -> TokenCache:
        """An empty one for sequences of the shape of ``mask``; recorded graphs always write to the same."""
        cache = None if self._caches is None else self._caches.get(mask.shape)
        if cache is None:
            cache = TokenCache(mask.shape[1], mask.device, stays=self._caches is not None)
        if self._caches is not None:
            self._caches[mask.shape] = cache
        cache.filled.zero_()
        return cache

    def _next(self, tokens: Tensor, mask: Tensor, cache: TokenCache) -> Tensor:
        """[N] ids -> the hidden state [N,H] of what follows; ``mask`` is of all tokens that the cache has room for."""
        return self.network.hidden(self.network.embed(tokens[:, None]), mask, causal=True, cache=cache)[:, -1]

    def _states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tail = self._embedded(inputs)
        new, mask = self._sequence(inputs, extra=None, tail=tail)
        return self.network.hidden(new, mask, causal=True)[:, None, -1 - tail.shape[1] :]

    def _embedded(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N,K,H] of the tokens that others are decided from, if there are any."""
        tokens = inputs["tokens"][:, 0, :-1] if "tokens" in inputs else inputs["prompt_ids"][:, :0]
        return self.network.embed(tokens.to(self.network.device))
