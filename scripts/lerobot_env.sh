#!/usr/bin/env bash
# Makes .venv-lerobot, in which a test opens our data sets with the package lerobot itself (docs/demonstrations.md).
#
# lerobot pins other versions of torch and av than this project, so it stands in an environment of its own that takes
# torch and most else from .venv, and only what its data sets import is added. Needs `make setup` first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv-lerobot
[ -x .venv/bin/python ] || { echo "run 'make setup' first: $VENV is built on .venv" >&2; exit 1; }
rm -rf "$VENV"
.venv/bin/python -m venv "$VENV"
"$VENV/bin/python" -m pip install -q --no-deps --disable-pip-version-check \
  lerobot==0.4.4 datasets==4.1.1 pandas==3.1.1 dill==0.4.1 multiprocess==0.70.19 torchvision==0.25.0 \
  draccus==0.11.6 mergedeep==1.3.4 typing-inspect==0.9.0 mypy-extensions==1.1.0 pyyaml-include==2.2 toml==0.10.2
site_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
site_packages .venv/bin/python >"$(site_packages "$VENV/bin/python")/project.pth"
echo "$VENV is ready: .venv/bin/python -m pytest tests/demonstrations/lerobot/test_lerobot_library.py"
