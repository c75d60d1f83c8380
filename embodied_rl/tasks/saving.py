"""Saving of a run's checkpoints: when it is due, and whether the run waits for it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from embodied_rl.checkpoints import store as checkpoint_store
from embodied_rl.checkpoints.store import Publication, RunState
from embodied_rl.runtime import signals
from embodied_rl.runtime.worker import WorkerGroup
from embodied_rl.schema import RunnerConfig
from embodied_rl.workers.actor import ActorWorker

_GRACE_S = 10.0
"""Seconds that an update may take which SIGTERM lets finish. SLURM and Kubernetes wait for 30 by default before they
kill, and the checkpoint has to be written, too."""
_PATIENCE_S = 120.0
"""Seconds that a run which is to end waits for a checkpoint that is being written."""


@dataclass(slots=True, kw_only=True)
class CheckpointSaver:
    """The training loop tells it of every update and every finished step."""

    config: RunnerConfig
    run_dir: Path
    actor: WorkerGroup
    finished: int
    """Training steps whose result the actor holds."""
    began_with: Path | None = None
    """The checkpoint whose weights the run began with."""
    saved: int | None
    """Training steps in the newest checkpoint that was begun; None: there is none."""
    also: Callable[[Path], None] = lambda directory: None
    """Writes what the finished steps left beside the actor's state into the checkpoint."""
    published: Callable[[int, Path], None] = lambda step, directory: None
    """Told of every checkpoint that is complete."""
    updating: bool = False
    """The actor may hold part of a step."""
    interrupted: int = 0
    """The signal that came during an update, whose step is to be finished first; 0: none did."""
    _began: float = field(default_factory=lambda: time.monotonic(), init=False)
    """Time at which the run, or its newest checkpoint, began."""
    _update_began: float = field(default=0.0, init=False)
    _update_s: float = field(default=float("inf"), init=False)
    """Seconds that the last update took."""
    _unpublished: Publication | None = field(default=None, init=False)

    def update_begins(self) -> None:
        """From here on the actor may hold part of a step."""
        self.updating, self._update_began = True, time.perf_counter()

    def step_finished(self, done: int, *, last: bool) -> bool:
        """Note that training step number ``done`` is over; returns whether to save now."""
        self.finished, self.updating = done, False
        self._update_s = time.perf_counter() - self._update_began
        cfg = self.config
        if cfg.save_interval > 0 and (done % cfg.save_interval == 0 or last):
            return True
        if cfg.save_interval_seconds is None:
            return False
        # As a resumed run begins with the newest weights, rollouts must be due to get them anyway.
        due = time.monotonic() - self._began >= cfg.save_interval_seconds and done % cfg.weight_sync_interval == 0
        return due or last

    @contextlib.contextmanager
    def interruptible(self, say: Callable[[str], None]) -> Iterator[None]:
        """Within, the first Ctrl-C during an update lets it finish, since no checkpoint can be made of half of it, and
        so does the first SIGTERM if updates are short."""
        if threading.current_thread() is not threading.main_thread() or not self.config.saves:
            yield
            return
        words = {signal.SIGINT: ("interrupted", "Ctrl-C"), signal.SIGTERM: ("terminated", "SIGTERM")}
        previous = {number: signal.getsignal(number) for number in words if signals.raises(number)}

        def interrupt(number: int, frame: FrameType | None) -> None:
            restore()
            if not self.updating or (number == signal.SIGTERM and self._update_s > _GRACE_S):
                signal.raise_signal(number)
            self.interrupted = number
            word, sent = words[signal.Signals(number)]
            text = f"{word}: finishing step {self.finished + 1}'s update, then saving; {sent} again ends at once"
            threading.Thread(target=say, args=(text,)).start()  # this thread may be in the middle of a line

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)

        for number in previous:
            signal.signal(number, interrupt)
        try:
            yield
        finally:
            restore()

    def end_if_interrupted(self) -> None:
        """Raises KeyboardInterrupt or Terminated: Ctrl-C or SIGTERM came during the update that is finished now."""
        if self.interrupted:
            signal.raise_signal(self.interrupted)

    def save(self) -> None:
        """Write a checkpoint of the finished steps; with ``runner.save_async`` only begin to.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.wait()
        directory = checkpoint_store.checkpoint_dir(self.run_dir, self.finished)
        with signals.deferred():  # or nobody would know what has begun
            publication = Publication(
                scratch=checkpoint_store.begin(directory),
                directory=directory,
                state=RunState(
                    step=self.finished,
                    policy_version=self.finished,
                    initial=None if self.began_with is None else str(self.began_with.absolute()),
                ),
                max_keep=self.config.max_keep,
            )
            self._unpublished, self.saved, self._began = publication, self.finished, time.monotonic()
            self.also(publication.scratch)
            contents = tuple(self.config.save_contents)
            if self.config.save_async:
                writing = self.actor.call(ActorWorker.begin_save, publication, contents=contents)
            else:
                writing = self.actor.call(ActorWorker.save, publication.scratch, contents=contents)
        writing.wait()
        if not self.config.save_async:
            self.wait()

    def wait(self) -> None:
        """Return when the checkpoint that was begun, if any, is complete and has its name.

        Raises:
            CheckpointError: it could not be written.
        """
        written = self._unpublished
        if written is None:
            return
        self.actor.call(ActorWorker.finish_save, written.scratch).wait()
        if not self.config.save_async:
            checkpoint_store.seal(written.scratch, written.state)
        with signals.deferred():
            if not self.config.save_async:
                checkpoint_store.publish(written.scratch, written.directory, max_keep=written.max_keep)
            self._unpublished = None
        self.published(written.state.step, written.directory)

    def _appears(self, publication: Publication) -> bool:
        """Whether a checkpoint that workers write gets its name. In an update they could not answer a call."""
        until = time.monotonic() + _PATIENCE_S
        # The name may be that of an older one, from before the run went back to an earlier step.
        while publication.scratch.exists() or not publication.directory.exists():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def save_at_termination(self) -> str:
        """See that there is a checkpoint of the last finished step, if that can be; returns what came of it."""
        if not self.config.saves:
            return "no checkpoint: runner.save_interval=-1"
        if self.updating and self.saved != self.finished:
            outcome = f"no checkpoint of step {self.finished}: step {self.finished + 1} was being trained"
            if self._unpublished is None or self.interrupted:  # who asks twice does not wait
                return outcome
            state = "is complete" if self._appears(self._unpublished) else "was not written in time"
            return f"{outcome}; checkpoint of step {self._unpublished.state.step} {state}"
        if self.saved == self.finished:
            self.wait()
        elif self.finished:
            self.save()
            self.wait()
        return f"checkpoint of step {self.finished} is complete" if self.finished else "no step was finished"
