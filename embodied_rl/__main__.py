"""``python -m embodied_rl`` is ``python train.py`` without a checkout."""

from embodied_rl.runtime.signals import said

if __name__ == "__main__":
    with said():  # also while it imports
        from embodied_rl.cli import main

        main()
