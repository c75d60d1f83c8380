"""The same over Ray: three raylets on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from embodied_rl import launch
from embodied_rl.commands import doctor
from embodied_rl.errors import UserError
from embodied_rl.runtime import ray_nodes
from tests.checkpoints.saved import saved_tensors
from tests.configs import tiny_run
from tests.test_end_to_end import assert_equal, metrics_of, only_run

pytest.importorskip("ray")
# One after the other: each looks at the machine's processes.
pytestmark = [pytest.mark.slow, pytest.mark.cold_start, pytest.mark.timeout(500), pytest.mark.xdist_group("ray")]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="er-", dir="/tmp")  # the paths of sockets have 107 characters at most
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    store = 80 * 2**20
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1, "object_store_memory": store, "include_dashboard": False, "resources": {"learn": 1}
        },
    )  # fmt: skip
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=store, resources={"sim": 1})
        yield str(cluster.address)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            tracks = "resource_tracker" in " ".join(process.cmdline())  # this process's own, which it keeps
            if not tracks and process.environ().get("RAY_TMPDIR") == folder:  # as all that Ray and its agents start
                left.append(process)
    assert not psutil.wait_procs(left, timeout=60)[1]


def test_a_run_on_three_raylets_equals_one_in_processes(tmp_path: Path, address: str) -> None:
    options = ["runner.max_steps=2", "cluster.component_placement.actor=2", "cluster.component_placement.rollout=2"]
    spread = [
        "cluster=ray",
        f'cluster.address="{address}"',
        "+cluster.node_groups={sim: {nodes: 2, resources: {sim: 1}}, learn: {resources: {learn: 1}}}",
        "cluster.component_placement.env=sim:0-1",
    ]
    runs = []
    for config in (
        tiny_run(tmp_path, "cluster=process", "runner.experiment_name=process", *options),
        tiny_run(tmp_path, "runner.experiment_name=ray", *spread, *options),
    ):
        launch.run(config)
        runs.append(only_run(config))
    assert metrics_of(runs[0]) == metrics_of(runs[1])
    assert_equal(*[saved_tensors(r / "checkpoints/global_step_2") for r in runs])


def test_a_ray_of_the_runs_own_ends_with_it(tmp_path: Path) -> None:
    before = {p.pid for p in psutil.process_iter()}
    launch.run(tiny_run(tmp_path, "cluster=ray", "runner.max_steps=1"))

    def alive() -> list[str]:
        names = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid not in before and {"raylet", "gcs_server"} & {process.name()}:
                    names.append(process.name())
        return names

    deadline = time.monotonic() + 60  # they were told to end, and do so in their own time
    while alive() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not alive()


def test_the_doctor_looks_at_every_node_and_leaves_the_cluster_as_it_was(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert doctor.main([f"cluster.address={address}", f"runner.output_dir={tmp_path}"]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("ok")]
        assert [row[1:3] for row in rows] == [
            ["node", "0"],
            ["node", "1"],
            ["node", "2"],
            ["agents", "answer"],
            ["shared", "folder"],
        ]
    with pytest.raises(UserError, match=r"cluster\.address=127\.0\.0\.1:1: .*give host:port of a Ray that runs"):
        doctor.main(["cluster.address=127.0.0.1:1"])


def test_nodes_that_are_not_there_are_refused_with_a_table(tmp_path: Path) -> None:
    config = tiny_run(
        tmp_path,
        "cluster=ray",
        "cluster.wait_for_nodes=3",
        "+cluster.node_groups={sim: {nodes: 2, resources: {sim: 1}}}",
    )
    with pytest.raises(UserError, match=r"did not give 2 node.* within 3 s[^$]*node 0: CPU 1, sim 1[^$]*has 1 node"):
        launch.run(config)


def test_a_token_that_is_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for there, chosen, mode in ((False, None, None), (True, None, "token"), (True, "disabled", "disabled")):
        if there:
            (tmp_path / ".ray").mkdir(exist_ok=True)
            (tmp_path / ".ray/auth_token").write_text("0" * 64)
        with monkeypatch.context() as patch:
            patch.delenv("RAY_AUTH_MODE", raising=False)
            patch.setattr(os, "environ", dict(os.environ) | ({} if chosen is None else {"RAY_AUTH_MODE": chosen}))
            ray_nodes._settle_environment()
            assert os.environ.get("RAY_AUTH_MODE") == mode
