from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.training.sharding import init_process_group
from tests.training.ranks import Ranks


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """This process as the actor's only rank."""
    yield init_process_group(device="cpu", rank=0, world_size=1, rendezvous="")
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
