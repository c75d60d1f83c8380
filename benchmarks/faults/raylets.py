"""Three raylets, until standard input ends: ``python -m benchmarks.faults.raylets FOLDER``; ``kill N`` ends one."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final

_STORE: Final = 80 * 2**20
_BACK_S: Final = 3.0
"""Seconds after which another node comes for one that was killed."""


def main() -> None:
    os.environ.update(RAY_TMPDIR=sys.argv[1], RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": _STORE, "include_dashboard": False, "resources": {"learn": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def add() -> Any:
        return cluster.add_node(num_cpus=1, object_store_memory=_STORE, resources={"sim": 1})

    nodes = [add(), add()]

    try:
        print(f"raylets: {cluster.address}", flush=True)
        for line in sys.stdin:
            index = int(line.split()[1])
            cluster.remove_node(nodes[index], allow_graceful=False)
            print("raylets: killed", flush=True)
            time.sleep(_BACK_S)
            nodes[index] = add()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
