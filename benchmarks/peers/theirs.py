"""``.venv-peers/bin/python -m benchmarks.peers.theirs INPUTS OUTPUTS``: all of the peers' computations, to a file."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.metadata import version
from typing import Any

import torch

PEERS = ("verl", "rlinf", "trl")


def main() -> None:
    source, target = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    inputs = torch.load(source, weights_only=True)
    answer: dict[str, Any] = {"versions": {}, "outputs": {}, "errors": {}}
    for peer in PEERS:
        computations = importlib.import_module(f"benchmarks.peers.theirs_{peer}").COMPUTATIONS
        answer["versions"][peer] = version(peer)
        for name, computation in computations.items():
            # Fresh copies: some of these functions write into what they are given.
            given = {key: tensor.clone() for key, tensor in inputs.items()}
            try:
                answer["outputs"][f"{peer}: {name}"] = dict(computation(given))
            except Exception as error:
                answer["errors"][f"{peer}: {name}"] = f"{type(error).__name__}: {error}"
    torch.save(answer, target)


if __name__ == "__main__":
    main()
