"""What ``plan`` says of memory, against formulas and against what real runs hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.cli import config_of
from embodied_rl.tasks.memory import GIB, Estimate
from embodied_rl.tasks.planning import plan_of

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 0.2
MEASURED = {
    "mlp": ("experiment=dummy_ppo",),
    "tiny_vla": (
        "env=libero_10",
        "env.task_ids=[0]",
        "env.train.total_num_envs=8",
        "algorithm=grpo",
        "algorithm.group_size=2",
        "env.train.max_episode_steps=64",
    ),
    "language": ("task=math", "model=tiny_lm", "actor.skip_zero_advantages=false"),
}
NO_MORE = (
    "cluster=process",
    "runner.max_steps=2",
    "runner.val_before_train=false",
    "runner.eval_at_end=false",
    "runner.save_interval=-1",
    "runner.report=false",
    "runner.logger.logger_backends=[jsonl]",
)


def estimate(*overrides: str) -> Estimate:
    return Estimate(plan_of(config_of(*overrides)))


def test_the_actor_holds_four_tensors_of_each_weight_and_the_rollout_worker_one() -> None:
    small, large = (
        estimate("experiment=dummy_ppo", f"model.params.hidden_size={size}", "model.params.num_layers=3")
        for size in (512, 2048)
    )
    assert small.parameters is not None and large.parameters is not None
    more = 4 * (large.parameters - small.parameters)
    assert large.of("rollout").weights - small.of("rollout").weights == more
    assert large.of("actor").weights - small.of("actor").weights == 4 * more
    assert large.of("env") == small.of("env")


def test_adapters_need_no_gradient_of_the_base() -> None:
    whole, adapted = (estimate("env=libero_10", f"model.lora.rank={rank}").of("actor").weights for rank in (0, 4))
    assert adapted < whole / 3


def test_ranks_share_the_weights_and_samples() -> None:
    alone = estimate("env=libero_10").of("actor")
    shared = estimate("env=libero_10", "cluster.component_placement.actor=0-1").of("actor")
    replicas = estimate(
        "env=libero_10",
        "cluster.component_placement.actor=0-1",
        "actor.fsdp_config.sharding_strategy=no_shard",
    ).of("actor")
    assert shared.weights == alone.weights / 2
    assert replicas.weights == alone.weights
    assert shared.passes < alone.passes


def test_copies_of_the_policy_count_in_the_type_that_they_have() -> None:
    """A rollout worker's, and the reference's beside weights, gradients and moments in the actor."""
    grpo = ("env=libero_10", "algorithm=grpo", "algorithm.group_size=2")
    plain, rounded = (estimate(*grpo, *more) for more in ((), ("rollout.dtype=bfloat16",)))
    weights = plain.of("rollout").weights
    assert rounded.of("rollout").weights == weights / 2
    assert rounded.of("actor") == plain.of("actor")
    kept = {
        more: estimate(*grpo, "algorithm.kl_beta=0.1", *more).of("actor").weights
        for more in ((), ("actor.reference_dtype=bfloat16",), ("model.lora.rank=4",))
    }
    assert plain.of("actor").weights == 4 * weights
    assert list(kept.values())[:2] == [5 * weights, 4.5 * weights]
    assert kept["model.lora.rank=4",] == estimate(*grpo, "model.lora.rank=4").of("actor").weights, "it is the base"


def test_who_saves_imports_more() -> None:
    saving, never = (estimate("experiment=dummy_ppo", f"runner.save_interval={every}") for every in (1, -1))
    assert saving.of("actor").process - never.of("actor").process == 75 * 2**20
    assert saving.of("rollout").process == never.of("rollout").process


def test_passes_follow_the_micro_batch() -> None:
    sizes = [estimate("env=libero_10", f"actor.micro_batch_size={size}").of("actor").passes for size in (8, 16, 32)]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0]) > 0


def test_each_scene_of_libero_counts() -> None:
    one, two = (estimate("env=libero_10", f"env.task_ids={tasks}").of("env") for tasks in ("[0]", "[0,5]"))
    assert two.simulator - one.simulator == pytest.approx(0.38e9)
    assert one.missing is None
    assert estimate("env=maniskill", "model=mlp").of("env").missing == "the simulator"


@pytest.mark.slow
@pytest.mark.xdist_group("simulator")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MEASURED)
def test_a_run_holds_what_was_said(tmp_path: Path, name: str) -> None:
    if name == "tiny_vla":
        pytest.importorskip("libero", reason="the libero extra is not installed")
    arguments = (*MEASURED[name], *NO_MORE, f"runner.output_dir={tmp_path}")
    said = estimate(*arguments)
    done = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},  # no compiled scene: that takes the most
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [metrics] = tmp_path.glob("*/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    groups = {"driver": "driver", "rollout": "rollout", "actor": "update"}
    if name != "language":
        groups["env"] = "env"
    held = {component: max(step[f"memory/{phase}_gb"] for step in steps) for component, phase in groups.items()}
    expected = {component: said.of(component).total / GIB for component in groups}
    wrong = {c: (expected[c], held[c]) for c in groups if abs(expected[c] - held[c]) > TOLERANCE * held[c]}
    assert not wrong, f"said, held: {wrong}"
