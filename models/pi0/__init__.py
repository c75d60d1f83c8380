"""``pi0``: PaliGemma with a Gemma action expert that denoises chunks (π0, arXiv:2410.24164), of transformers.

- ``policy``: the policy; ``files``: folders in lerobot's and in transformers' layout; ``tiny``: a small folder.
"""

from embodied_rl.models.pi0.policy import Pi0Params, Pi0Policy

__all__ = ["Pi0Params", "Pi0Policy"]
