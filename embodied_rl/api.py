"""The project from Python: ``import embodied_rl as er``; train, evaluate, and use a policy without Hydra in sight."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException

from embodied_rl.checkpoints.resume import CONFIG_FILE
from embodied_rl.checkpoints.store import resolve, verify
from embodied_rl.command_line import checked
from embodied_rl.composition import stored, with_recipe
from embodied_rl.errors import CheckpointError, UserError
from embodied_rl.report.data import Evaluation, find_run, read_run
from embodied_rl.report.data import Run as Record
from embodied_rl.runtime import process_worker
from embodied_rl.schema import Config
from embodied_rl.tasks.hooks import Hooks
from embodied_rl.tasks.planning import plan_of
from embodied_rl.tasks.reporting import best_step, checkpoints_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from embodied_rl.models.base import Policy

_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory: what was asked, measured and saved so far. :meth:`open` it again to see more."""

    directory: Path
    """Absolute, so that it stays the same one whatever the working directory is."""
    record: Record
    """All that the directory says."""

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Read a run directory, finished or not; an experiment's directory means its newest run.

        Raises:
            UserError: it is none.
        """
        directory = find_run(Path(path)).absolute()
        return cls(directory, read_run(directory))

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole configuration, as in ``config.yaml``."""
        return self.record.config

    @property
    def metrics(self) -> tuple[Mapping[str, Any], ...]:
        """The lines of ``metrics.jsonl``, each with its ``step``."""
        return self.record.rows

    @property
    def evaluations(self) -> Mapping[int, Evaluation]:
        """By finished training steps, ascending."""
        return self.record.evaluations

    @property
    def success(self) -> float | None:
        """Success rate or accuracy in [0, 1] of the last evaluation; None without one."""
        return self.record.last.rate if self.record.last else None

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Those that are complete and still there, by training steps."""
        return checkpoints_of(self.directory)

    @property
    def best(self) -> Path | None:
        """The checkpoint that was evaluated best, the last where none was; None: there is no checkpoint."""
        found = self.checkpoints
        rates = {step: one.rate for step, one in self.evaluations.items() if one.rate is not None}
        return found[best_step(found, rates)] if found else None

    @property
    def last(self) -> Path | None:
        """The newest checkpoint."""
        found = self.checkpoints
        return found[max(found)] if found else None

    @property
    def videos(self) -> tuple[Path, ...]:
        """Videos of all evaluations."""
        return tuple(film.path for one in self.evaluations.values() for film in one.films)

    def __repr__(self) -> str:
        rate = "" if self.success is None else f", success {self.success:.1%}"
        return f"Run({str(self.directory)!r}: {self.record.state}{rate})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{step}</td><td>{'' if one.rate is None else f'{one.rate:.1%}'}</td><td>{one.count}</td></tr>"
            for step, one in self.evaluations.items()
        )
        return (
            f"<p>{html.escape(repr(self))}</p>"
            f"<table><tr><th>after step</th><th>success</th><th>episodes</th></tr>{rows}</table>"
        )


class StopTraining(Exception):
    """Raised by a callback: training ends before its next step, and what is finished is saved."""


class Callback:
    """Called in your process while a run goes on; override what you need.

    Raise :class:`StopTraining` to end the training. Any other exception ends the run at once: checkpoints that are
    complete stay, nothing further is saved.
    """

    def on_start(self, run: Run) -> None:
        """The run directory is there, and nothing in it but the configuration."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training step number ``step`` (from 1) is finished and logged."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The policy was evaluated after ``step`` training steps."""

    def on_save(self, step: int, path: Path) -> None:
        """The checkpoint of ``step`` training steps is complete."""

    def on_end(self, run: Run) -> None:
        """The run has ended without an error."""


class _Callbacks(Hooks):
    """A user's callbacks as the loop's hooks."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self._directory = Path()

    def _all(self, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            try:
                call(callback)
            except StopTraining:
                self.stopping = True

    def started(self, run_dir: Path) -> None:
        self._directory = run_dir
        if self._callbacks:
            run = Run.open(run_dir)
            self._all(lambda callback: callback.on_start(run))

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._all(lambda callback: callback.on_step(step, metrics))

    def evaluated(self, step: int) -> None:
        if self._callbacks:
            evaluation = read_run(self._directory).evaluations[step]
            self._all(lambda callback: callback.on_evaluation(step, evaluation))

    def saved(self, step: int, checkpoint: Path) -> None:
        self._all(lambda callback: callback.on_save(step, checkpoint.absolute()))

    def ended(self, run: Run) -> None:
        self._all(lambda callback: callback.on_end(run))


def train(*overrides: str, callbacks: Sequence[Callback] = (), quiet: bool = False) -> Run:
    """Do what ``python train.py <overrides>`` does, in this process and its workers.

    Needs no ``__main__`` guard: workers do not execute your script. A script in which the run itself looks for a class
    (``env.env_type=script.py:Cart``) needs one, as it is loaded for that.

    Args:
        overrides: as on the command line.
        callbacks: called in this process.
        quiet: print nothing; ``run.log`` in the run directory has it all.

    Raises:
        ConfigError: the overrides are wrong; every mistake is named.
        UserError: the run cannot begin, or a worker refused its input.
        WorkerError: a worker failed or died.
        KeyboardInterrupt: after what is finished was saved.
    """
    with _alone():
        try:
            overrides = tuple(with_recipe(overrides))
            config = checked(overrides)
        except HydraException as error:
            raise UserError(str(error)) from None
        return _carried_out(config, overrides, callbacks, quiet)


def evaluate(what: Run | str | Path, *overrides: str, quiet: bool = False) -> Evaluation:
    """Evaluate a checkpoint with the configuration of its own run.

    Args:
        what: a checkpoint; a run or its directory means its newest checkpoint.
        overrides: ``key=value`` on top of that configuration.
        quiet: print nothing.

    Raises:
        UserError: there is no checkpoint, its run's configuration is gone, or the run cannot begin.
        WorkerError: a worker failed or died.
    """
    with _alone():
        checkpoint = _checkpoint(what)
        file = checkpoint.parent.parent / CONFIG_FILE
        if not file.is_file():
            raise CheckpointError(f"{checkpoint}: expected its run's configuration at {file}; move it back to its run")
        own = ["runner.only_eval=true", "runner.init_from=null"]
        config = stored(file, [*own, *overrides], resume_dir=checkpoint)
        evaluation = _carried_out(config, None, (), quiet).record.last
    assert evaluation is not None  # or the run would have failed
    return evaluation


def _carried_out(config: Config, command: Sequence[str] | None, callbacks: Sequence[Callback], quiet: bool) -> Run:
    plan, hooks = plan_of(config), _Callbacks(callbacks)
    from embodied_rl.launch import carry_out  # imports torch, so only once the configuration is known to be right

    run = Run.open(carry_out(plan, command, hooks, quiet=quiet))
    hooks.ended(run)
    return run


class LoadedPolicy:
    """A trained policy, to act with on a robot or in a simulator of one's own."""

    def __init__(self, policy: Policy, device: str) -> None:
        self.policy = policy.to(device).eval().requires_grad_(False)
        self.device = device

    def act(
        self,
        state: NDArray[np.float32],
        images: Mapping[str, NDArray[np.uint8]] | None = None,
        instruction: str = "",
        *,
        temperature: float = 0.0,
    ) -> NDArray[np.float32]:
        """The next chunk of actions for one observation.

        Args:
            state: [S].
            images: camera name -> [H,W,3] upright RGB.
            temperature: 0: the most likely action, as evaluations take by default; else one is drawn.

        Returns:
            [C,A] in [-1, 1], as the run's env takes them; of choices their numbers.

        Raises:
            UserError: the state has numbers that are NaN, infinite or too large for float32.
        """
        import numpy as np
        import torch

        from embodied_rl.contracts import EnvObs

        with np.errstate(over="ignore"):
            numbers = np.asarray(state, np.float32)
        if not np.isfinite(numbers).all():
            where = ", ".join(map(str, np.flatnonzero(~np.isfinite(numbers))))
            raise UserError(
                f"state: got NaN or infinity at {where}, expected finite float32 numbers; the actions would be NaN, "
                "too, so look at where the state comes from"
            )
        obs = EnvObs(
            env_ids=torch.zeros(1, dtype=torch.int64, device=self.device),
            images={name: torch.tensor(image[None], device=self.device) for name, image in (images or {}).items()},
            state=torch.tensor(numbers[None], device=self.device),
            instructions=(instruction,),
        )
        with torch.inference_mode():
            decided = self.policy.act(obs, greedy=temperature == 0.0, temperature=temperature or 1.0, generator=None)
        return decided.actions[0].cpu().numpy()


def load_policy(what: Run | str | Path, device: str = "cpu") -> LoadedPolicy:
    """The policy of a checkpoint; a run or its directory means its newest one. Or that of an exported folder.

    Raises:
        UserError: there is no whole checkpoint, or it is of a language model.
    """
    from embodied_rl.commands.export import EXPORT_FILE, exported_policy, refuse_language

    if not isinstance(what, Run) and (Path(what) / EXPORT_FILE).is_file():
        return LoadedPolicy(exported_policy(Path(what)), device)
    checkpoint = _checkpoint(what)
    verify(checkpoint)
    from embodied_rl.checkpoints.policy_record import PolicyRecord
    from embodied_rl.checkpoints.shards import load_weights
    from embodied_rl.models.registry import policy_of

    record = PolicyRecord.read(checkpoint)
    refuse_language(record.model.model_type, checkpoint)
    policy = policy_of(record.model, record.spec)
    load_weights(policy, checkpoint)
    return LoadedPolicy(policy, device)


def _checkpoint(what: Run | str | Path) -> Path:
    path = what.directory if isinstance(what, Run) else Path(what)
    found = resolve(str(path), path, key="checkpoint")
    if found is None:
        raise CheckpointError(f"{path}: holds no whole checkpoint")
    return found.absolute()


@contextmanager
def _alone() -> Iterator[None]:
    """Refuse a second run in this process, which is most often a script that is loaded for one of its classes."""
    if process_worker.is_worker or not _one_at_a_time.acquire(blocking=False):
        raise UserError(
            "a run was to be started within another one of this process: a script that the run loads for a class "
            '(script.py:Class) must start it under `if __name__ == "__main__":`; otherwise wait until it has ended'
        )
    try:
        yield
    finally:
        _one_at_a_time.release()
