"""The weights that come with the project."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.cli import config_of
from embodied_rl.contracts import EnvObs
from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
from embodied_rl.launch import run
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.registry import build_policy
from embodied_rl.models.weights.shipped import SHIPPED

FOLDERS = sorted(path for path in SHIPPED.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_is_small_and_says_where_it_comes_from(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10e6
    text = (folder / "README.md").read_text()
    assert "python train.py" in text and "commit" in text


def test_arithmetic_lm_is_as_good_as_it_says(tmp_path: Path) -> None:
    said = re.search(r"(\d+) of 256", (SHIPPED / "arithmetic_lm" / "README.md").read_text())
    assert said
    config = config_of("task=math", "cluster=serial", "runner.only_eval=true", f"runner.output_dir={tmp_path}")
    run(config)
    [report] = tmp_path.glob("*/*/eval_step_000000/eval.json")
    solved = json.loads(report.read_text())["overall"]["n_solved"]
    assert abs(solved - int(said[1])) <= 5, "rounding may turn a few"


TABLE_CENTER, NEXT_TO_PLATE = 2, 8
"""Tasks of libero_spatial. In the former's scene the other bowl stands where the latter's does."""


@pytest.mark.slow
def test_libero_spatial_vla_goes_to_the_bowl_that_it_is_told() -> None:
    """One scene and one set of weights; the instruction alone decides."""
    pytest.importorskip("libero", reason="the libero extra is not installed")
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_spatial", draft=True), seed=0)
    spec = PolicySpec(
        action_dim=env.action_dim,
        num_action_chunks=8,
        state_dim=env.state_dim,
        image_shapes=dict(env.image_shapes),
        values_per_chunk=0,
    )
    policy = build_policy("tiny_vla", spec, {}, str(SHIPPED / "libero_spatial_vla"))
    nearest = {}
    for told in (TABLE_CENTER, NEXT_TO_PLATE):
        env.reset([0], [50 * TABLE_CENTER])
        bowls = [_place(env, f"akita_black_bowl_{number}_main") for number in (1, 2)]
        distances = []
        for _ in range(5):
            seen = env.observe([0])
            obs = EnvObs(
                env_ids=torch.zeros(1, dtype=torch.int64),
                images={name: torch.from_numpy(image) for name, image in seen.images.items()},
                state=torch.from_numpy(seen.state),
                instructions=(env.task(50 * told).instruction,),
            )
            [chunk] = policy.act(obs, greedy=True, temperature=1.0, generator=None).actions.numpy()
            for action in chunk:
                env.step([0], action[None])
                hand = env.observe([0]).state[0, :3]
                distances.append([float(np.linalg.norm((bowl - hand)[:2])) for bowl in bowls])
        nearest[told] = np.min(distances, axis=0)
    env.close()
    # On its way to the second bowl the hand passes over the first.
    assert nearest[TABLE_CENTER][0] < 0.07 < 0.2 < nearest[TABLE_CENTER][1], nearest
    assert nearest[NEXT_TO_PLATE][1] < 0.05, nearest


def _place(env: LiberoEnv, body: str) -> np.ndarray:
    """[3] metres."""
    return env.privileged(0).sim.data.get_body_xpos(body).copy()
