"""AdamW with moments of 16 or 8 bits, rounded stochastically: a half or a quarter of the optimiser's memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied_rl.seeding import derived_seed
from embodied_rl.training.sharding import is_distributed
from embodied_rl.training.uncompiled import Uncompiled

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
BLOCK: Final = 256
"""Numbers of a parameter's own shard, in their order, that share a scale: the largest of them."""


class CompactAdamW(Uncompiled):
    """AdamW (arXiv:1711.05101) on float32 weights. A step computes in float32 from moments that are stored in less.

    Near 1 bfloat16 has steps of 2^-8, and the second moment changes by ``1 - beta2`` = 0.001 of itself: rounded to the
    nearest it would stand still. So each moment is rounded up or down at random, with its value as the mean. The draws
    depend on the parameter's number and its count of steps alone: a resumed run draws the same, and so do replicas.

    With int8, blocks of a moment are scaled to at most 1 and have the codes of :func:`codebook`. :meth:`state_dict` has
    them as float32, of which the same shards make the same codes again; others round to the nearest once more.

    Args:
        groups: as those of ``torch.optim.AdamW``; parameters may be sharded (DTensor).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: Literal["bfloat16", "int8"] = "bfloat16",
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._generators: dict[torch.device, torch.Generator] = {}
        self._coded = dtype == "int8"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step with the gradients that there are."""
        del closure
        for number, (group, parameter) in enumerate(self._parameters()):
            if parameter.grad is not None:
                self._update(number, parameter, parameter.grad, group)

    def _update(self, number: int, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, weight, gradient = self.state[parameter], _local(parameter), _local(gradient).float()
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in _MOMENTS:
                self._put(parameter, name, torch.zeros_like(weight, dtype=torch.float32), None)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        mean = self._get(parameter, "exp_avg").lerp_(gradient, 1 - beta1)
        square = self._get(parameter, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        generator = self._generators.setdefault(weight.device, torch.Generator(weight.device))
        generator.manual_seed(derived_seed(number, step))
        self._put(parameter, "exp_avg", mean, generator)
        self._put(parameter, "exp_avg_sq", square, generator)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        spread = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, spread, value=-group["lr"] / (1 - beta1**step))

    def state_dict(self) -> dict[str, Any]:
        """As any optimiser's: moments have their parameters' shapes and shards. Of int8 they are in host memory, since
        the device need not have room for four times as much."""
        content = super().state_dict()
        if self._coded:
            parameters = [parameter for _, parameter in self._parameters()]
            content["state"] = {
                index: {
                    "step": state["step"],
                    **{name: _on_host(parameters[index], self._get(parameters[index], name)) for name in _MOMENTS},
                }
                for index, state in content["state"].items()
            }
        return content

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimiser's, which would give the moments the weights' type, all at once."""
        saved = state_dict["state"]
        counts = {index: {k: v for k, v in state.items() if k not in _MOMENTS} for index, state in saved.items()}
        super().load_state_dict(state_dict | {"state": counts})
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, (_, parameter) in zip(indices, self._parameters(), strict=True):
            for name in _MOMENTS if index in saved else ():
                values = _local(saved[index][name]).to(_local(parameter).device, torch.float32)
                self._put(parameter, name, values, None)

    def _parameters(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, parameter) for group in self.param_groups for parameter in group["params"]]

    def _get(self, parameter: Tensor, name: str) -> Tensor:
        """A moment of this rank's shard, float32."""
        state = self.state[parameter]
        if not self._coded:
            return _local(state[name]).float()
        values = codebook(name, state[name].device)[state[name].int()]
        return (_blocks(values) * state[f"{name}_scale"][:, None]).flatten()[: values.numel()].view_as(values)

    def _put(self, parameter: Tensor, name: str, values: Tensor, generator: torch.Generator | None) -> None:
        """Store a moment, rounded at random; without a generator to the nearest."""
        state = self.state[parameter]
        if self._coded:
            state[name], state[f"{name}_scale"] = _coded(values, codebook(name, values.device), generator)
        else:
            if name not in state:
                # Not by DTensor.from_local, which takes offloaded parts to the mesh's device.
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)
            _local(state[name]).copy_(_rounded(values, generator) if generator else values)


@cache
def codebook(name: str, device: torch.device) -> Tensor:
    """At most 256 float32 in ascending order, the last one 1: what a byte stands for.

    Dynamic quantisation (arXiv:2110.02861, section 2.1): seven decades, each with twice as many steps as the one below.
    It is symmetric here, so that the largest of a block is exact. The second moment's are those of its root, squared:
    it then has the range of the first, which is divided by its root.
    """
    signed = name == "exp_avg"
    decades = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        decades.append(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    up = torch.cat(decades)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    if signed:
        up = torch.cat([up[:-1], one])
        codes = torch.cat([-up.flip(0), zero, up])
    else:
        codes = torch.cat([zero, up, one]).square()
    return codes.float().to(device)


def _coded(values: Tensor, codes: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """uint8 of the same shape, and the blocks' scales."""
    blocks = _blocks(values)
    scales = blocks.abs().amax(1)
    scaled = (blocks / scales.where(scales > 0, 1.0)[:, None]).flatten()[: values.numel()].view_as(values)
    above = torch.searchsorted(codes, scaled, out_int32=True).clamp_(1, len(codes) - 1)
    low, high = codes[above - 1], codes[above]
    threshold = 0.5 if generator is None else torch.rand(values.shape, device=values.device, generator=generator)
    chosen = above - ((scaled - low) / (high - low) <= threshold).int()
    if codes[0] == 0:
        chosen.clamp_(min=(scaled > 0).int())  # a second moment of 0 would make a step of any length
    return chosen.to(torch.uint8), scales


def _blocks(values: Tensor) -> Tensor:
    """[B,256]: the numbers in their order, zeros at the end."""
    flat = values.flatten()
    return functional.pad(flat, (0, -len(flat) % BLOCK)).view(-(-len(flat) // BLOCK), BLOCK)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_distributed(tensor) else tensor


def _on_host(parameter: Tensor, local: Tensor) -> Tensor:
    """A float32 tensor in host memory, sharded as the parameter, of this rank's part of it."""
    made = torch.empty_like(parameter, dtype=torch.float32, device="cpu", requires_grad=False)
    _local(made).copy_(local)
    return made


def _rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """The bfloat16 above or below each of ``values`` (float32): with noise added below the 16 bits that are kept, it is
    the one above as often as the value is near it."""
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return (values.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
