"""Start a run: ``python train.py task=embodied env=libero_10``; ``--help`` says what there is."""

from embodied_rl.runtime.signals import said

if __name__ == "__main__":
    with said():  # also while it imports
        from embodied_rl.cli import main

        main()
