"""Policies: the protocol (``base.py``), the registry of names (``registry.py``), and one file for each model."""

if __name__ == "models":
    raise ImportError(
        "this package was imported as 'models', its folder's name; its only import name is 'embodied_rl.models' "
        "(under two names every module would be loaded twice). Write: import embodied_rl.models"
    )
