"""The policy protocol: all that a new model has to provide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._pytree import register_dataclass

from embodied_rl.contracts import EnvObs, Trajectory
from embodied_rl.errors import UserError
from embodied_rl.models.weights import folder as pretrained
from embodied_rl.models.weights.loading import Loading


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Requirements on a policy: the env's spaces and the run's chunking. Derived at launch, never asked of the user."""

    action_dim: int
    num_action_chunks: int
    """C, the number of actions decided at once."""
    state_dim: int
    image_shapes: Mapping[str, tuple[int, int]]
    """Camera -> (height, width); empty for state-only envs."""
    values_per_chunk: int
    """V: 0 without value head, 1 at chunk level, C at action level."""
    action_choices: tuple[int, ...] = ()
    """Number of choices in each of A action dimensions; empty: actions are continuous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionStatistics:
    """Statistics of demonstrated actions, A numbers each."""

    min: tuple[float, ...]
    max: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    q01: tuple[float, ...]
    """The first percentile."""
    q99: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What draws of action tokens are cut to, at whatever temperature."""

    top_p: float = 1.0
    """The most likely tokens that together have this probability."""
    top_k: int | None = None
    """So many most likely tokens; None: all."""


WHOLE: Final = Truncation()
"""Nothing is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """Decisions of ``act`` for N observations."""

    actions: Tensor
    """[N,C,A] float32 in [-1, 1]; of choices their numbers, from 0."""
    logprobs: Tensor
    """[N,C,A] float32."""
    values: Tensor | None
    """[N,V] float32 or None without value head."""
    replay_inputs: Mapping[str, Tensor]
    """Each [N,...]: enough for ``evaluate`` to compute the same log-probabilities again."""
    tokens: Tensor | None = None
    """[N,C,A] int64, where actions are discrete."""

    def changed(self, change: Callable[[Tensor], Tensor]) -> PolicyOutput:
        """``change`` applied to every tensor."""
        return PolicyOutput(
            actions=change(self.actions),
            logprobs=change(self.logprobs),
            values=None if self.values is None else change(self.values),
            replay_inputs={name: change(tensor) for name, tensor in self.replay_inputs.items()},
            tokens=None if self.tokens is None else change(self.tokens),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[PolicyOutput]) -> PolicyOutput:
        """The decisions of all ``parts``, of which there is at least one."""
        first = parts[0]
        if len(parts) == 1:
            return first
        values = [part.values for part in parts if part.values is not None]
        tokens = [part.tokens for part in parts if part.tokens is not None]
        return cls(
            actions=torch.cat([part.actions for part in parts]),
            logprobs=torch.cat([part.logprobs for part in parts]),
            values=torch.cat(values) if values else None,
            replay_inputs={name: torch.cat([p.replay_inputs[name] for p in parts]) for name in first.replay_inputs},
            tokens=torch.cat(tokens) if tokens else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of ``evaluate`` for N recorded decisions, with gradients."""

    logprobs: Tensor
    """[N,C,A] float32."""
    entropy: Tensor
    """[N,C,A] float32."""
    values: Tensor | None
    """[N,V] float32."""
    distribution: Mapping[str, Tensor] | None = None
    """Parameters of ``Policy.distribution_type`` over each of [N,C,A], where they were asked for."""


