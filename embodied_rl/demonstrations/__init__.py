"""Recorded episodes: playing, storing and reading them. LeRobot's format is in ``lerobot/``."""
