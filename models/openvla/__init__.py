"""``openvla_oft`` and ``openvla``: the published 7B vision-language-action models, with their file layout.

OpenVLA (arXiv:2406.09246) decodes one action token after another; OpenVLA-OFT (arXiv:2502.19645) a chunk at once.

- ``vision``: the two image encoders and the projector; ``network``: with the language model, as published;
  ``heads``: what fine-tuning adds.
- ``images``, ``jpeg``, ``prompts``, ``actions``: from observations to the inputs, from the outputs to actions.
- ``files``: the folder; ``tiny``, ``tiny_tokenizer``: a folder of the same kind that a CPU can train.
- ``policy``: what both models share; ``oft``, ``autoregressive``: the two.
"""
