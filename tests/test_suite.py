"""Options of the suite itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SKIPPING = {
    "test": "import pytest\ndef test_it():\n    pytest.skip('no simulator')\n",
    "module": "import pytest\npytest.importorskip('no_such_simulator')\ndef test_it():\n    pass\n",
}


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("kind", SKIPPING)
def test_ci_can_refuse_skips(tmp_path: Path, kind: str, allowed: bool) -> None:
    file = tmp_path / "test_simulator.py"
    file.write_text(SKIPPING[kind] + "def test_other():\n    pass\n" * (kind == "test"))
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", *([] if allowed else ["--no-skips"])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if allowed:
        assert "1 skipped" in done.stdout, done.stdout + done.stderr
    else:
        assert done.returncode == 1 + (kind == "module"), done.stdout + done.stderr
        assert "which --no-skips does not allow" in done.stdout
