"""Base of the policies that denoise action chunks: sampling, log-probabilities, values, imitation, folders.

::

    cameras, instruction ─► vision-language model ─► keys and values of the prefix (once for a chunk)
                                                                   │
    state, noisy actions x, time t ─► action expert ───────────────┴─► features ─► velocity, learned deviation
                                                                          └─ of x = 0 at t = 1 ─► value head

``replay_inputs`` are the observation (``images/<camera>`` uint8, ``state`` and ``tokens``, -1 where there is none) and

==========  ==============  ==================================================================
``states``  [N,S+1,H,D]     before and after each stochastic denoising step
``steps``   [N]             which step the first is
==========  ==============  ==================================================================

or, of a demonstration, ``noise`` [N,H,D], ``time`` [N] and ``targets`` [N,H,D].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.initialization import no_init_weights

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import (
    ENCODED,
    Evaluation,
    Policy,
    PolicyOutput,
    PolicySpec,
    as_encoded,
    check_temperature,
    require_values,
)
from embodied_rl.models.flow import sde as flow
from embodied_rl.models.flow.lerobot_folder import (
    ACTION,
    ARCHITECTURE,
    OVERRIDES,
    STATE,
    LerobotFolder,
    camera_map,
    normalizer,
    prompt_tokens,
    read_config,
    read_folder,
    tiny_folder,
    tiny_tokenizer,
    without_statistics,
    write_folder,
)
from embodied_rl.models.flow.prefix import Prefix, Steps, resize_with_padding
from embodied_rl.models.weights.folder import (
    NOISE_HEAD_FILE,
    VALUE_HEAD_FILE,
    check_fit,
    load_head,
    read_weights,
    write_tensors,
)
from embodied_rl.models.weights.loading import AS_IT_IS, Loading, check_shapes, merged, override
from embodied_rl.models.weights.stored import assign

_VALUE_WIDTHS = (512, 256, 128)
_NOISE_WIDTHS = (128, 64)
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPolicyParams(flow.FlowParams):
    """``model.params`` of the policies that denoise actions."""

    train_expert_only: bool = True
    """The vision-language model stays as it is and computes without gradients."""
    detach_critic_input: bool = True
    """The value loss trains the value head alone."""
    cameras: dict[str, str | None] = field(default_factory=dict)
    """The network's camera (without ``observation.images.``) -> the env's; null: it sees nothing there. Names that are
    left out are found by name."""
    tokenizer: str | None = None
    """A folder with the tokenizer, or a name on the hub; null: that in ``model.path``, or the published one."""
    invert_gripper: bool = False
    """The last action has the opposite sign in the policy's training data: there -1 closes the gripper."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""


