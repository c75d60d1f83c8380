"""The training loops. Each fits one screen; who talks to whom is in ``launch.py``."""
