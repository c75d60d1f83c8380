"""``python -m embodied_rl`` is ``python train.py`` without a checkout."""

from embodied_rl.cli import main

if __name__ == "__main__":
    main()
