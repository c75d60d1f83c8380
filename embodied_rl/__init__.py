"""Reinforcement learning for vision-language-action policies in real simulators.

::

                     observations                    finished trajectories
      env worker ───────────────► rollout worker      ┌───────────────► actor (FSDP2)
      (simulators) ◄───────────── (policy, no grad)   │                    │ update
           │          action chunks       ▲           │                    │
           └──────────────────────────────┼───────────┘                    │
                                          └──────── weights, versioned ◄───┘

Start reading at ``tasks/embodied/wiring.py`` (who talks to whom), then ``tasks/embodied/run.py`` (the training
loop) and ``contracts.py`` (every message on the arrows above). ``launch.py`` runs the whole job.
"""

__version__ = "0.1.0"
