"""Scripted experts: they act from the simulator's privileged state, and so give demonstrations. No torch is imported."""
