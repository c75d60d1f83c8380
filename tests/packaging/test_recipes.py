"""The recipes of CONTRIBUTING.md, run as they stand: as files of an empty folder, and as an installed package."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
MAX_LINES = 60
RECIPES = {
    "A simulator": ("cart.py", "env/cart.yaml"),
    "A policy": ("linear.py", "model/linear.yaml"),
    "An algorithm": ("quantile.py", "algorithm/quantile.yaml"),
    "A reward": ("likeness.py",),
    "A logger": ("csv_log.py",),
}
"""Section of the page -> its files: one of code and at most one of configuration."""
PACKAGE = ("pyproject.toml", "hydra_plugins/my_robots/plugin.py")
TINY = (
    "cluster=serial",
    "runner.max_steps=1",
    "runner.val_before_train=false",
    "runner.eval_at_end=false",
    "runner.save_interval=-1",
    "cluster.num_threads.actor=1",
    "actor.seed=3",
)
LOG = "runner.logger.logger_backends=[jsonl]"
DUMMY = ("env=dummy", "env.train.total_num_envs=16", "env.train.max_episode_steps=8")
MATH = (
    "task=math",
    "model=tiny_lm",
    "data.params.digits=1",
    "data.rollout_batch_size=4",
    "data.eval_size=8",
    "algorithm.group_size=4",
)


def files_of_page() -> dict[str, str]:
    """Name -> content of the blocks that begin with a file's name, without that line."""
    blocks = re.findall(r"^```\w+\n# (\S+\.\w+)\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return dict(blocks)


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def run(folder: Path, *arguments: str, path: Path | None = None, refused: bool = False) -> str:
    """Run the command line in ``folder``; what it says on stderr."""
    python_path = os.pathsep.join(map(str, filter(None, (path, ROOT))))
    done = subprocess.run(
        [sys.executable, "-m", "embodied_rl", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == (2 if refused else 0), done.stdout + done.stderr
    return done.stderr


def results(folder: Path) -> Path:
    """The directory of the newest run."""
    return max(folder.glob("results/*/*"), key=lambda path: path.stat().st_mtime)


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((results(folder) / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with the recipes' files."""
    return write(tmp_path, {name: text for name, text in files_of_page().items() if name not in PACKAGE})


@pytest.fixture
def run_here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """:func:`run` in ``folder``, in this process: most of a short command is the start of an interpreter."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def run_here(*arguments: str, refused: bool = False) -> str:
        if refused:
            with pytest.raises(SystemExit) as ending:
                main(arguments)
            assert ending.value.code == 2
        else:
            main(arguments)
        return capsys.readouterr().err

    return run_here


def test_each_recipe_is_one_short_file() -> None:
    files = files_of_page()
    assert set(files) == {name for names in RECIPES.values() for name in names} | set(PACKAGE)
    for code, *configuration in RECIPES.values():
        assert len(files[code].splitlines()) <= MAX_LINES, code
        assert len(configuration) <= 1
    sections = re.findall(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert set(RECIPES) < set(sections)


def test_a_simulator(folder: Path, run_here: Callable[..., str]) -> None:
    own = ("--config-dir", ".", "env=cart", LOG, *TINY)
    run_here(*own)
    tight = metrics(folder)["env/success_once"]
    run_here(*own, "env.init_params.tolerance=1.0")
    assert tight < metrics(folder)["env/success_once"] == 1.0, "every cart is within 1 of the middle"
    message = run_here(*own, "env.init_params.tolerence=1.0", refused=True)
    assert "Did you mean 'env.init_params.tolerance'?" in message


def test_a_policy(folder: Path, run_here: Callable[..., str]) -> None:
    own = ("--config-dir", ".", *DUMMY, "model=linear", LOG, *TINY)
    entropies = []
    for algorithm, spread in (("grpo", 0.5), ("ppo", 0.25)):
        run_here(*own, f"algorithm={algorithm}", f"model.params.spread={spread}")
        entropies.append(metrics(folder)["actor/entropy"])
    assert entropies[0] - entropies[1] == pytest.approx(0.6931, abs=1e-3), "log 2: half the deviation"
    assert "greater than 0" in run_here(*own, "model.params.spread=0.0", refused=True)


def test_an_algorithm(folder: Path, run_here: Callable[..., str]) -> None:
    own = ("--config-dir", ".", *DUMMY, "algorithm=quantile", LOG, *TINY)
    means = []
    for quantile in (0.0, 1.0):
        run_here(*own, f"algorithm.params.quantile={quantile}")
        means.append(metrics(folder)["actor/advantage_mean"])
    assert means[0] > 0 > means[1], "over the worst of the group, and over the best"
    message = run_here(*own, "algorithm.params.quantil=0.3", "algorithm.group_size=1", refused=True)
    assert "Did you mean 'algorithm.params.quantile'?" in message
    assert "quantile_baseline compares the members of a group, use 2 or more" in message
    message = run_here(*own, "algorithm.gamma=0.3", refused=True)
    assert "adv_type=quantile.py:quantile_baseline does not use it" in message


def test_a_reward(folder: Path, run_here: Callable[..., str]) -> None:
    own = (*MATH, "reward.function=likeness.py:likeness", LOG, *TINY)
    run_here(*own)
    partial = metrics(folder)["actor/score"]
    run_here(*own, "reward.params.power=0.0")
    assert partial < metrics(folder)["actor/score"] == 1.0
    message = run_here(*own, "reward.params.power=-1.0", refused=True)
    assert "reward.params.power: got -1.0" in message


def test_a_logger(folder: Path, run_here: Callable[..., str]) -> None:
    own = (*DUMMY, "runner.logger.logger_backends=[csv_log.py:CsvLogger]", *TINY)
    run_here(*own, "runner.logger.params.CsvLogger.delimiter=';'")
    [table] = folder.glob("results/*/*/metrics.csv")
    rows = list(csv.reader(table.open(), delimiter=";"))
    assert {len(row) for row in rows} == {3}
    assert "env/success_once" in {name for _, name, _ in rows}
    message = run_here(*own, "runner.logger.params.CsvLogger.delimeter=';'", refused=True)
    assert "Did you mean 'runner.logger.params.CsvLogger.delimiter'?" in message


@pytest.mark.slow
def test_all_of_them_in_processes_and_resumed(folder: Path) -> None:
    """Workers of their own find the files, and so does a run that goes on."""
    own = ("--config-dir", ".", "env=cart", "model=linear", "algorithm=quantile", LOG, *TINY, "cluster=process")
    run(folder, *own, "runner.save_interval=1")
    run(folder, *own, "runner.max_steps=2", f"runner.resume_dir={results(folder)}")
    assert metrics(folder)["step"] == 2


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What ``pip install`` of the page's package would leave: a folder on Python's path, with entry points."""
    files = files_of_page()
    project = tomllib.loads(files["pyproject.toml"])["project"]
    groups = project["entry-points"]
    site = write(tmp_path / "site", {"hydra_plugins/my_robots/plugin.py": files["hydra_plugins/my_robots/plugin.py"]})
    for names in RECIPES.values():
        for name in names:
            target = name if name.endswith(".py") else f"conf/{name}"
            text = re.sub(r"\w+\.py:\w+", lambda match: entry_name(groups, match[0]), files[name])
            write(site / "my_robots", {target: text})
    for package in ("my_robots", "hydra_plugins/my_robots"):
        write(site, {f"{package}/__init__.py": ""})
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in groups.items()
    )
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    write(site / "my_robots-0.1.dist-info", {"METADATA": about, "entry_points.txt": points})
    return site


def entry_name(groups: Mapping[str, Mapping[str, str]], file: str) -> str:
    """The entry point that stands for ``cart.py:CartEnv``."""
    module, _, attribute = file.partition(".py:")
    values = {value: name for names in groups.values() for name, value in names.items()}
    return values[f"my_robots.{module}:{attribute}"]


def test_the_package_in_an_env(installed: Path, tmp_path: Path) -> None:
    own = ("env=cart", "model=linear", "algorithm=quantile", *TINY, "cluster=process")
    run(
        tmp_path,
        *own,
        "algorithm.params.quantile=0.0",
        "runner.logger.logger_backends=[jsonl, csv]",
        "runner.logger.params.csv.delimiter=';'",
        path=installed,
    )
    assert metrics(tmp_path)["actor/advantage_mean"] > 0
    assert ";env/success_once;" in (results(tmp_path) / "metrics.csv").read_text()
    config = (results(tmp_path) / "config.yaml").read_text()
    for line in ("env_type: cart", "model_type: linear", "adv_type: quantile"):
        assert line in config
    message = run(tmp_path, "env=cart", "algorithm.adv_type=quantil", path=installed, refused=True)
    assert "expected one of gae, grpo, quantile," in message and "Did you mean 'quantile'?" in message


def test_the_package_with_a_language_model(installed: Path, tmp_path: Path) -> None:
    run(tmp_path, *MATH, "reward.function=likeness", "reward.params.power=0.0", LOG, *TINY, path=installed)
    assert metrics(tmp_path)["actor/score"] == 1.0


def test_yaml_of_a_package_without_a_plugin(installed: Path, tmp_path: Path) -> None:
    (installed / "hydra_plugins/my_robots/plugin.py").unlink()
    experiment = "# @package _global_\ndefaults: [{override /env: cart}, _self_]\nrunner: {experiment_name: ours}\n"
    write(installed / "my_robots/conf/experiment", {"ours.yaml": experiment})
    run(tmp_path, "hydra.searchpath=[pkg://my_robots.conf]", "experiment=ours", LOG, *TINY, path=installed)
    assert results(tmp_path).parent.name == "ours"
    assert "Did you mean 'carts'?" not in run(tmp_path, "env=cart", path=installed, refused=True)
