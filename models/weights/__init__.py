"""Weights: folders, adapters, what is shipped."""
