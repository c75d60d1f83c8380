#!/usr/bin/env bash
# Proves the wheel: built, installed in another environment, run from another folder. Needs `make setup`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
main_python="$PWD/.venv/bin/python"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

echo "==> Building the wheel"
"$main_python" -m build --no-isolation --sdist --outdir "$work/dist" . >"$work/build.log" 2>&1 &&
  tar xf "$work"/dist/embodied_rl-*.tar.gz -C "$work" &&
  "$main_python" -m build --no-isolation --wheel --outdir "$work/dist" "$work"/embodied_rl-*/ >>"$work/build.log" 2>&1 ||
  { cat "$work/build.log"; exit 1; }
ls "$work/dist"

echo "==> Installing it in an environment of its own"
"$main_python" -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --no-deps --no-index "$work"/dist/*.whl
# The dependencies are those of .venv, by path: its editable install of this checkout is not visible that way.
"$main_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  >"$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"

mkdir "$work/elsewhere"
cd "$work/elsewhere"
unset PYTHONPATH
"$work/env/bin/python" - "$work/env" <<'PYTHON'
import importlib.util
import sys

import embodied_rl

assert (embodied_rl.__file__ or "").startswith(sys.argv[1]), f"imported {embodied_rl.__file__}, expected the wheel's"
for name in ("envs", "models", "config"):
    assert importlib.util.find_spec(name) is None, f"the wheel installed a top-level package {name!r}"
PYTHON

job=(task=embodied env=dummy model=mlp cluster=serial runner.max_steps=2)
echo "==> embodied-rl ${job[*]}"
OMP_NUM_THREADS=1 "$work/env/bin/embodied-rl" "${job[@]}"
echo "==> python -m embodied_rl ${job[*]}"
OMP_NUM_THREADS=1 "$work/env/bin/python" -m embodied_rl "${job[@]}"
echo "==> The wheel works"
