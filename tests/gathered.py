"""A sharded policy's weights in one piece, to compare them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from embodied_rl.models.base import Policy


def full_state_dict(policy: Policy) -> dict[str, Tensor]:
    """The whole model on the CPU, gathered from all ranks (a collective). Empty on ranks other than 0."""
    state = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Cloned: with one rank the gathered tensors are the parameters themselves, which the next update changes.
    return {name: tensor.detach().clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}
