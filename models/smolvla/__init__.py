"""``smolvla``: SmolVLM with an action expert that denoises chunks (SmolVLA, arXiv:2506.01844), in lerobot's layout.

- ``network``: the expert around transformers' SmolVLM, with lerobot's names; ``policy``: the policy; ``files``: sizes
  from a folder's ``config.json``; ``tiny``: a small folder.
"""

from embodied_rl.models.smolvla.policy import SmolVlaParams, SmolVlaPolicy

__all__ = ["SmolVlaParams", "SmolVlaPolicy"]
