#!/usr/bin/env bash
# Has the package lerobot open our data sets and our folders of π0, π0.5 and SmolVLA, in an environment that is made if it is
# not there; the variables are those of scripts/lerobot_env.sh. Nothing may be skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -x .venv-lerobot/bin/python ] || bash scripts/lerobot_env.sh
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q --no-skips \
  tests/demonstrations/lerobot/test_lerobot_library.py tests/models/flow/test_lerobot_library.py
