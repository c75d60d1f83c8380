"""What a run does about env workers that die, fail, hang, or hold too much memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from embodied_rl.envs.open_episodes import OpenEpisode
from embodied_rl.errors import listed
from embodied_rl.plan import Channels
from embodied_rl.runtime.memory import GIB
from embodied_rl.runtime.worker import Handle, UserFailure, WorkerError, WorkerGroup, WorkersLost
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.embodied.reporting import Rollout
from embodied_rl.tasks.rules import replaces_env_workers
from embodied_rl.tasks.wiring import RunContext, Wiring
from embodied_rl.workers.env import EnvWorker

_FAILED: Final = " failed:\n"
"""What the loss of a worker that raised an exception says."""
_DEATHS: Final = 3
"""So often env workers may die or hang in the same way in one rollout."""


class RolloutCalls:
    """A rollout under way, made again where env workers are lost in it.

    Args:
        begin: starts it, given whether it is made again: calls of the rollout workers and of the env workers.
        first: what must be over before.
    """

    def __init__(
        self,
        begin: Callable[[bool], tuple[Handle, Handle]],
        recovery: EnvRecovery | None,
        first: Handle | None = None,
    ) -> None:
        self._begin, self._recovery = begin, recovery
        self._calls: tuple[Handle, Handle] | WorkersLost
        self._start(first)

    def _start(self, first: Handle | None = None, *, again: bool = False) -> None:
        try:
            if first is not None:
                first.wait()
            if self._recovery is not None:
                self._recovery.recycle()
            self._calls = self._begin(again)
        except WorkersLost as lost:
            self._calls = lost

    def wait(self) -> Rollout:
        while True:
            try:
                if isinstance(self._calls, WorkersLost):
                    raise self._calls
                served, interacted = self._calls
                rollout = Rollout(envs=interacted.wait(), policies=served.wait())
            except WorkersLost as error:
                if self._recovery is None:
                    raise
                lost = error
            else:
                if self._recovery is not None:
                    self._recovery.succeeded()
                return rollout
            # Not in the handler, within which `signals.deferred` takes a signal for one that must not replace an error.
            self._recovery.recover(lost)
            self._start(again=True)


def recovers(config: EmbodiedConfig) -> bool:
    """Whether the run replaces env workers that it loses."""
    return config.env.max_restarts > 0 and replaces_env_workers(config)


class EnvRecovery:
    """Replaces env workers that died, failed or hung, so that the rollout they were lost in can be made again.

    What an env worker holds between rollouts is a function of the configuration, the seed and the step, and with
    auto-reset of the episodes under way. So is what the policy draws: the rollout made again is the one that would have
    been, and what the actor has of it already it is not sent twice.

    Args:
        open_episodes: as :meth:`EmbodiedRunner.open_episodes`.
    """

    def __init__(
        self,
        *,
        wiring: Wiring[EmbodiedConfig],
        env: WorkerGroup,
        rollout: WorkerGroup,
        open_episodes: Callable[[], tuple[Sequence[OpenEpisode], int]],
        context: RunContext,
    ) -> None:
        self._wiring, self._env, self._rollout = wiring, env, rollout
        self._open_episodes, self._say, self._progress = open_episodes, context.say, context.progress
        self.restarts = 0
        """Workers replaced so far that were lost."""
        self.recycled = 0
        """Workers replaced so far that held too much memory."""
        self._retired: Sequence[str] = ()
        """Names of those before the last rollout."""
        self._before: Counter[str] = Counter()
        """How workers were lost in the same rollout before, and how often."""

    def succeeded(self) -> None:
        """A rollout is complete."""
        self._before.clear()

    def recover(self, lost: WorkersLost) -> None:
        """Bring all env and rollout workers to where the rollout began.

        Raises:
            WorkerError: too many are lost, or some are lost again in the same way in the same rollout.
        """
        while True:
            try:
                self._recover(lost)
            except WorkersLost as another:
                lost = another
            else:
                return

    def _recover(self, lost: WorkersLost) -> None:
        config, how = self._wiring.config, str(lost)
        reason = _reason(how)
        # A bug comes again; a signal may have come from outside.
        again = self._before[reason] >= (1 if _FAILED in how else _DEATHS)
        if self.restarts >= config.env.max_restarts or again:
            why = "again, in the same rollout" if again else f"after {self.restarts} restarts (env.max_restarts)"
            raise WorkerError(f"{how}\n({why})") from None
        self._before[reason] += 1
        self._say(f"{how}\nreplaced; its rollout is made again", "yellow")
        lanes = self._wiring.plan.lanes.all()
        channels = [Channels.need(self._wiring.channels.turns), Channels.need(self._wiring.channels.answers)]
        for channel in channels:
            self._wiring.backend.abandon(channel, lanes)
        self._env.settle()
        self._rollout.settle()
        for channel in channels:
            channel.reset(lanes)
        self.restarts = self._progress.restarts = self.restarts + self._replace()

    def recycle(self) -> None:
        """Between rollouts: replace the workers that hold more than ``env.max_memory_gb``.

        Raises:
            UserFailure: one holds more after a single rollout.
        """
        limit = self._wiring.config.env.max_memory_gb
        if limit is None:
            return
        held = self._env.retire(int(limit * GIB))
        names = [words.partition(" ")[0] for words in held]
        if again := set(names) & set(self._retired):
            raise UserFailure(
                f"env.max_memory_gb: got {limit:g}, but {listed(held)}, and {listed(sorted(again))} did so after a "
                "single rollout; expected more than the simulators of a worker need"
            )
        self._retired = names
        if held:
            self._say(f"{'; '.join(held)}, more than env.max_memory_gb={limit:g}: replaced", "yellow")
            self.recycled += self._replace()

    def _replace(self) -> int:
        """Start env workers in the place of those that are gone; returns their number."""
        config = self._wiring.config
        new = self._env.replace(EnvWorker.setup, train=not config.runner.only_eval)
        if new and config.env.train.auto_reset and not config.runner.only_eval:
            episodes, first = self._open_episodes()
            self._env.call(EnvWorker.resume, list(episodes), first_episode=first).wait()
        return new


def _reason(how: str) -> str:
    """What two losses have in common that have one cause: not process ids, nor seconds."""
    return re.sub(r"\d+", "", how)
