#!/usr/bin/env bash
# Makes .venv-peers: the published packages of peers on a CPU, for benchmarks only. Quick when all is in place.
#
#   PYTHON=python3.12     the interpreter to use (default: .venv's)
#   TORCH_INDEX_URL=URL   where to look for torch's CPU build if pip's own sources lack it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly VENV=.venv-peers STAMP=.venv-peers/.setup-stamp PINS=benchmarks/peers/requirements.txt
readonly PYTHON="${PYTHON:-.venv/bin/python}" TORCH_INDEX_URL="${TORCH_INDEX_URL:-}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PYTHONNOUSERSITE=1
unset PYTHONHOME PYTHONPATH PIP_REQUIRE_VIRTUALENV PIP_TARGET PIP_USER PIP_PREFIX || true

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

command -v "$PYTHON" >/dev/null || fail "no such command: $PYTHON. Run 'make setup' first, or name one: PYTHON=python3.11"
torch="torch==$(sed -n 's/^torch==//p' constraints/pins.txt)+cpu"
wanted="$(printf '%s\n' "$PWD" "$("$PYTHON" --version)" "$torch" && sha256sum "$PINS")"
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

rm -rf "$VENV"
"$PYTHON" -m venv "$VENV"
# Everything without its dependencies: two of the peers pin versions that exclude each other's, and none of those pins
# matters to the modules used here. torch first: nothing can then bring its CUDA build.
"$VENV/bin/python" -m pip install --no-deps ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$torch" ||
  fail "pip found no $torch; name an index or a folder that has it: TORCH_INDEX_URL=URL $0"
"$VENV/bin/python" -m pip install --no-deps -r "$PINS" || fail "The peers could not be installed; pip's message is above."
printf '%s\n' "$wanted" >"$STAMP"
printf 'Made %s (%s s)\n' "$VENV" "$SECONDS"
