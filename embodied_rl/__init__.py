"""Reinforcement learning for vision-language-action policies, and language models, in real simulators.

One diagram for every task; the worker that has the policy records what it decided and what came of it::

    env worker     ── turns: what the last chunk did, what to act on ──►  rollout worker  ── trajectories ──►  actor
    (simulators)   ◄──────────────── answers: actions ────────────────  (policy)        ◄───── weights ────  (FSDP2)

In ``task=math`` and ``task=sft`` generation workers, which have prompts instead of env workers, stand in the rollout
workers' place; in ``task=embodied_sft`` rollout workers read trajectories from a data set, and envs serve evaluations;
in ``task=dagger`` collecting workers add to that data set.

Start reading at ``tasks/embodied/run.py`` (the loop, and who talks to whom), then ``contracts.py`` (every message on
the arrows above) and ``plan.py`` (what follows from a configuration). ``launch.py`` runs the whole job.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodied_rl.api import Callback, LoadedPolicy, Run, StopTraining, evaluate, load_policy, train
    from embodied_rl.errors import ConfigError, UserError
    from embodied_rl.report.data import Evaluation
    from embodied_rl.runtime.worker import WorkerError

__version__ = "0.2.0"

__all__ = [
    "Callback",
    "ConfigError",
    "Evaluation",
    "LoadedPolicy",
    "Run",
    "StopTraining",
    "UserError",
    "WorkerError",
    "evaluate",
    "load_policy",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import what :data:`__all__` names when it is first used: the command line imports this package, too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    homes = {
        "ConfigError": "errors",
        "UserError": "errors",
        "Evaluation": "report.data",
        "WorkerError": "runtime.worker",
    }
    return getattr(importlib.import_module(f"embodied_rl.{homes.get(name, 'api')}"), name)
