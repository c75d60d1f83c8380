"""The command line in forks of a process that has imported what it needs: a start with torch takes seconds.

``python warm.py SOCKET arguments...`` runs ``python -m embodied_rl arguments...`` in a fork of the :class:`Server` that
listens there, with the caller's working directory, environment and files. It imports nothing else, to be quick.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

STANDARD = (0, 1, 2)
PRELOADED = ("embodied_rl.launch", "embodied_rl.report.page", "torch.utils.tensorboard", "matplotlib.figure", "av")
"""Beside what workers need."""
LONGEST = 2**18
"""Bytes of a request."""


class Server:
    """A process that forks one command after the other.

    Args:
        address: path of a socket that does not exist yet.
    """

    def __init__(self, address: str) -> None:
        import subprocess

        self.address = address
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, address],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def serve(address: str) -> None:
    import importlib

    from embodied_rl.runtime import signals
    from tests import warm_start

    signals.die_with_parent(os.getppid())
    for name in (*PRELOADED, *warm_start.PRELOADED):
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        caller, _ = listener.accept()
        with caller:
            content, files, _, _ = socket.recv_fds(caller, LONGEST, len(STANDARD))
            if not (child := os.fork()):
                listener.close()
                caller.close()
                run(json.loads(content), files)
            for file in files:
                os.close(file)
            _, status = os.waitpid(child, 0)
            caller.send(b"%d" % os.waitstatus_to_exitcode(status))


def run(request: dict[str, Any], files: list[int]) -> None:
    """Become the command; ends the process."""
    import runpy

    from tests import warm_start

    for file, number in zip(files, STANDARD, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path.insert(0, request["directory"])  # as ``python -m`` does
    sys.argv = ["embodied_rl", *request["arguments"]]
    warm_start.forked = True  # its workers are, too
    warm_start.serve_children()
    runpy.run_module("embodied_rl", run_name="__main__", alter_sys=True)
    sys.exit()


def ask(address: str, arguments: list[str]) -> int:
    request = {"arguments": arguments, "directory": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], list(STANDARD))
        return int(server.recv(16))


if __name__ == "__main__":
    if len(sys.argv) == 2 and not os.path.exists(sys.argv[1]):
        serve(sys.argv[1])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
