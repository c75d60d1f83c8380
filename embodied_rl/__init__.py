"""Reinforcement learning for vision-language-action policies, and language models, in real simulators.

One diagram for every task; the worker that has the policy records what it decided and what came of it::

    env worker     ── turns: what the last chunk did, what to act on ──►  rollout worker  ── trajectories ──►  actor
    (simulators)   ◄──────────────── answers: actions ────────────────  (policy)        ◄───── weights ────  (FSDP2)

In ``task=math`` and ``task=sft`` generation workers, which have prompts instead of env workers, stand in the rollout
workers' place; in ``task=embodied_sft`` rollout workers read trajectories from a data set, and envs serve evaluations.

Start reading at ``tasks/embodied/run.py`` (the loop, and who talks to whom), then ``contracts.py`` (every message on
the arrows above) and ``plan.py`` (what follows from a configuration). ``launch.py`` runs the whole job.
"""

__version__ = "0.2.0"