# A backward pass gathers a sharded policy's weights when it comes to the tensors of an evaluation. FSDP of torch 2.11
# finds them in a dataclass only if that is registered.
register_dataclass(Evaluation)


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless actions can be drawn at ``temperature``."""
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature}: expected more than 0; greedy=True takes the mode or median instead"
        )


def require_values(values: Tensor | None) -> Tensor:
    """``values``; raise RuntimeError where the policy gave none."""
    if values is None:
        raise RuntimeError("this policy was built without value head (values_per_chunk=0)")
    return values


def require_reparameterized(policy: Policy, model_type: str) -> None:
    """Raise UserError unless critics can train the policy."""
    if not policy.reparameterized:
        raise UserError(
            f"algorithm.learner=sac: model_type={model_type} as configured gives no actions with a gradient; use "
            "model=sac_mlp, or model_type=mlp with model.params.squash=true; where actions depend on pictures, "
            "model=residual"
        )


def refuse_truncation(policy: type[Policy], truncation: Truncation) -> None:
    """Raise UserError where something would be cut, by a policy that draws no action tokens."""
    if truncation != WHOLE:
        raise UserError(
            f"algorithm.sampling_params: got top_p={truncation.top_p} and top_k={truncation.top_k}, but "
            f"{policy.__name__} draws no action tokens here; leave top_p=1 and top_k=null, or use a model with "
            "categorical actions, such as openvla or tiny_vla"
        )


def require_cameras(model_type: str, spec: PolicySpec) -> None:
    """Raise UserError where the env gives no images."""
    if not spec.image_shapes:
        raise UserError(
            f"model_type {model_type!r} acts on camera images and this env gives none; use a model that acts on the "
            "state, such as 'mlp', or give the env cameras"
        )


def camera_layers(layers: Mapping[str, nn.Module]) -> nn.ModuleDict:
    """Layers of each camera, in their order; to torch a dot in a name would be a module in a module."""
    return nn.ModuleDict({camera.replace(".", "/"): layer for camera, layer in layers.items()})


def camera_images(model_type: str, spec: PolicySpec, obs: EnvObs, camera: str) -> Tensor:
    """[N,H,W,3] uint8 of a camera.

    Raises:
        ValueError: they are missing, or have another size than the spec's.
    """
    images, expected = obs.images.get(camera), spec.image_shapes[camera]
    if images is None or tuple(images.shape[1:3]) != tuple(expected):
        got = {name: list(tensor.shape[1:3]) for name, tensor in obs.images.items()}
        raise ValueError(f"{model_type}: got images {got}, expected {camera!r} of size {list(expected)}")
    return images


ENCODED: Final = "encoded/"
"""Begins the names of replay inputs that stand for a camera's pictures: what :meth:`Policy.encoded` makes of them."""


