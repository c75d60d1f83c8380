"""Simulators: the adapter protocol and their names (``base.py``), what all of them share (``chunked.py``,
``reset_states.py``), and one file for each simulator."""

if __name__ == "envs":
    raise ImportError(
        "this package was imported as 'envs', its folder's name; its only import name is 'embodied_rl.envs' "
        "(under two names every module would be loaded twice). Write: import embodied_rl.envs"
    )
