"""Settings of the whole suite: one thread, headless rendering, no network, no time limits of hypothesis' own."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

from tests import warm_start
from tests.leftovers import keep_shared_memory_apart

if TYPE_CHECKING:
    from tests.training.ranks import Ranks

# Before torch or MuJoCo is imported anywhere: both read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # whatever token this machine has

# A background job of a script (``nohup make test &``) has it ignored, for its children too; tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

keep_shared_memory_apart()
warm_start.install()

SLOW_TIMEOUT_SECONDS = 900
LONGEST = (
    "simulator",
    "tests/packaging/test_documented_commands.py",
    "tests/runtime/test_cluster.py",
    "ray",
    "tests/packaging/test_new_user_walk.py",
    "tests/commands/test_check_env.py",
    "tests/test_family_resume.py",
    "tests/envs/test_idle_reward.py",
)
"""Groups that take minutes, the longest first."""
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# A shared machine makes single examples slow by chance; in CI a failure must come again when the run is repeated.
settings.register_profile("suite", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests get a longer time limit than the suite's, unless they name their own.

    A module's tests share a process, and with it their fixtures; so do all that carry the same ``xdist_group``. Groups
    with slow tests begin first, the longest ones before all: short ones fill the processes evenly at the end.
    """
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_SECONDS))
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    slow = {_group(item) for item in items if item.get_closest_marker("slow")}
    rank = {group: number for number, group in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(_group(item), len(rank)), _group(item) not in slow))


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return marker.args[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test or module that is skipped fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _not_skipped((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _not_skipped((yield), collector.config)


def _not_skipped(report: Report, config: pytest.Config) -> Report:
    if report.skipped and config.getoption("--no-skips"):
        report.outcome = "failed"
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"{reason}, which --no-skips does not allow"
    return report


@pytest.hookimpl(tryfirst=True)  # fixtures of a module start processes, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    warm_start.enabled = not any(item.get_closest_marker(name) for name in ("cold_start", "gpu"))
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    # Only where a test has loaded it: the tests of the command line check that torch stays out.
    torch_module = sys.modules.get("torch")
    if torch_module is not None and torch_module.get_num_threads() != 1:
        torch_module.set_num_threads(1)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The path of a directory that an :class:`~benchmarks.faults.exploding.Exploding` makes when it is read."""
    from benchmarks.faults.exploding import Exploding

    path = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Exploding(path)))
    assert path.is_dir(), "it does explode"
    path.rmdir()
    return path


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two actor ranks. Here, since each module that defines or imports a fixture has one of its own."""
    from tests.training.ranks import Ranks  # torch

    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
