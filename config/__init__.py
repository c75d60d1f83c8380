"""Hydra's YAML files: the one place where defaults live."""
