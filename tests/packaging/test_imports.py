"""One import name for everything, and no torch before a configuration is known to be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.test_rooms import HEAVY

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("name", ["envs", "models"])
def test_folders_refuse_their_top_level_name(name: str) -> None:
    """Else one module could be loaded twice, and its classes would not be instances of each other."""
    done = run_python(f"import {name}")
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert f"embodied_rl.{name}" in done.stderr


@pytest.mark.parametrize("name", ["envs", "models", "config"])
def test_folders_answer_to_their_package_name(name: str) -> None:
    done = run_python(f"import embodied_rl.{name} as module; print(module.__name__)")
    assert done.stdout.strip() == f"embodied_rl.{name}", done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from embodied_rl.cli import main
try:
    main(["--help"])
except SystemExit as stop:
    assert not stop.code, stop.code
print("loaded:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "python train.py env=libero_10" in done.stdout
    assert done.stdout.strip().endswith("loaded: []")


def test_unknown_key_is_answered_before_anything_heavy() -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: print("loaded:", [name for name in {HEAVY!r} if name in sys.modules]))
from embodied_rl.cli import main
main(["env=dummy", "runner.max_step=2"])
"""
    done = run_python(code)
    assert done.returncode == 2, done.stderr
    assert "runner.max_steps" in done.stderr
    assert done.stdout.strip().endswith("loaded: []")


def test_training_imports_no_compiler_and_no_arithmetic_on_symbols(tmp_path: Path) -> None:
    """torch's optimisers and its counting of operations would: a second of CPU time in each run's start."""
    arguments = ["experiment=dummy_ppo", "cluster=serial", f"runner.output_dir={tmp_path}", "runner.max_steps=1"]
    arguments += ["runner.eval_at_end=false", "runner.save_interval=-1", "runner.report=false"]
    unwanted = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy", "av", "matplotlib")
    done = run_python(
        f"import sys\nfrom embodied_rl.cli import main\nmain({arguments!r})\n"
        f"print('loaded:', [name for name in {unwanted!r} if name in sys.modules])"
    )
    assert done.stdout.strip().endswith("loaded: []"), done.stdout + done.stderr


def test_who_shards_nothing_does_not_import_what_shards() -> None:
    """It takes a start 0.8 s."""
    done = run_python(
        "import sys, embodied_rl.launch, embodied_rl.workers.players, embodied_rl.workers.rollout\n"
        "sharding = ('torch.distributed.fsdp', 'torch.distributed.tensor', 'torch.distributed.checkpoint')\n"
        "print('loaded:', [name for name in sharding if name in sys.modules])"
    )
    assert done.stdout.strip() == "loaded: []", done.stderr


def test_train_script_is_importable_without_starting_a_run() -> None:
    done = run_python("import sys, train; print('embodied_rl.cli' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
