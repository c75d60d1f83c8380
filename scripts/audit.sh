#!/usr/bin/env bash
# Known vulnerabilities of the packages in .venv, by pip-audit in an environment of its own. Where no index with
# vulnerabilities can be reached it says so and passes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m venv "$folder/venv"
if ! "$folder/venv/bin/pip" install -q --disable-pip-version-check pip-audit >"$folder/log" 2>&1; then
  echo "skipped: pip-audit cannot be installed from here"
  exit 0
fi
packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
timeout 300 "$folder/venv/bin/pip-audit" --path "$packages" --progress-spinner off --format json \
  >"$folder/audit.json" 2>"$folder/log" || true
.venv/bin/python - "$folder/audit.json" <<'PYTHON'
import json
import sys

try:
    with open(sys.argv[1]) as file:
        packages = json.load(file)["dependencies"]
except ValueError:
    sys.exit(print("skipped: no index with vulnerabilities can be reached"))
audited = [package for package in packages if "skip_reason" not in package]
if len(audited) < len(packages) / 2:
    sys.exit(print(f"skipped: the index knows {len(audited)} of {len(packages)} packages"))
found = [(package, vulnerability) for package in audited for vulnerability in package["vulns"]]
for package, vulnerability in found:
    fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
    print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
print(f"{len(audited)} packages audited, {len(found)} known vulnerabilities")
sys.exit(bool(found))
PYTHON
