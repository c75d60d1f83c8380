"""Start a run: ``python train.py task=embodied env=libero_10``; ``--help`` says what there is."""

from embodied_rl.cli import main

if __name__ == "__main__":
    main()
