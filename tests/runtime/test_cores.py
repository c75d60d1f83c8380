"""Cores and environment variables of workers, as the workers find them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embodied_rl.cli import config_of
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.launch import run
from embodied_rl.runtime.cluster import ClusterHost
from embodied_rl.runtime.cores import Pinning, cores_of, pinnings
from embodied_rl.runtime.placement import NodeSlots, Placement
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.worker import GroupSpec
from tests.configs import tiny_run
from tests.runtime.agents import LocalNodes
from tests.runtime.early import Early
from tests.runtime.witness import look, seen_by_workers
from tests.test_end_to_end import metrics_of, only_run

HERE = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(HERE) < 2, reason="one core cannot be dealt out")


def pinning(cores: str, index: int = 0, count: int = 1, *, threads: int = 1, device: str = "cpu") -> Pinning:
    return Pinning(component="env", cores=cores, index=index, count=count, device=device, num_threads=threads)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ("0-3,6,7", [(0, 1), (2, 3), (6, 7)]),
        ("0-4", [(0,), (1, 2), (3, 4)]),
        ("8", [(8,), (8,), (8,)]),
        ("4,5", [(4,), (5,), (4,)]),
    ],
)
def test_cores_are_dealt_out(cores: str, expected: list[tuple[int, ...]]) -> None:
    assert [tuple(cores_of(pinning(cores, rank, 3), set(range(10)))) for rank in range(3)] == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (pinning("2-9"), r"env: got 2-9, but core 4, 5, 6, 7, 8, 9 is none of those .* may use here: 0-3,11$"),
        (pinning("0-1", threads=3), r"got 0-1, which is 2 core\(s\) for worker 0 of 1, but .*num_threads\.env=3; give"),
        (pinning("0-3", 1, 2, threads=4), r"got 0-3, which is 2 core\(s\) for worker 1 of 2, but .*num_threads\.env=4"),
        (pinning("all"), r"got 'all', expected cores, as 0-3,6, or numa"),
        (pinning("3-1"), r"got '3-1', expected cores, as 0-3,6, or numa"),
    ],
)
def test_what_cannot_be_had_is_refused(asked: Pinning, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cores_of(asked, {0, 1, 2, 3, 11})


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two NUMA nodes with four cores and two GPUs each, whose buses do not go with the nodes' order; a third node has
    memory alone."""
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7", "")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for bus, node in (("0000:1B:00.0", 1), ("0000:3d:00.0", 1), ("0000:a0:00.0", 0), ("0000:e0:00.0", -1)):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
        file = tmp_path / "sys/bus/pci/devices" / bus.lower() / "numa_node"
        file.parent.mkdir(parents=True)
        file.write_text(f"{node}\n")
    return tmp_path


