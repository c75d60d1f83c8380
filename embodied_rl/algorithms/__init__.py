"""The loss engine: advantage estimators, losses and filters as pure functions on tensors.

``catalog.py`` and ``levels.py`` say by name what exists and what fits together and do not import torch, so that a
config is checked before torch is loaded. Everything else takes tensors and keyword arguments, and knows of no config,
worker or process group: what has to be global over ranks is handed in as a number or as a ``reduce`` callback.
"""