class FlowPolicy(Policy):
    """Base class of policies from folders in lerobot's layout. A subclass says how its network is built, which ends in
    ``action_out_proj``, and how the prefix and the features are computed.

    Args:
        folder: what ``model.path`` holds beside the weights. There are no fresh weights.
    """

    Params = FlowPolicyParams
    attentions = ("sdpa", "eager")  # flash attention has no masks of one's own
    loading_keys = ("hf_overrides",)
    pictures, sharded_methods = True, ("encoded",)
    name: ClassVar[str]
    example: ClassVar[str]
    """Published folder, for a message."""
    tokenizer_name: ClassVar[str]
    """Published tokenizer."""
    tiny_tokens: ClassVar[tuple[str | None, str, str]]
    """Start, end and padding of the small folder's tokenizer."""
    prompt_step: ClassVar[str]
    """lerobot's name of the step that writes the prompt."""
    centered_images: ClassVar[bool]
    """Half of the black is on each side of a picture; else all of it at the left and the top."""
    model: Any

    def __init__(self, spec: PolicySpec, params: FlowPolicyParams, folder: LerobotFolder | None = None) -> None:
        super().__init__()
        if folder is None:
            raise UserError(
                f"model_type {self.name!r} needs model.path, a folder such as {self.example}; "
                f"python train.py make-tiny model={self.name} <folder> writes a small one"
            )
        sizes = self.sizes_of(folder.config, folder.path)
        if spec.num_action_chunks > sizes.chunk_size:
            raise UserError(
                f"model.num_action_chunks={spec.num_action_chunks}: model.path={folder.path} predicts "
                f"{sizes.chunk_size} actions at once (chunk_size); set at most that"
            )
        self.spec, self.params, self.folder = spec, params, folder
        self._fixed, self._in_place = False, True
        self.horizon, self.max_action_dim = int(sizes.chunk_size), int(sizes.max_action_dim)
        self.max_state_dim = int(sizes.max_state_dim)
        self.cameras = camera_map(folder, params.cameras, list(spec.image_shapes))
        self.state_normalizer = normalizer(folder, STATE, spec.state_dim)
        self.action_normalizer = normalizer(folder, ACTION, spec.action_dim)
        for name, room, wanted in (
            ("state", self.max_state_dim, spec.state_dim),
            ("action", self.max_action_dim, spec.action_dim),
        ):
            if wanted > room:
                raise UserError(
                    f"model.path={folder.path} has room for {room} {name} dimensions (max_{name}_dim); the env has "
                    f"{wanted}"
                )
        with no_init_weights():
            self.model = self.build_network(sizes)
        if params.train_expert_only:
            for module in self.frozen_modules():
                module.requires_grad_(False)
        width = self.model.action_out_proj.in_features
        self.value_head = (
            _mlp((width, *_VALUE_WIDTHS, spec.values_per_chunk), nn.ReLU) if spec.values_per_chunk else None
        )
        self.noise_head = (
            _mlp((width, *_NOISE_WIDTHS, self.max_action_dim), nn.Tanh) if params.noise_method == "flow_noise" else None
        )

    @classmethod
    def from_pretrained(cls, path: str, spec: PolicySpec, params: Any, loading: Loading = AS_IT_IS) -> Self:
        directory = Path(path)
        config, statistics = cls.read_config(directory, spec)
        if loading.hf_overrides:
            config = cls._overridden(config, path, loading)
        weights = read_weights(directory)
        folder = read_folder(directory, config, weights, params.tokenizer, cls.tokenizer_name, statistics)
        policy = cls(spec, params, folder)
        own = cls.own_weights(without_statistics(weights), path)
        check_fit(policy.model.state_dict(), own, f"model.path={path}")
        dtype = getattr(torch, params.dtype)
        assign(policy.model, own, dtype)
        for file, head in policy._heads():
            load_head(head, directory / file)
            head.to(dtype)  # FSDP2 trains one type alone
        return policy

    def save_pretrained(self, directory: Path) -> None:
        write_folder(self.folder, self.published_weights(self.model.state_dict()), directory, self.prompt_step)
        for file, head in self._heads():
            write_tensors(directory / file, head.state_dict())

    @classmethod
    def write_tiny(cls, directory: Path) -> None:
        """Write a folder of lerobot's layout with a small model for LIBERO; its random weights are the same each
        time."""
        tokenizer = tiny_tokenizer(*cls.tiny_tokens)
        config = cls.tiny_config(len(tokenizer))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = cls.build_network(cls.network_config(config, str(directory)))
        folder = tiny_folder(directory, config, tokenizer, cls.tokenizer_name)
        write_folder(folder, cls.published_weights(network.state_dict()), directory, cls.prompt_step)

    @classmethod
    def read_config(cls, directory: Path, spec: PolicySpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """lerobot's configuration of a folder, and statistics that are elsewhere than in lerobot's files.

        Raises:
            UserError: it is missing, damaged, or of another policy.
        """
        config = read_config(directory)
        cls.network_config(config, str(directory))
        return config, {}

    @classmethod
    def network_config(cls, config: Mapping[str, Any], path: str) -> Any:
        """The network's sizes, ``chunk_size``, ``max_state_dim`` and ``max_action_dim`` among them, from lerobot's
        configuration.

        Raises:
            UserError: it is of another policy, or of a variant that is not done here.
        """
        raise NotImplementedError

    @classmethod
    def hf_configs(cls, sizes: Any) -> dict[str, Any]:
        """transformers' configs in what :meth:`network_config` returned, by their names in ``model.hf_overrides``."""
        raise NotImplementedError

    @classmethod
    def sizes_of(cls, config: Mapping[str, Any], path: str) -> Any:
        """:meth:`network_config`, with the overrides that the folder's or the run's configuration has."""
        sizes = cls.network_config(config, path)
        overrides = (config.get(ARCHITECTURE) or {}).get(OVERRIDES)
        if overrides:
            override(cls.hf_configs(sizes), overrides, f"model.{OVERRIDES}")
        return sizes

    @classmethod
    def _overridden(cls, config: Mapping[str, Any], path: str, loading: Loading) -> dict[str, Any]:
        """The configuration, which says of the overrides that it is used with."""
        there = config.get(ARCHITECTURE) or {}
        changed = {
            **config,
            ARCHITECTURE: {**there, OVERRIDES: merged(there.get(OVERRIDES) or {}, loading.hf_overrides)},
        }
        check_shapes(
            cls.build_network, cls.network_config(config, path), cls.sizes_of(changed, path), f"model.{OVERRIDES}"
        )
        return changed

    @classmethod
    def tiny_config(cls, vocabulary: int) -> dict[str, Any]:
        """lerobot's configuration of a small network whose tokenizer has ``vocabulary`` tokens."""
        raise NotImplementedError

    @classmethod
    def build_network(cls, config: Any) -> nn.Module:
        raise NotImplementedError

    @classmethod
    def own_weights(cls, weights: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
        """The network's state dict, from the published names."""
        raise NotImplementedError

    @classmethod
    def published_weights(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The published names, from the network's state dict."""
        raise NotImplementedError

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) that the network sees."""
        raise NotImplementedError

    def frozen_modules(self) -> list[nn.Module]:
        """Modules that ``train_expert_only`` leaves as they are, the vision-language model first; they compute the
        prefix."""
        raise NotImplementedError

    def picture_modules(self) -> list[nn.Module]:
        """Modules that compute :meth:`embedded`."""
        raise NotImplementedError

    def embedded(self, pixels: Tensor) -> Tensor:
        """[M,P,W], tokens of the language model, from pictures [M,3,H,W] in [-1, 1]."""
        raise NotImplementedError

    def prefix(self, embedded: Tensor, tokens: Tensor, state: Tensor) -> Prefix:
        """Compute what the expert attends to, once for a chunk.

        Args:
            embedded: [I·N,P,W]: N of the first of the network's cameras that see something, N of the next.
            tokens: [N,L] int64, -1 where there is none.
            state: as in :class:`Prefix`.
        """
        raise NotImplementedError

    def steps(self, prefix: Prefix, *, in_place: bool) -> Steps:
        """What all calls of :meth:`features` with this prefix have in common; ``in_place``: without gradients."""
        raise NotImplementedError

    def features(self, prefix: Prefix, steps: Steps, x: Tensor, t: Tensor) -> Tensor:
        """The expert's outputs [N,H,W] for noisy actions [N,H,D] at times [N]."""
        raise NotImplementedError

    def prompts(self, obs: EnvObs) -> list[str]:
        """What the language model reads, for each observation: the instruction and a new line."""
        return [text if text.endswith("\n") else f"{text}\n" for text in obs.instructions]

    def velocity(self, features: Tensor) -> Tensor:
        """[N,H,D]."""
        return self.model.action_out_proj(features.to(self._dtype))

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.model.action_out_proj.parameters())

    def compile_acting(self, compiled: Callable[[Callable[..., Any]], Any], *, cuda_graphs: bool) -> None:
        """The expert's pass over the noisy actions, as one function of unchanging shapes."""
        self._fixed, self._in_place = True, not cuda_graphs
        self.features = compiled(self.features)

    @torch.no_grad()
    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        """``greedy`` follows the ODE, from noise that is drawn as ever; else one or all steps are stochastic.

        ``temperature`` scales the deviation of the stochastic steps.
        """
        inputs = self._inputs(obs)
        prefix = self._prefix(inputs, in_place=self._in_place)
        path, logprobs = flow.sample(
            self._velocity_of(prefix),
            self._draw_noise(len(obs), generator),
            self.params,
            executed=self._executed,
            greedy=greedy,
            temperature=temperature,
            generator=generator,
        )
        return PolicyOutput(
            actions=self._to_env(path.actions),
            logprobs=logprobs,
            values=self._values(prefix, len(obs)),
            replay_inputs={**inputs, "states": path.states, "steps": path.steps},
        )

    @torch.no_grad()
    def values(self, obs: EnvObs) -> Tensor:
        prefix = self._prefix(self._inputs(obs), in_place=self._in_place)
        return require_values(self._values(prefix, len(obs)))

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        check_temperature(temperature)
        prefix = self._prefix(replay_inputs)
        if "targets" in replay_inputs:
            logprobs = -self._velocity_error(prefix, replay_inputs)
            entropy = torch.zeros_like(logprobs)
        else:
            logprobs, entropy = flow.log_likelihood(
                self._velocity_of(prefix),
                replay_inputs["states"].to(self.device),
                replay_inputs["steps"].to(self.device),
                self.params,
                executed=self._executed,
                temperature=temperature,
            )
        values = self._values(prefix, len(logprobs))
        return Evaluation(logprobs=logprobs, entropy=entropy, values=values)

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Noise and time are drawn here; the log-probability is minus the squared error of the velocity there.

        The network predicts more steps than are executed. They are filled with the last action, and do not count.
        """
        count = len(obs)
        targets = self._from_env(actions.to(self.device))
        targets = torch.cat((targets, targets[:, -1:].expand(-1, self.horizon - targets.shape[1], -1)), 1)
        return {
            **self._inputs(obs),
            "noise": self._draw_noise(count, generator),
            "time": flow.draw_time(count, generator, self._draw_device(generator)).to(self.device),
            "targets": targets,
        }

    @property
    def device(self) -> torch.device:
        return self.action_normalizer.origin.device

    @property
    def _executed(self) -> tuple[int, int]:
        return self.spec.num_action_chunks, self.spec.action_dim

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.action_out_proj.weight.dtype

    def _heads(self) -> list[tuple[str, nn.Module]]:
        """Files and heads that published folders do not have."""
        heads = ((VALUE_HEAD_FILE, self.value_head), (NOISE_HEAD_FILE, self.noise_head))
        return [(file, head) for file, head in heads if head is not None]

    def _trains_prefix(self) -> bool:
        """Also with adapters in an otherwise frozen model."""
        parameters = (p for part in self.frozen_modules() for p in part.parameters())
        return torch.is_grad_enabled() and any(p.requires_grad for p in parameters)

    def _prefix(self, inputs: Mapping[str, Tensor], *, in_place: bool = False) -> Prefix:
        tokens = inputs["tokens"]
        if not self._fixed:
            # Padding changes nothing; columns that are padding in all samples are left out.
            tokens = tokens[:, : int((tokens != _NO_TOKEN).sum(1).max())]
        tokens = tokens.to(self.device)
        state = self.state_normalizer.normalize(inputs["state"].to(self.device).float())
        state = functional.pad(state, (0, self.max_state_dim - state.shape[1]))
        with torch.set_grad_enabled(self._trains_prefix()):
            prefix = self.prefix(self._embedded(inputs), tokens, state)
        return replace(prefix, steps=self.steps(prefix, in_place=in_place))

    @property
    def _seeing(self) -> list[str]:
        """The env's cameras that the network looks through, in its order."""
        return [camera for camera in self.cameras.values() if camera is not None]

    def _embedded(self, inputs: Mapping[str, Tensor]) -> Tensor:
        known = [inputs.get(f"{ENCODED}{camera}") for camera in self._seeing]
        if known[0] is not None:
            return torch.cat([tensor.to(self.device, self._dtype) for tensor in known if tensor is not None])
        images = [inputs[f"images/{camera}"].to(self.device) for camera in self._seeing]
        pixels = [resize_with_padding(image, self.image_size, centered=self.centered_images) for image in images]
        return self.embedded(torch.cat(pixels).to(self._dtype))

    def picture_parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.picture_modules() for parameter in module.parameters()]

    def encoded(self, replay_inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        embedded = self._embedded(replay_inputs).chunk(len(self._seeing))
        return as_encoded(replay_inputs, dict(zip(self._seeing, embedded, strict=True)))

    def _features(self, prefix: Prefix, x: Tensor, t: Tensor) -> Tensor:
        assert prefix.steps is not None
        return self.features(prefix, prefix.steps, x, t)

    def _velocity_of(self, prefix: Prefix) -> flow.Velocity:
        def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            features = self._features(prefix, x, t)
            log_std = None
            if self.noise_head is not None:
                log_std = flow.learned_log_std(_apply(self.noise_head, features))
            return self.velocity(features).float(), log_std

        return velocity

    def _velocity_error(self, prefix: Prefix, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N,C,A], squared."""
        noise, targets, t = (inputs[name].to(self.device) for name in ("noise", "targets", "time"))
        x = t[:, None, None] * noise + (1.0 - t[:, None, None]) * targets
        velocity = self.velocity(self._features(prefix, x, t)).float()
        chunks, dims = self._executed
        return (velocity - (noise - targets))[:, :chunks, :dims].square()

    def _values(self, prefix: Prefix, count: int) -> Tensor | None:
        """From the expert's mean output at t = 1 for the noise's mean, so that a value is one of the observation alone
        and not of the noise that decided the actions."""
        if self.value_head is None:
            return None
        x = torch.zeros(count, self.horizon, self.max_action_dim, device=self.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.params.detach_critic_input):
            mean = self._features(prefix, x, torch.ones(count, device=self.device)).float().mean(1)
        return _apply(self.value_head, mean).float()

    def _inputs(self, obs: EnvObs) -> dict[str, Tensor]:
        """Inputs of the network, as they are recorded."""
        inputs = {"state": obs.state, "tokens": self._tokens(self.prompts(obs))}
        for camera in self._seeing:
            inputs[f"images/{camera}"] = obs.images[camera]
        return inputs

    def _tokens(self, prompts: list[str]) -> Tensor:
        tokens = torch.full((len(prompts), self.folder.max_prompt_length), _NO_TOKEN)
        known = {prompt: prompt_tokens(self.folder, prompt) for prompt in set(prompts)}
        for row, prompt in enumerate(prompts):
            tokens[row, : len(known[prompt])] = torch.tensor(known[prompt])
        return tokens

    def _draw_device(self, generator: torch.Generator | None) -> torch.device:
        return self.device if generator is None else generator.device

    def _draw_noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        shape = (count, self.horizon, self.max_action_dim)
        return torch.randn(shape, generator=generator, device=self._draw_device(generator)).to(self.device)

    def _to_env(self, normalized: Tensor) -> Tensor:
        """[N,H,D] -> [N,C,A] in [-1, 1]."""
        chunks, dims = self._executed
        actions = self.action_normalizer.unnormalize(normalized[:, :chunks, :dims])
        return self._gripper(actions).clamp(-1.0, 1.0)

    def _from_env(self, actions: Tensor) -> Tensor:
        """[N,C,A] -> [N,C,D], normalised and filled with zeros."""
        normalized = self.action_normalizer.normalize(self._gripper(actions))
        return functional.pad(normalized, (0, self.max_action_dim - normalized.shape[-1]))

    def _gripper(self, actions: Tensor) -> Tensor:
        if not self.params.invert_gripper:
            return actions
        return torch.cat((actions[..., :-1], -actions[..., -1:]), -1)


def _mlp(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    """A small last layer starts a value at 0, and a deviation in the middle of its range."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    last = layers[-2]
    assert isinstance(last, nn.Linear)
    nn.init.normal_(last.weight, std=0.1 / math.sqrt(widths[-2]))
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers[:-1])


def _apply(head: nn.Sequential, x: Tensor) -> Tensor:
    return head(x.to(next(head.parameters()).dtype))
