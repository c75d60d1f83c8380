"""Prompts, completions and their scores."""
