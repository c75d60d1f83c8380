"""The loss engine: advantage estimators, losses and filters as pure functions on tensors.

``catalog.py`` has their names and what each needs, and does not import torch, so that a config is checked before torch
is loaded. Everything else takes tensors and keyword arguments, and knows of no config, worker or process group: a
number that is global over ranks is handed in, or computed with a ``reduce`` callback.
"""
