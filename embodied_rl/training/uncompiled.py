"""torch's optimisers without what surrounds their methods for its compiler.

Importing that takes a second and 60 MB in every process that trains, and nothing here compiles an optimiser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer


def _plain(method: Callable[..., Any]) -> Any:
    return getattr(method, "__wrapped__", method)


class Uncompiled(Optimizer):
    """The base's methods as they are written there. What is called is the same."""

    add_param_group = _plain(Optimizer.add_param_group)
    zero_grad = _plain(Optimizer.zero_grad)
    state_dict = _plain(Optimizer.state_dict)
    load_state_dict = _plain(Optimizer.load_state_dict)


class UncompiledAdamW(Uncompiled, AdamW):
    """``torch.optim.AdamW``, by the same functions."""

    step = torch.no_grad()(_plain(AdamW.step))
