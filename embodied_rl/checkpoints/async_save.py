"""Writing a checkpoint while training goes on, with torch DCP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from embodied_rl.checkpoints.shard_files import ShardWriter


class AsyncWriter:
    """One rank's side; all ranks call :meth:`begin` together. At most one checkpoint is on its way.

    The state is copied first, then written from the copy by a thread. The ranks of the threads talk over a process
    group of their own, since the training's collectives go on meanwhile.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._done = threading.Event()
        self._done.set()
        self._error: BaseException | None = None

    def begin(self, state: Mapping[str, Any], directory: Path, completed: Callable[[], None]) -> None:
        """Start to write ``state``; returns when it may be changed again (a collective).

        Args:
            completed: called in the thread when every rank has written its part.
        """
        self.wait()
        if self._group is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)  # all ranks are in it
            self._group = group
        future = async_save(dict(state), storage_writer=ShardWriter(directory), process_group=self._group)
        assert not isinstance(future, AsyncSaveResponse)  # that is for stagers of one's own
        self._done.clear()

        def finish(future: Future[Any]) -> None:
            try:
                future.result()
                completed()
            except (Exception, CheckpointException) as error:  # the latter is no Exception
                self._error = error
            finally:
                self._done.set()

        future.add_done_callback(finish)

    def wait(self) -> None:
        """Return when nothing is on its way.

        Raises:
            Exception: why it could not be written; once.
        """
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
