"""Image, manifest and job script of docker/: what they ask for is what the pins, the docs and the options say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied_rl.command_line import checked
from embodied_rl.schema import Config
from embodied_rl.tasks.planning import plan_of
from tests.packaging.documented import ROOT

FOLDER = ROOT / "docker"
PINNED = dict(
    line.split("==")
    for line in (ROOT / "constraints/pins.txt").read_text().splitlines()
    if re.match(r"[\w.-]+==", line)
)


def node_groups(config: Config) -> dict[str, tuple[int, dict[str, float]]]:
    """Group -> number of nodes, what it asks of each."""
    return {name: (group.nodes, dict(group.resources)) for name, group in config.cluster.node_groups.items()}


def test_the_image_installs_what_the_docs_do() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    installs = re.findall(r"\bpip install (.*?)(?:;? ?\\)?\n", text)
    documented = set(re.findall(r"^pip install (.*?)(?:\s+#.*)?\n", (ROOT / "docs/installation.md").read_text(), re.M))
    special = {"torch==2.13.0;", "torch==2.13.0", f'"ray[default]=={PINNED["ray"]}"'}
    without_tests = {line.replace(",dev,docs]", "]") for line in documented}
    assert {line.removesuffix(";") for line in installs} <= without_tests | special
    assert {line for line in without_tests if "-r constraints" in line} <= set(installs)
    for file in re.findall(r"-[rc] (\S+)", text):
        assert (ROOT / file).is_file()


def test_the_manifest_is_of_the_documented_run() -> None:
    cluster = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec["rayVersion"] == PINNED["ray"]
    workers: list[dict[str, Any]] = spec["workerGroupSpecs"]
    there = {"learn": (1, resources(spec["headGroupSpec"]))}
    there |= {group["groupName"]: (group["replicas"], resources(group)) for group in workers}
    (command,) = [words for words in commands("docs/cluster.md") if "exec" in words]
    config = checked(command[command.index("train.py") + 1 :])
    assert node_groups(config) == there
    plan_of(config)  # its placement fits
    volume = Path(config.runner.output_dir).parent
    for group in (spec["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert "persistentVolumeClaim" in {item["name"]: item for item in pod["volumes"]}[mounts[str(volume)]]
        assert f"WORKDIR {container['workingDir']}\n" in (FOLDER / "Dockerfile").read_text()


def resources(group: dict[str, Any]) -> dict[str, float]:
    return json.loads(json.loads(group["rayStartParams"]["resources"]))


def commands(page: str) -> list[list[str]]:
    """Those of the page's plain blocks."""
    blocks = re.findall(r"^```text\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_job_starts_ray_on_all_its_nodes_and_the_run_on_the_first(nodes: int, tmp_path: Path) -> None:
    steps = 1 if nodes == 1 else 2
    programs = {name: f'echo {name} "$@" >>"$CALLS"' for name in ("srun", "ray", "python")}
    # `srun` runs beside the script, which a run waits for as it waits for its nodes.
    programs["python"] += f'\nuntil [ "$(grep -c ^srun "$CALLS")" = {steps} ]; do sleep 0.05; done'
    programs["scontrol"] = r"printf 'first\nsecond\n'"
    for name, does in programs.items():
        script = tmp_path / name
        script.write_text(f"#!/bin/bash\n{does}\n")
        script.chmod(0o755)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/bin").symlink_to(tmp_path)
    calls = tmp_path / "calls"
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NNODES": str(nodes), "SLURM_CPUS_ON_NODE": "8"}
    subprocess.run(
        ["bash", str(FOLDER / "slurm.sh"), "experiment=dummy_grpo", "cluster.component_placement.env=4-7"],
        cwd=tmp_path,
        env={**os.environ, **job, "CALLS": str(calls)},
        check=True,
        timeout=60,
    )
    said = calls.read_text().splitlines()
    assert "srun --nodes=1 --ntasks=1 -w first ray start --head --port=6379 --block" in said
    others = "srun --nodes=2 --ntasks=2 -x first ray start --address=first:6379 --block"
    assert (others in said) == (nodes == 3)
    (run,) = [line for line in said if line.startswith("python ")]
    assert_runs(run.split(" ", 2)[2], nodes)


def assert_runs(arguments: str, nodes: int) -> None:
    overrides: Sequence[str] = [*arguments.partition(" +")[0].split(), "+" + arguments.partition(" +")[2]]
    config = checked(overrides)
    assert config.cluster.address == "first:6379"
    assert node_groups(config) == {"node": (nodes, {})}
    assert len(plan_of(config).placement.nodes) == nodes
