"""``tiny_vla``: a small vision-language-action transformer that trains on a CPU.

::

    camera ─ convolutions, FiLM by the instruction ─► image tokens ─┐
    instruction ─ hashed words ─────────────────────► text tokens  ─┤  first layer:    C action ┌► A × 256 bins each
    proprioception ─ sines, MLP ────────────────────► one token    ─┼────────────────► slots    ┤
                                            C learned slot tokens  ─┘  all tokens      then     └► mean ─► value head
                                                                                       slots

All C·A actions are decoded at once (as in OpenVLA-OFT, arXiv:2502.19645), each as one of 256 bins. Without sampling
each is its distribution's median.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import (
    ENCODED,
    ActionStatistics,
    Evaluation,
    Policy,
    PolicyOutput,
    PolicySpec,
    as_encoded,
    camera_images,
    camera_layers,
    check_temperature,
    require_cameras,
    require_values,
)
from embodied_rl.models.categorical import (
    NUM_BINS,
    about_mean,
    bin_range,
    bins_to_actions,
    chosen_logprobs,
    cut,
    draw,
    draw_correlated,
    entropy,
    imitation_score,
    median_bins,
    positions_among_bins,
    scaled_log_softmax,
)
from embodied_rl.params import NOT_OF_WEIGHTS, OF_GREEDY_ACTIONS

WORD_BUCKETS = 8192
"""Rows of the word table: LIBERO's words do not collide in it."""
WORD_SIZE = 64
PADDING = 0
"""The id behind the last word."""
STEM_CHANNELS = (48, 96)
"""Output channels of the convolutions before the last: the first makes a quarter of the resolution, each other a half,
so a token covers 16×16 pixels."""
FREQUENCIES = (1.0, 4.0, 16.0)
"""Frequencies of proprioception's sines and cosines, in half turns a unit: a gripper's fingers move by centimetres."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyVlaParams:
    """``model.params`` of ``tiny_vla``."""

    hidden_size: Annotated[int, Field(gt=0, multiple_of=8)] = 128
    """Width D of the transformer."""
    num_layers: PositiveInt = 4
    """The first mixes all tokens; in the others the action slots look at them."""
    num_heads: PositiveInt = 4
    max_words: PositiveInt = 24
    """Longest instruction, in words."""
    target_sigma: PositiveFloat = field(default=2.0, metadata=NOT_OF_WEIGHTS)
    """Imitation: standard deviation in bins of the Gaussian that a demonstrated action is smoothed to."""
    l1_weight: NonNegativeFloat = field(default=1.0, metadata=NOT_OF_WEIGHTS)
    """Imitation: weight of the distance between the expected and the demonstrated action."""
    noise_correlation: Annotated[float, Field(ge=0, le=1)] = field(default=0.0, metadata=NOT_OF_WEIGHTS)
    """Sampling: correlation of the draws of a chunk's steps, each dimension by itself. Independent draws (0) average
    out over a chunk of many short steps: nothing is tried that differs much."""
    spread: PositiveFloat | tuple[PositiveFloat, ...] | None = field(default=None, metadata=OF_GREEDY_ACTIONS)
    """Acting: a Gaussian of this standard deviation in bins about each distribution's mean takes its place, in sampling
    and in PPO's ratios, so that samples are the mean and a noise of known size, clipped to the range of actions, and
    without sampling the mean is played, whatever the width. A list has one for each of A dimensions. Null: the
    distribution itself, which is as wide as the demonstrations were undecided, and its median. Imitation is of the
    distribution itself either way."""
    relative_spread: NonNegativeFloat = field(default=0.0, metadata=NOT_OF_WEIGHTS)
    """With ``spread``: the Gaussian is wider where the distribution is, by this share of its own standard deviation
    (their squares are added). What is tried differs most where the policy is undecided, such as when to close a hand,
    and no draw moves such a distribution more than others. Without sampling it changes nothing."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")
        if self.relative_spread and self.spread is None:
            raise ValueError("relative_spread widens spread, which is null: set spread too, 2.0 for example")


