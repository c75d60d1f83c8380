#!/usr/bin/env bash
# Makes .venv-optional: MLflow, SwanLab, trackio and EnvPool on top of .venv, whose packages it sees. Their own
# dependencies come before those of .venv, so that no pin of ours has to fit theirs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rm -rf .venv-optional
.venv/bin/python -m venv .venv-optional
.venv-optional/bin/python -m pip install -q -c constraints/optional-pins.txt \
  mlflow-skinny sqlalchemy alembic swanlab trackio envpool
site=$(.venv-optional/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/venv.pth"
