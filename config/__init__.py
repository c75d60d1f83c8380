"""Hydra's YAML files: the one place where defaults live."""

CONFIG_MODULE = "embodied_rl.config"
GROUPS = ("task", "env", "data", "model", "algorithm", "cluster", "logger", "experiment")
"""Folders of alternatives, such as ``env=libero_10``."""
