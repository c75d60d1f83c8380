"""AdamW with moments in bfloat16, rounded stochastically: half the memory of the optimiser's state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from embodied_rl.seeding import derived_seed

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class CompactAdamW(Optimizer):
    """AdamW (arXiv:1711.05101) on float32 weights. A step computes in float32 from moments that are stored in bfloat16.

    Near 1 bfloat16 has steps of 2^-8, and the second moment changes by ``1 - beta2`` = 0.001 of itself: rounded to the
    nearest it would stand still. So each moment is rounded up or down at random, with its value as the mean. The draws
    depend on the parameter's number and its count of steps alone: a resumed run draws the same, and so do replicas.

    Args:
        groups: as those of ``torch.optim.AdamW``; parameters may be sharded (DTensor).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step with the gradients that there are."""
        del closure
        parameters = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for number, (group, parameter) in enumerate(parameters):
            if parameter.grad is not None:
                self._update(number, parameter, parameter.grad, group)

    def _update(self, number: int, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update({name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in _MOMENTS})
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        weight, gradient = _local(parameter), _local(gradient).float()
        first, second = (_local(state[name]) for name in _MOMENTS)
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        generator = self._generators.setdefault(weight.device, torch.Generator(weight.device))
        generator.manual_seed(derived_seed(number, step))
        first.copy_(_rounded(mean, generator))
        second.copy_(_rounded(square, generator))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        spread = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, spread, value=-group["lr"] / (1 - beta1**step))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimiser's, which would give the moments the weights' type."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].to(torch.bfloat16) for name in _MOMENTS})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """The bfloat16 above or below each of ``values`` (float32): with noise added below the 16 bits that are kept, it is
    the one above as often as the value is near it."""
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return (values.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
