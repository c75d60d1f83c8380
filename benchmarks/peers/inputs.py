"""What both sides compute from: named tensors, a function of the seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Outputs = Mapping[str, Tensor]
Computation = Callable[[Inputs], Outputs]

GROUP, LARGE_GROUP = 4, 6
SEQUENCES, LENGTH = 24, 40
CHUNKS, ENVS, STEPS, ACTION_DIM = 12, 24, 4, 7


class Computations(dict[str, Computation]):
    """Functions by name; ``@computations("name")`` adds one."""

    def __call__(self, name: str) -> Callable[[Computation], Computation]:
        def add(function: Computation) -> Computation:
            if name in self:
                raise ValueError(f"two computations are called {name!r}")
            self[name] = function
            return function

        return add


def draw(seed: int = 0) -> dict[str, Tensor]:
    """All inputs, float32 where not bool or integer."""
    generator = torch.Generator().manual_seed(seed)
    return {**_sequences(generator), **_rollout(generator), **_units(generator)}


def _sequences(generator: torch.Generator) -> dict[str, Tensor]:
    """[B,L]: completions of a language model, a group's members side by side."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shape = SEQUENCES, LENGTH
    position = torch.arange(LENGTH)
    lengths = torch.randint(10, LENGTH + 1, (SEQUENCES, 1), generator=generator)
    lengths[0] = LENGTH
    mask = position < lengths
    without_one = mask.clone()
    without_one[3] = False
    logprobs = -3.0 * torch.rand(shape, generator=generator)
    old = logprobs - 0.4 * normal(*shape)
    one_hot = torch.zeros(shape, dtype=torch.bool)
    one_hot[1, 2] = True
    scores = normal(SEQUENCES)
    # All members of the first group alike, by a number that binary floats cannot hold.
    equal_scores = scores.clone()
    equal_scores[:LARGE_GROUP] = 0.9
    return {
        "mask": mask,
        "mask_with_holes": mask & ((position < 4) | (position >= 9)),
        "mask_without_one": without_one,
        "mask_late": position >= lengths // 2,
        "last": position == lengths - 1,
        "logprobs": logprobs,
        "old_logprobs": old,
        "proximal_logprobs": old + 0.3 * normal(*shape),
        "reference_logprobs": logprobs + 0.5 * normal(*shape),
        "far_logprobs": logprobs - 9.0 * normal(*shape),
        "one_unit": one_hot,
        "advantages": normal(*shape),
        "sequence_advantages": normal(SEQUENCES, 1).expand(shape).contiguous(),
        "values": normal(*shape),
        "old_values": normal(*shape),
        "returns": normal(*shape),
        "token_rewards": normal(*shape),
        "scores": scores,
        "equal_scores": equal_scores,
        "group_ids": torch.arange(SEQUENCES) // GROUP,
        "large_group_ids": torch.arange(SEQUENCES) // LARGE_GROUP,
        "versions": torch.randint(1, 6, (SEQUENCES,), generator=generator),
        "measured_kl": torch.tensor([0.02, 0.09, 0.11, 0.5, 0.1, 0.001]),
    }


def _rollout(generator: torch.Generator) -> dict[str, Tensor]:
    """[T,N,C]: chunks of simulator steps. An env's episode ends once at most, by success or by the limit."""
    total = CHUNKS * STEPS
    shape = CHUNKS, ENVS, STEPS
    # From the second chunk on; beyond the last step means that the episode does not end.
    end = torch.randint(STEPS, total + STEPS, (ENVS,), generator=generator)
    by_limit = torch.rand(ENVS, generator=generator) < 0.5
    step = torch.arange(total)[:, None]

    def in_chunks(x: Tensor) -> Tensor:
        return x.view(CHUNKS, STEPS, ENVS).transpose(1, 2).contiguous()

    ended = in_chunks(step == end)
    valid = in_chunks(step <= end)
    whole = valid.any(-1, keepdim=True).expand(shape).contiguous()
    return {
        "ended": ended,
        "by_limit": by_limit,
        "valid": valid,
        "valid_chunks": whole,
        "rewards": torch.randn(shape, generator=generator),
        # One more than chunks: the value of what follows the last.
        "step_values": torch.randn((CHUNKS + 1, ENVS, STEPS), generator=generator),
        "final_values": torch.randn((ENVS,), generator=generator),
        "env_group_ids": torch.arange(ENVS) // GROUP,
        "many_ends": torch.rand(shape, generator=generator) < 0.05,
    }


def _units(generator: torch.Generator) -> dict[str, Tensor]:
    """[B,C,A]: log-probabilities of action chunks, and advantages at the level of steps."""
    shape = ENVS, STEPS, ACTION_DIM
    logprobs = -2.0 * torch.rand(shape, generator=generator)
    return {
        "action_logprobs": logprobs,
        "action_old_logprobs": logprobs - 0.1 * torch.randn(shape, generator=generator),
        "step_advantages": torch.randn(shape[:2], generator=generator),
        "step_valid": torch.arange(STEPS) < torch.randint(1, STEPS + 1, (ENVS, 1), generator=generator),
    }
