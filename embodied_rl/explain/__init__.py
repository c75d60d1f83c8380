"""The keys of other systems and ours, for ``python train.py explain``."""
