from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.training.sharding import init_process_group


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """This process as the actor's only rank."""
    yield init_process_group(device="cpu", rank=0, world_size=1, rendezvous="")
    dist.destroy_process_group()
