"""What fine-tuning adds to the network: OpenVLA-OFT's L1 head and proprioception, and a value head for RL.

Modules have the names of the published ``action_head--*`` and ``proprio_projector--*`` files.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

RESIDUAL_BLOCKS = 2


class ProprioProjector(nn.Module):
    """Normalised proprioception [N,S] -> one token of the language model [N,H]."""

    def __init__(self, state_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(state)))


class L1ActionHead(nn.Module):
    """Hidden states of the slots [N,C·A,H] -> normalised actions [N,C,A], trained with the absolute error."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _MlpResNet(width * action_dim, width, action_dim)

    def forward(self, slots: Tensor) -> Tensor:
        # The A slots of an action side by side.
        return self.model(slots.unflatten(1, (-1, self.action_dim)).flatten(2))


class ValueHead(nn.Module):
    """Hidden state of the first slot [N,H] -> values [N,V]; 4096 -> 512 -> 128 -> V for the published width."""

    def __init__(self, width: int, num_values: int) -> None:
        super().__init__()
        first, second = max(width // 8, 16), max(width // 32, 16)
        self.fc1 = nn.Linear(width, first)
        self.fc2 = nn.Linear(first, second)
        self.out = nn.Linear(second, num_values, bias=False)
        nn.init.normal_(self.out.weight, std=0.02)  # values start near 0

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(functional.gelu(self.fc2(functional.gelu(self.fc1(hidden)))))


class _MlpResNet(nn.Module):
    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width_in)
        self.fc1 = nn.Linear(width_in, hidden)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(hidden) for _ in range(RESIDUAL_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)
