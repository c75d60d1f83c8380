"""LIBERO: 130 tasks of a robot arm on MuJoCo."""
