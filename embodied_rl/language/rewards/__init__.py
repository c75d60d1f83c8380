"""Reward functions for completions, and the processes that run them."""