class TinyVlaPolicy(Policy):
    """Categorical over 256 bins for each of C·A actions, given images, instruction and proprioception.

    The bins divide [-1, 1], or the range of the demonstrations that the policy was first trained on.
    """

    Params = TinyVlaParams
    distribution_type = Categorical
    truncates = True
    pictures, sharded_methods = True, ("encoded",)
    action_low: Tensor
    action_high: Tensor

    def __init__(self, spec: PolicySpec, params: TinyVlaParams) -> None:
        super().__init__()
        require_cameras("tiny_vla", spec)
        self.spec, self.params = spec, params
        if isinstance(params.spread, tuple) and len(params.spread) != spec.action_dim:
            raise UserError(
                f"model.params.spread: got {len(params.spread)} numbers, expected one, or {spec.action_dim}: one for "
                "each dimension of an action"
            )
        width = params.hidden_size
        self.register_buffer("action_low", torch.full((spec.action_dim,), -1.0))
        self.register_buffer("action_high", torch.full((spec.action_dim,), 1.0))
        self.words = nn.Embedding(WORD_BUCKETS, WORD_SIZE, padding_idx=PADDING)
        self.word_projection = nn.Linear(WORD_SIZE, width)
        self.word_positions = nn.Parameter(0.02 * torch.randn(params.max_words, width))
        self.cameras = camera_layers(
            {name: _ImageStem(shape, width) for name, shape in sorted(spec.image_shapes.items())}
        )
        self.proprio = (
            nn.Sequential(
                nn.Linear(spec.state_dim * (1 + 2 * len(FREQUENCIES)), width), nn.GELU(), nn.Linear(width, width)
            )
            if spec.state_dim
            else None
        )
        self.slots = nn.Parameter(0.02 * torch.randn(spec.num_action_chunks, width))
        self.blocks = nn.ModuleList(_Block(width, params.num_heads) for _ in range(params.num_layers))
        self.norm = nn.LayerNorm(width)
        self.action_head = nn.Linear(width, spec.action_dim * NUM_BINS)
        # A small last layer starts the policy near the uniform distribution.
        nn.init.normal_(self.action_head.weight, std=0.01)
        nn.init.zeros_(self.action_head.bias)
        self.value_head = None
        if spec.values_per_chunk:
            first, last = nn.Linear(width, width), nn.Linear(width, spec.values_per_chunk)
            # Values start at 0: others would be noise in the first steps' advantages.
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.value_head = nn.Sequential(first, nn.GELU(), last)

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.action_head.parameters())

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def set_action_statistics(self, statistics: ActionStatistics) -> None:
        """The bins divide the demonstrated range from here on: finer than [-1, 1], and nothing beyond can be done."""
        low, high = bin_range(statistics)
        self.action_low.copy_(low)
        self.action_high.copy_(high)

    @torch.no_grad()
    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        inputs = self._inputs(obs)
        slots = self._encode(inputs)
        log_probabilities = self._acted(slots, temperature)
        bins = median_bins(log_probabilities) if greedy else self._drawn(log_probabilities, generator)
        return PolicyOutput(
            actions=bins_to_actions(bins, self.action_low, self.action_high),
            logprobs=chosen_logprobs(log_probabilities, bins),
            values=self._values(slots),
            replay_inputs={**inputs, "bins": bins},
            tokens=bins,
        )

    def _drawn(self, log_probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
        left = cut(log_probabilities, self.truncation)
        if not self.params.noise_correlation:
            return draw(left, generator)
        return draw_correlated(left, self.params.noise_correlation, generator)

    @torch.no_grad()
    def values(self, obs: EnvObs) -> Tensor:
        return require_values(self._values(self._encode(self._inputs(obs))))

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """With ``positions`` instead of ``bins``, for which :meth:`evaluate` gives :func:`imitation_score`."""
        low, high = self.action_low, self.action_high
        return {**self._inputs(obs), "positions": positions_among_bins(actions.to(low.device), low, high)}

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        slots = self._encode(replay_inputs)
        if "positions" in replay_inputs:
            log_probabilities = self._log_probabilities(slots, temperature)
            logprobs = imitation_score(
                log_probabilities,
                replay_inputs["positions"].to(slots.device),
                sigma=self.params.target_sigma,
                l1_weight=self.params.l1_weight,
            )
        else:
            log_probabilities = self._acted(slots, temperature)
            logprobs = chosen_logprobs(log_probabilities, replay_inputs["bins"])
        return Evaluation(
            logprobs=logprobs,
            entropy=entropy(log_probabilities),
            values=self._values(slots),
            distribution={"logits": log_probabilities} if with_distribution else None,
        )

    def _inputs(self, obs: EnvObs) -> dict[str, Tensor]:
        """Inputs of the network, small and exact enough to be recorded: images stay uint8."""
        inputs = {"words": hash_words(obs.instructions, num_buckets=WORD_BUCKETS, max_words=self.params.max_words)}
        if self.proprio is not None:
            inputs["proprio"] = obs.state
        for camera in self.spec.image_shapes:
            inputs[f"images/{camera}"] = camera_images("tiny_vla", self.spec, obs, camera)
        return inputs

    @property
    def num_summary(self) -> int:
        return self.params.hidden_size * (1 + len(self.cameras)) + self.spec.state_dim

    @torch.no_grad()
    def summarize(self, obs: EnvObs) -> tuple[Tensor, Tensor]:
        """The mean of the slots, where each camera's features are, both normalised; the state; and the medians."""
        inputs = self._inputs(obs)
        tokens, mask = self._tokens(inputs)
        slots = self._attend(tokens, mask)
        parts = [slots.mean(1), *(token[:, -1] for token in tokens[: len(self.cameras)])]
        seen = [functional.layer_norm(part.float(), part.shape[-1:]) for part in parts]
        bins = median_bins(self._acted(slots, 1.0))
        return (
            torch.cat([*seen, *([] if self.proprio is None else [inputs["proprio"].to(slots.device)])], -1),
            bins_to_actions(bins, self.action_low, self.action_high),
        )

    def _encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, slots, D]."""
        return self._attend(*self._tokens(inputs))

    def _tokens(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """[N, tokens, D] of each camera, of the instruction, of proprioception if there is any, and of the slots; and
        [N, all tokens] bool, true where there is one."""
        device, dtype = self.slots.device, self.slots.dtype
        words = _without_padding(inputs["words"]).to(device)
        text = self.word_projection(self.words(words)) + self.word_positions[: words.shape[1]]
        said = words != PADDING
        # Not linear before the mean, or the order of words would be lost in it.
        sentence = (functional.gelu(text) * said.unsqueeze(-1)).sum(1) / said.sum(1, keepdim=True)
        stems = zip(sorted(self.spec.image_shapes), self.cameras.values(), strict=True)
        tokens = [self._seen(inputs, camera, stem, sentence, dtype) for camera, stem in stems]
        start = sum(token.shape[1] for token in tokens)
        tokens.append(text)
        if self.proprio is not None:
            tokens.append(self.proprio(_waves(inputs["proprio"].to(device)).to(dtype)).unsqueeze(1))
        tokens.append(self.slots.expand(len(words), -1, -1))
        mask = torch.ones((len(words), sum(token.shape[1] for token in tokens)), dtype=torch.bool, device=device)
        mask[:, start : start + words.shape[1]] = said
        return tokens, mask

    def _seen(
        self, inputs: Mapping[str, Tensor], camera: str, stem: nn.Module, sentence: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """[N, tokens, D] of a camera."""
        known = inputs.get(f"{ENCODED}{camera}")
        if known is not None:
            return known.to(sentence.device, dtype)
        return stem(inputs[f"images/{camera}"].to(sentence.device), sentence, dtype)

    def picture_parameters(self) -> list[nn.Parameter]:
        """The instruction modulates what is seen."""
        parts = (self.cameras, self.words, self.word_projection)
        return [self.word_positions, *(parameter for part in parts for parameter in part.parameters())]

    def encoded(self, replay_inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cameras, (tokens, _) = sorted(self.spec.image_shapes), self._tokens(replay_inputs)
        return as_encoded(replay_inputs, dict(zip(cameras, tokens, strict=False)))

    def _attend(self, tokens: Sequence[Tensor], mask: Tensor) -> Tensor:
        """[N, slots, D]."""
        x, slots = torch.cat(list(tokens), 1), len(self.slots)
        if len(self.blocks) > 1:
            x = self.blocks[0](x, None, mask)
        others, x = x[:, :-slots], x[:, -slots:]
        # Nothing changes them from here on, so they are normalised once, and each block scales them as its norm does.
        others = functional.layer_norm(others, others.shape[-1:])
        for block in self.blocks[min(1, len(self.blocks) - 1) :]:
            x = block(x, others, mask)
        return self.norm(x)

    def _log_probabilities(self, slots: Tensor, temperature: float) -> Tensor:
        """[N,C,A,256]."""
        return scaled_log_softmax(self.action_head(slots).unflatten(-1, (self.spec.action_dim, NUM_BINS)), temperature)

    def _acted(self, slots: Tensor, temperature: float) -> Tensor:
        """[N,C,A,256], with the ``spread`` that is asked for; a temperature multiplies its variance."""
        if self.params.spread is None:
            return self._log_probabilities(slots, temperature)
        check_temperature(temperature)
        log_probabilities, widening = self._log_probabilities(slots, 1.0), temperature**0.5
        sigma = widening * log_probabilities.new_tensor(self.params.spread).unsqueeze(-1)
        return about_mean(log_probabilities, sigma, widening * self.params.relative_spread).log_softmax(-1)

    def _values(self, slots: Tensor) -> Tensor | None:
        # No slot of its own: the actions would look at it, and a policy change when it gets a value head.
        return self.value_head(slots.mean(1)).float() if self.value_head else None


class _ImageStem(nn.Module):
    """uint8 images [N,H,W,3] -> tokens [N, about H/16·W/16 + 1, D]; the last says where features are."""

    grid: Tensor
    centres: Tensor

    def __init__(self, shape: tuple[int, int], width: int) -> None:
        super().__init__()
        rows, columns = (torch.linspace(-1.0, 1.0, size) for size in shape)
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
        # A constant of the shape: recomputed, not saved with the weights.
        self.register_buffer("grid", grid, persistent=False)
        channels = (*STEM_CHANNELS, width)
        self.patches = nn.Conv2d(5, channels[0], 6, stride=4, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in pairwise(channels))
        self.last = nn.Conv2d(width, width, 3, padding=1)
        widths = (*channels, width)
        self.norms = nn.ModuleList(nn.GroupNorm(8, o) for o in widths)
        # The instruction scales and shifts the features of every layer but the first (FiLM, arXiv:1709.07871).
        self.films = nn.ModuleList(nn.Linear(width, 2 * o) for o in widths[1:])
        rows, columns = (torch.linspace(-1.0, 1.0, self._tokens(size)) for size in shape)
        centres = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
        self.register_buffer("centres", centres, persistent=False)
        self.positions = nn.Parameter(_sinusoids(centres, width))
        self.sharpness = nn.Parameter(torch.full((1,), 2.0))
        self.keypoints = nn.Linear(2 * width, width)

    def forward(self, images: Tensor, sentence: Tensor, dtype: torch.dtype) -> Tensor:
        # Channels stay last in memory: convolutions take half the time so. What lies between them is float32, however
        # they calculate: CPUs take three times as long to normalise groups of bfloat16.
        x = functional.relu_(_group_norm(self.norms[0], self._patched(images.permute(0, 3, 1, 2).to(dtype))))
        for number, convolution in enumerate(self.convolutions):
            x = functional.relu_(self._modulated(number, convolution(x.to(dtype)), sentence))
        x = x + functional.relu_(self._modulated(-1, self.last(x.to(dtype)), sentence))
        features = x.flatten(2)
        # Where each feature is (spatial softmax, arXiv:1504.00702), finer than a token's size.
        where = (self.sharpness * features).softmax(-1) @ self.centres.float()
        point = self.keypoints(where.flatten(1).to(dtype)).unsqueeze(1)
        return torch.cat((features.transpose(1, 2).to(dtype) + self.positions, point), 1)

    def _tokens(self, size: int) -> int:
        """Along an axis of ``size`` pixels."""
        size = (size - 4) // 4 + 1
        for _ in self.convolutions:
            size = (size - 1) // 2 + 1
        return size

    def _patched(self, images: Tensor) -> Tensor:
        """``patches`` of colours [N,3,H,W] from 0 to 255, brought to [-1, 1], and of the grid.

        What is the same in every image goes through the convolution once.
        """
        weight, bias = self.patches.weight, self.patches.bias
        assert bias is not None
        grid = self.grid.float().permute(2, 0, 1).unsqueeze(0)
        same = torch.cat((torch.full_like(grid[:, :1], -1.0).expand(-1, 3, -1, -1), grid), 1)
        same = functional.conv2d(same, weight.float(), bias.float(), stride=4, padding=1).permute(0, 2, 3, 1)
        x = functional.conv2d(images, weight[:, :3] / 127.5, stride=4, padding=1).permute(0, 2, 3, 1).float()
        # A product with ones instead of a sum that broadcasts: its gradient is a product, too, which takes a tenth.
        added = torch.addmm(x.flatten(1), same.new_ones(len(x), 1), same.flatten(1))
        return added.view_as(x).permute(0, 3, 1, 2)

    def _modulated(self, number: int, x: Tensor, sentence: Tensor) -> Tensor:
        scale, shift = self.films[number](sentence).float()[:, :, None, None].chunk(2, 1)
        norm = self.norms[number + 1 if number >= 0 else number]
        return torch.addcmul(shift, _group_norm(norm, x), 1.0 + scale)


def _group_norm(norm: Any, x: Tensor) -> Tensor:
    """In float32.

    Args:
        norm: an ``nn.GroupNorm``, or what adapters wrap it in.
    """
    return functional.group_norm(x.float(), norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps)


class _Block(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, others: Tensor | None, mask: Tensor) -> Tensor:
        """``x`` [N,Q,D] updated; ``others`` [N,R,D], normalised, are looked at beside it; ``mask`` [N,R+Q] bool, true
        where a token may be looked at."""
        if others is not None and self._few(x.shape[1]):
            attended = self._looked_up(x, others, mask)
        else:
            y = self.attention_norm(x)
            query, norm = self._heads(self.query(y)), self.attention_norm
            if others is not None:
                y = torch.cat((torch.addcmul(norm.bias, others, norm.weight), y), 1)
            key, value = (self._heads(part) for part in self.key_value(y).chunk(2, -1))
            attended = _attention(query, key, value, mask[:, None, None]).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mlp(self.mlp_norm(x))

    def _few(self, queries: int) -> bool:
        """Whether queries times the keys' weights are less work than these times the tokens. Adapters add to what a
        layer gives, so what has them must go through it."""
        return self.num_heads * queries <= self.key_value.in_features and type(self.key_value) is nn.Linear

    def _looked_up(self, x: Tensor, others: Tensor, mask: Tensor) -> Tensor:
        """The same attention, [N,Q,D]: with ``q · (K y) = (Kᵀ q) · y`` and ``Σ p (V y) = V Σ p y`` neither keys nor
        values are computed. What is the same for all keys, such as ``q · bias``, is nothing to the softmax."""
        norm, (_, queries, width) = self.attention_norm, x.shape
        own = functional.layer_norm(x, x.shape[-1:])
        query = self.query(torch.addcmul(norm.bias, own, norm.weight)).unflatten(-1, (self.num_heads, -1))
        keys, values = self.key_value.weight.view(2, self.num_heads, -1, width)
        look = torch.einsum("nqhd,hdi->nhqi", query, keys * norm.weight).flatten(1, 2) * query.shape[-1] ** -0.5
        scores = torch.cat((look @ others.mT, look @ own.mT), -1).float()
        shares = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1).to(x.dtype)
        found = shares[..., :-queries] @ others + shares[..., -queries:] @ own
        found = torch.addcmul(norm.bias, found, norm.weight).unflatten(1, (self.num_heads, queries))
        attended = torch.einsum("nhqi,hdi->nqhd", found, values).flatten(2)
        return attended + self.key_value.bias[width:]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """[N,H,Q,d]. CPUs calculate in float32: their backward pass takes four times as long in bfloat16."""
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).to(dtype)


def _without_padding(words: Tensor) -> Tensor:
    """[N,max_words] -> [N,longest]. On accelerators as it is: they would wait for the number."""
    return words[:, : int((words != PADDING).sum(1).max())] if words.device.type == "cpu" and len(words) else words


def hash_words(instructions: Sequence[str], *, num_buckets: int, max_words: int) -> Tensor:
    """[N,max_words] int64: each lower-cased word's CRC-32 in 1 .. num_buckets - 1, then :data:`PADDING`.

    The same in every process and on every machine (Python's own ``hash`` is not).

    Raises:
        ValueError: an instruction without a word, or with more than ``max_words``.
    """
    ids = torch.full((len(instructions), max_words), PADDING, dtype=torch.int64)
    for row, instruction in enumerate(instructions):
        words = re.findall(r"[a-z0-9]+", instruction.lower())
        if not 1 <= len(words) <= max_words:
            raise UserError(
                f"instruction {instruction!r} has {len(words)} words, expected 1 to {max_words}; "
                "for longer ones raise model.params.max_words"
            )
        buckets = [1 + zlib.crc32(word.encode()) % (num_buckets - 1) for word in words]
        ids[row, : len(words)] = torch.tensor(buckets)
    return ids


def _waves(state: Tensor) -> Tensor:
    """[N,S] -> [N,7S]: the numbers, and sines and cosines of several frequencies that tell small differences."""
    turns = [math.pi * frequency * state for frequency in FREQUENCIES]
    return torch.cat((state, *(wave for turn in turns for wave in (turn.sin(), turn.cos()))), -1)


def _sinusoids(points: Tensor, width: int) -> Tensor:
    """[P,2] in [-1, 1] -> [P,width]: sines and cosines of rows and columns, from a quarter of a turn to four turns
    over the image."""
    frequencies = 0.5 * math.pi * 2.0 ** torch.linspace(-1.0, 3.0, width // 4)
    turns = [points[:, axis, None] * frequencies for axis in (0, 1)]
    return 0.5 * torch.cat([wave for turn in turns for wave in (turn.sin(), turn.cos())], -1)
