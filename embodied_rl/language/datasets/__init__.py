"""Data sets of prompts."""