def test_workers_have_numa_nodes(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cores = set(range(8))
    first, second = [0, 1, 4, 5], [2, 3, 6, 7]
    assert [cores_of(pinning("numa", rank, 4), cores, machine) for rank in range(4)] == [first, first, second, second]
    assert cores_of(pinning("numa", 0, 1), {2, 5, 6}, machine) == [5]  # a container's
    on_gpus = [pinning("numa", gpu, 4, device=f"cuda:{gpu}") for gpu in range(4)]
    assert [cores_of(p, cores, machine) for p in on_gpus] == [second, second, first, second]  # nobody knows the last's
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert [cores_of(p, cores, machine) for p in on_gpus[:2]] == [first, second]
    with pytest.raises(UserError, match=r"got numa, which is 4 core\(s\) for worker 0 of 1"):
        cores_of(pinning("numa", threads=5), cores, machine)


def test_a_machine_without_numa_has_all_its_cores(tmp_path: Path) -> None:
    assert cores_of(pinning("numa"), {3, 1}, tmp_path) == [1, 3]


def test_workers_of_each_node_share_its_cores() -> None:
    nodes = tuple(NodeSlots(group="sim", first=2 * node, count=2, accelerators=0) for node in range(2))
    placement = Placement(slots={"env": (0, 1, 2)}, num_accelerators=0, nodes=nodes)
    cluster = config_of("env=dummy", "cluster=ray", "cluster.cpu_affinity.env=0-3").cluster
    assert [(p.index, p.count) for p in pinnings(cluster, placement, "env")] == [(0, 2), (1, 2), (0, 1)]


@pytest.mark.cold_start
@two_cores
def test_workers_of_a_run_have_their_cores_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = HERE[:2]
    config = tiny_run(
        tmp_path,
        f"cluster.cpu_affinity.actor={second}",
        f'cluster.cpu_affinity.env="{first},{second}"',
        "cluster.env_vars.env.MUJOCO_GL=egl",
        'cluster.env_vars.actor.SOME_NUMBER="7"',
    )
    env, rollout, actor = seen_by_workers(config, monkeypatch)
    assert [seen.cores for seen in env] == [{first}, {second}]
    assert [seen.cores for seen in actor] == [{second}]
    assert {seen.cores for seen in rollout} == {frozenset(HERE)}
    assert [seen.environment.get("MUJOCO_GL") for seen in env] == ["egl", "egl"]
    assert [seen.environment.get("SOME_NUMBER") for seen in actor] == ["7"]
    for seen in (*actor, *rollout, *env):
        assert seen.threads == 1 and seen.environment["OMP_NUM_THREADS"] == "1"
    for seen in rollout:
        assert "SOME_NUMBER" not in seen.environment
    assert look().cores == set(HERE)
    assert "SOME_NUMBER" not in os.environ


def early(*, cores: str, slots: tuple[int, ...] = ()) -> GroupSpec:
    return GroupSpec(
        name="early",
        worker=Early,
        arguments={},
        devices=["cpu"] * max(1, len(slots)),
        num_threads=1,
        slots=slots,
        pinnings=[pinning(cores)] * max(1, len(slots)),
        environment={"MUJOCO_GL": "egl", "MALLOC_ARENA_MAX": "2"},
    )


@pytest.mark.cold_start
@pytest.mark.parametrize("nodes", [0, 2])
def test_a_worker_has_them_before_it_imports_anything(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, and on nodes that agents have."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "5")
    host = ClusterHost(LocalNodes(nodes), range(nodes)) if nodes else None
    backend = ProcessBackend(60.0, host=host)
    try:
        [group] = backend.launch([early(cores=str(HERE[-1]), slots=tuple(range(nodes)))])
        found = group.call(Early.found).wait()
        assert found == [(("egl", "2", [HERE[-1]]), found[0][1])] * max(1, nodes)
        assert nodes or not found[0][1]  # channels over nodes bring torch along
        assert all(group.call(Early.first_environment, "MALLOC_ARENA_MAX").wait())
    finally:
        backend.shutdown()
    assert os.environ["MALLOC_ARENA_MAX"] == "5"


def test_a_node_without_the_cores_says_so() -> None:
    backend = ProcessBackend(60.0, host=ClusterHost(LocalNodes(1), (0,)))
    try:
        with pytest.raises(UserError, match=r"cluster\.cpu_affinity\.env: got 4000, but core 4000 is none of those"):
            backend.launch([early(cores="4000", slots=(0,))])[0].call(Early.cores).wait()
    finally:
        backend.shutdown()


def test_a_pinned_run_trains_as_another(tmp_path: Path) -> None:
    runs = []
    for name, options in (("free", []), ("pinned", [f"cluster.cpu_affinity.{c}={HERE[0]}" for c in ("actor", "env")])):
        config = tiny_run(tmp_path, f"runner.experiment_name={name}", "runner.max_steps=1", *options)
        run(config)
        runs.append(metrics_of(only_run(config)))
    assert runs[0] == runs[1]


MANY = f"0-{HERE[-1] + 1}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["cluster.cpu_affinity.envs=0"], r"cluster\.cpu_affinity\.envs: no such component, .* Did you mean 'env'\?"),
        (["cluster.env_vars.enw.A=b"], r"cluster\.env_vars\.enw: no such component, expected .* Did you mean 'env'\?"),
        ([f"cluster.cpu_affinity.env={MANY}"], rf"cpu_affinity\.env: got {MANY}, but core .*{HERE[-1] + 1} is none of"),
        ([f"cluster.cpu_affinity.actor={HERE[0]}"], r"is 1 core\(s\) for worker 0 of 1, but .*num_threads\.actor=2"),
        (["cluster.env_vars.env.A=1"], r"cluster\.env_vars\.env\.A: got 1 \(int\); .*valid string"),
        (["cluster.env_vars.env.A-B=c"], r"cluster\.env_vars\.env: got the name 'A-B', expected letters"),
        (['cluster.env_vars.env.OMP_NUM_THREADS="4"'], r"OMP_NUM_THREADS: it follows from cluster\.num_threads; set"),
        (['cluster.env_vars.env.CUDA_VISIBLE_DEVICES="4"'], r"it follows from cluster\.component_placement; set that"),
        (
            ["cluster=serial", "cluster.cpu_affinity.env=0"],
            r"cluster\.cpu_affinity: got entries for env, but with",
        ),
        (
            ["cluster=serial", "cluster.env_vars.env.A=b"],
            r"cluster\.env_vars: got entries for env, but with",
        ),
    ],
)
def test_a_configuration_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of("env=dummy", *options)


@pytest.mark.parametrize("name", ["MY_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "WANDB_API_KEY", "KEY"])
def test_a_secret_variable_is_refused_unseen(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.env_vars\.rollout\.{name}: looks like a secret") as caught:
        config_of("env=dummy", f"cluster.env_vars.rollout.{name}=hush")
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match=rf"cluster\.node_groups\.sim\.env\.{name}: looks like a secret"):
        config_of("env=dummy", "cluster=ray", f"+cluster.node_groups={{sim: {{env: {{{name}: hush}}}}}}")


def test_a_name_that_is_no_secret() -> None:
    config = config_of("env=dummy", "cluster.env_vars.rollout.TOKENIZERS_PARALLELISM='false'")
    assert config.cluster.env_vars == {"rollout": {"TOKENIZERS_PARALLELISM": "false"}}
