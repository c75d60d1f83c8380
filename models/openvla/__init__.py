"""``openvla_oft`` and ``openvla``: the published 7B vision-language-action models, with their file layout.

OpenVLA (arXiv:2406.09246) decodes one action token after another; OpenVLA-OFT (arXiv:2502.19645) a chunk at once.

- ``network``: image encoders, projector, language model and heads, as published.
- ``inputs``, ``actions``: from observations to the inputs, from the outputs to actions.
- ``files``: the folder; ``tiny``: a folder of the same kind that a CPU can train.
- ``policy``: the base class and ``openvla``; ``oft``: ``openvla_oft``.
"""
