"""What env workers hold while the actor updates, kept and given back (``enable_offload``):
``python -m benchmarks.env_offload [OVERRIDES of train.py]``. Passes if both runs come to the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from embodied_rl.composition import config_of
from embodied_rl.launch import carry_out
from embodied_rl.monitoring.builtin import METRICS_FILE
from embodied_rl.tasks.hooks import Hooks
from embodied_rl.tasks.planning import plan_of

RUN = (
    *("env=libero_spatial", "env.task_ids=[0]", "model=tiny_vla", "cluster.component_placement.env=0"),
    *("algorithm=ppo", "env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=16"),
    *("env.train.total_num_envs=2", "env.eval.total_num_envs=2", "algorithm.group_size=1"),
    *("env.eval.video_cfg.save_video=false", "runner.eval_at_end=false", "runner.save_interval=-1"),
    *("runner.max_steps=3", "runner.report=false", "runner.logger.logger_backends=[jsonl]"),
)
TIMES = ("time/env_release", "time/env_acquire")


class Watch(Hooks):
    """Looks at the env workers after each step."""

    def __init__(self) -> None:
        self.held: list[float] = []
        """MiB of all env workers, memory that they share among them counted once."""

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        workers = [child for child in psutil.Process().children() if child.name().startswith("EnvGroup")]
        self.held.append(sum(worker.memory_full_info().pss for worker in workers) / 2**20)


def measure(*overrides: str) -> tuple[list[float], list[dict[str, float]]]:
    """MiB that env workers hold after each step, and the steps' metrics."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        carry_out(plan_of(config_of(*RUN, *overrides, f"runner.output_dir={folder}")), hooks=watch)
        [file] = Path(folder).rglob(METRICS_FILE)
        return watch.held, [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="of train.py")
    overrides = parser.parse_intermixed_args().overrides
    kept, plain = measure(*overrides)
    given_back, offloaded = measure(*overrides, "env.train.enable_offload=true")
    for name, held in (("kept", kept), ("given back", given_back)):
        print(f"{name}: {', '.join(f'{mib:,.0f}' for mib in held)} MiB after each step")
    for key in TIMES:
        print(f"{key}: {', '.join(f'{step.get(key, 0.0):.1f}' for step in offloaded)} s")
    same = [{k: v for k, v in step.items() if k.startswith(("actor/", "env/"))} for step in plain] == [
        {k: v for k, v in step.items() if k.startswith(("actor/", "env/"))} for step in offloaded
    ]
    print("metrics are the same" if same else "fails: metrics differ")
    sys.exit(not same)


if __name__ == "__main__":
    main()
