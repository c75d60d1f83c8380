"""Scripted experts: they act from the simulator's privileged state and give demonstrations. No torch is imported."""