def as_encoded(replay_inputs: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replay inputs with what was made of each camera's pictures in their place."""
    others = {name: tensor for name, tensor in replay_inputs.items() if not name.startswith("images/")}
    return others | {f"{ENCODED}{camera}": tensor for camera, tensor in found.items()}


class Policy(nn.Module):
    """Base class of every policy. Construct as ``Model(spec, params)``, ``params`` being the class's ``Params``
    dataclass built from the config's ``model.params``, or as ``Model.from_pretrained(path, spec, params)``.

    ``act`` and ``evaluate`` give the same log-probabilities for the same weights (to 1e-5 in float32): one network pass
    behind both, no dropout, the same temperature. ``forward`` *is* ``evaluate``, so that FSDP's hooks run.
    """

    Params: ClassVar[type]
    needs_weights: ClassVar[bool] = False
    """Fresh ones are of no use to a run: it starts from ``model.path`` or a checkpoint."""
    takes_choices: ClassVar[bool] = False
    """It acts in envs whose actions are choices (``PolicySpec.action_choices``), too."""
    distribution_type: type[Distribution] | None = None
    """Distribution that an action (token) is drawn from, for the exact divergence between two policies. None: it has
    no closed form."""
    truncates: bool = False
    """``act`` draws action tokens, and within ``truncation`` alone."""
    truncation: Truncation = WHOLE
    """See :meth:`truncate`."""
    attentions: ClassVar[tuple[str, ...]] = ()
    """Values of ``model.attn_implementation`` that its layers of transformers can have."""
    loading_keys: ClassVar[tuple[str, ...]] = ()
    """Those of ``model.hf_overrides``, ``revision``, ``trust_remote_code`` and ``tokenizer_path`` that it can have: its
    constructor and :meth:`from_pretrained` then take a :class:`~embodied_rl.models.weights.loading.Loading`,
    ``loading``."""
    float32_root: bool = False
    """Parameters outside of ``shard_units`` stay in the weights' precision under mixed precision: they enter the
    log-probabilities directly."""
    keeps_statistics: bool = False
    """:meth:`update_statistics` changes what it computes."""
    reparameterized: bool = False
    """It has :meth:`rsample`, :meth:`features` and :meth:`decisions`, so it can be trained through critics
    (``algorithm.learner=sac``)."""
    num_features: int = 0
    """F of :meth:`features`."""
    sharded_methods: ClassVar[tuple[str, ...]] = ()
    """Methods beside ``forward`` that run its layers where it is trained: FSDP gathers parameters for them, too."""
    pictures: ClassVar[bool] = False
    """It has :meth:`picture_parameters` and :meth:`encoded`."""
    decision_inputs: ClassVar[tuple[str, ...]] = ()
    """Names of the ``replay_inputs`` that record what was decided; the others tell what was seen."""
    spec: PolicySpec
    params: Any
    """Instance of the class's ``Params``."""

    @classmethod
    def from_pretrained(cls, path: str, spec: PolicySpec, params: Any) -> Self:
        """The policy with the weights and settings of a folder that :meth:`save_pretrained` wrote, or that was
        published in the same layout. ``path`` is the config's ``model.path``.

        Raises:
            UserError: a folder without what this policy needs, or of another one.
        """
        policy = cls(spec, params)
        pretrained.read(policy, params, Path(path))
        return policy

    @classmethod
    def try_loading(cls, path: str, params: Any, loading: Loading) -> None:
        """Find out from small files what is wrong with ``loading``, where else only reading the weights would tell.

        Raises:
            UserError: something is.
        """
        del path, params, loading

    def save_pretrained(self, directory: Path) -> None:
        """Write the folder that :meth:`from_pretrained` reads: weights as safetensors, and what is needed to use them.

        A family with a published layout writes that one.
        """
        pretrained.write(self, self.params, self.spec, directory)

    def truncate(self, truncation: Truncation) -> None:
        """From here on :meth:`act` draws from the likeliest action tokens alone.

        Log-probabilities stay those of the whole distribution, in ``act`` as in ``evaluate``; greedy actions stay, too.

        Raises:
            UserError: there are no action tokens that it draws.
        """
        if not self.truncates:
            refuse_truncation(type(self), truncation)
        self.truncation = truncation

    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        """Choose an action chunk for each observation. ``greedy`` leaves nothing to chance: the mode, or
        the median; else sample at ``temperature``."""
        raise NotImplementedError

    def values(self, obs: EnvObs) -> Tensor:
        """[N,V] float32. Raises RuntimeError without value head."""
        raise NotImplementedError

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        """Log-probabilities, entropies and values of recorded decisions under the present weights.

        Args:
            with_distribution: fill in ``Evaluation.distribution``; only for a policy with a ``distribution_type``.
        """
        raise NotImplementedError

    def rsample(self, inputs: Mapping[str, Tensor], *, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Decisions [N,K,A], as :meth:`decisions` gives them, and their log-probabilities [N,K,A], at temperature 1,
        both with gradients. Only of a policy that is :attr:`reparameterized`, as is :meth:`features`.

        Args:
            inputs: the ``replay_inputs`` that tell what was seen.
        """
        raise NotImplementedError

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N,F] of the same inputs: the part of what the policy sees that critics read."""
        raise NotImplementedError

    @property
    def decision_shape(self) -> tuple[int, int]:
        """[K,A] of :meth:`decisions`."""
        return self.spec.num_action_chunks, self.spec.action_dim

    def decisions(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """What was decided where these actions [N,C,A] were executed, [N,K,A]: here the actions themselves."""
        del inputs
        return actions

    def executed(self, inputs: Mapping[str, Tensor], decisions: Tensor) -> Tensor:
        """The actions [N,C,A] of decisions [N,K,A] in [-1, 1]: here the decisions themselves."""
        del inputs
        return decisions

    @property
    def num_summary(self) -> int:
        """F of :meth:`summarize`."""
        return self.spec.state_dim

    def summarize(self, obs: EnvObs) -> tuple[Tensor, Tensor]:
        """For another policy that builds on this one: numbers that tell what was seen [N,F], here the state, and what
        it would do without sampling [N,C,A]."""
        return obs.state, self.act(obs, greedy=True, temperature=1.0, generator=None).actions

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """``replay_inputs`` of demonstrated chunks, whose log-probabilities in ``evaluate`` imitation maximises.

        A policy without a density gives the negative of its usual imitation loss: of the absolute error of a
        deterministic head (a Laplace density up to a constant), or the squared velocity error of a flow.

        Args:
            actions: [N,C,A] float32 in [-1, 1].
            generator: for the draws of the loss, such as a flow's noise and time.
        """
        raise UserError(f"{type(self).__name__} does not learn from demonstrations; use another model")

    def picture_parameters(self) -> list[nn.Parameter]:
        """Those that :meth:`encoded` depends on. Only of a policy with :attr:`pictures`."""
        raise NotImplementedError

    def encoded(self, replay_inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same decisions for :meth:`evaluate`, with what encoders make of pictures in the pictures' place."""
        raise NotImplementedError

    def set_action_statistics(self, statistics: ActionStatistics) -> None:
        """Take notice of the actions that will be imitated, before training starts from fresh weights.

        A policy keeps the result in buffers, so that it is saved and sent with the weights. The default does nothing:
        actions are in [-1, 1] anyway.
        """
        del statistics

    def update_statistics(self, rollouts: Sequence[Trajectory], reduce: Callable[[Tensor], Tensor]) -> None:
        """Take notice of what rollouts saw, after training on them: until then old and new log-probabilities are of the
        same statistics. A policy keeps the result in buffers. The default does nothing.

        Args:
            rollouts: this rank's.
            reduce: sums a float64 tensor over all ranks.
        """
        del rollouts, reduce

    def forward(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        return self.evaluate(replay_inputs, temperature=temperature, with_distribution=with_distribution)

    def sample_lengths(self, replay_inputs: Mapping[str, Tensor]) -> Tensor | None:
        """[N,K] int64: tokens of K parts of each sample, each of which is padded to the longest in a micro-batch; None
        where all samples cost the same."""
        return None

    def sample_of(self, lengths: tuple[int, ...]) -> dict[str, Tensor]:
        """``replay_inputs`` of one sample whose parts have these lengths, whatever is in it. Only of a policy that has
        :meth:`sample_lengths`."""
        raise NotImplementedError

    def compile_acting(self, compiled: Callable[[Callable[..., Any]], Any], *, cuda_graphs: bool) -> None:
        """Put what :meth:`act` runs most through ``compiled``, in place: here the blocks.

        Args:
            cuda_graphs: tensors that are written to must stay where they are.

        Raises:
            UserError: there is nothing.
        """
        del cuda_graphs
        blocks = self.shard_units()
        if not blocks:
            raise UserError(
                f"rollout.torch_compile=true: {type(self).__name__} names no blocks to compile; set it to false, or "
                "name them in its shard_units()"
            )
        for block in blocks:
            block.forward = compiled(block.forward)

    def free_buffers(self) -> None:
        """Give back memory that is kept from one :meth:`act` to the next: it did not do for the last. Here none is."""

    def value_parameters(self) -> list[nn.Parameter]:
        """Parameters of the value head alone: they train at ``actor.optim.value_lr``."""
        return [p for name, p in self.named_parameters() if name.startswith("value_head.")]

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Parameters that weight decay leaves alone: norms, biases, and all others with fewer than two dimensions."""
        norms = [module for module in self.modules() if "norm" in type(module).__name__.lower()]
        of_norms = {id(p) for norm in norms for p in norm.parameters(recurse=False)}
        return [
            p
            for name, p in self.named_parameters()
            if p.ndim < 2 or id(p) in of_norms or name.rpartition(".")[2] == "bias"
        ]

    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters of the layer that gives the actions' distribution: adapters leave it out unless asked for."""
        return []

    def unread_modules(self) -> list[nn.Module]:
        """Parts that published weights have and no computation reads: they stay as they are, without adapters."""
        return []

    def adapter_root(self) -> nn.Module:
        """The module that adapters are put into; a checkpoint of adapters uses its names."""
        return self

    def shard_units(self) -> list[nn.Module]:
        """The blocks that FSDP gathers one at a time: one a transformer layer. Empty: the model is one unit."""
        return []
