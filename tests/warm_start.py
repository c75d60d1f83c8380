"""Processes of multiprocessing's ``spawn``, forked from one that has imported torch: 0.1 s of CPU instead of 1.5 s.

A test's workers are children of its process, as if spawned: the same descriptors, environment, directory, signals and
exit codes. What a start itself does is tested with ``@pytest.mark.cold_start``, by which processes are spawned.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

enabled = True
forked = False
"""This process was."""
PRELOADED = (
    *("embodied_rl.workers.actor", "embodied_rl.workers.env", "embodied_rl.workers.generation"),
    *("embodied_rl.workers.rollout", "embodied_rl.models.mlp", "embodied_rl.envs.dummy", "torch._dynamo"),
    *("embodied_rl.models.causal_lm", "embodied_rl.models.weights.lora", "transformers.models.qwen2.modeling_qwen2"),
    *("embodied_rl.checkpoints.shards", "torch.distributed.fsdp"),
)
STANDARD = (0, 1, 2)
LONGEST = 2**17
"""Bytes of a request."""
MOST_FILES = 253
"""SCM_MAX_FD of the kernel."""
# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

_spawn = util.spawnv_passfds
_starting = threading.Lock()
_server: socket.socket | None = None


def install() -> None:
    """From here on spawned Python processes of this one are forked, while :data:`enabled`."""
    util.spawnv_passfds = _start


def _start(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    code = next((text for text in args if isinstance(text, str) and "spawn_main(" in text), None)
    files = [*STANDARD, *passfds]
    if not enabled or code is None or len(files) > MOST_FILES:
        return _spawn(path, args, passfds)
    request = {
        "code": code,
        "files": files,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    with _starting:
        server = _running()
        _adopt(True)  # the server's child ends, so that its own child comes to us
        try:
            socket.send_fds(server, [json.dumps(request).encode()], files)
            return int(server.recv(32))
        finally:
            _adopt(False)


def _adopt(wanted: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _running() -> socket.socket:
    global _server
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is not for it
            )
    return _server


def serve(caller: socket.socket) -> None:
    """Fork a process for each request, until the caller is gone."""
    parent = os.getppid()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    while True:
        content, files, _, _ = socket.recv_fds(caller, LONGEST, MOST_FILES)
        if not content:
            os._exit(0)
        reader, writer = os.pipe()
        if not (between := os.fork()):
            if child := os.fork():
                os.write(writer, b"%d" % child)
                os._exit(0)
            while (adopted := os.getppid()) != parent:
                if adopted == 1:
                    os._exit(1)
                time.sleep(0.0005)
            for file in (reader, writer, caller.detach()):
                os.close(file)
            become(json.loads(content), files)
            return
        for file in (*files, writer):
            os.close(file)
        os.waitpid(between, 0)
        caller.send(os.read(reader, 32))
        os.close(reader)


def serve_children() -> None:
    """Let this process, if it was forked, fork its own likewise. Only while it has no threads."""
    global _server
    if not forked:
        return
    _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        _server.close()
        try:
            serve(theirs)
        except SystemExit as ending:
            os._exit(int(ending.code or 0))
        os._exit(0)
    theirs.close()
    install()


def become(request: dict[str, Any], files: list[int]) -> None:
    """Take on what a new process would have been given, and run its code."""
    global forked
    forked = True
    above = max(*request["files"], *files) + 1
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    os.closerange(len(STANDARD), above)
    for copy, number in zip(copies, request["files"], strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.argv = ["-c", "--multiprocessing-fork"]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(request["code"], vars(main))


def main(file: int) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    serve(socket.socket(fileno=file))
