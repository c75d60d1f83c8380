#!/usr/bin/env bash
# Makes .venv-trackers: MLflow, SwanLab and trackio on top of .venv, whose packages it sees. Their own dependencies come
# before those of .venv, so that no pin of ours has to fit theirs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rm -rf .venv-trackers
.venv/bin/python -m venv .venv-trackers
.venv-trackers/bin/python -m pip install -q -c constraints/trackers-pins.txt \
  mlflow-skinny sqlalchemy alembic swanlab trackio
site=$(.venv-trackers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/venv.pth"
