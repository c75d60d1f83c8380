"""Data sets of the dummy env for tests: a scripted player that goes straight to the goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from embodied_rl.demonstrations.lerobot.episode import EpisodeFacts, Steps, stage, staged
from embodied_rl.demonstrations.lerobot.metadata import Shapes
from embodied_rl.demonstrations.lerobot.writer import append
from embodied_rl.envs.dummy import DummyEnv, DummyParams


def record(
    root: Path,
    reset_state_ids: Sequence[int],
    *,
    image_size: int = 0,
    step_size: float = 0.15,
    max_steps: int = 32,
    first: int = 0,
    terminated: bool = False,
    disturbed: bool = False,
) -> Path:
    """An episode from each of the initial states, one after the other; images, if any, exactly as seen. Steps before
    number ``first`` are not recorded, as those before a takeover. ``terminated``: as if the env had ended them,
    successes by their return. ``disturbed``: each second frame is marked so."""
    params = DummyParams(image_size=image_size, step_size=step_size)
    env = DummyEnv(1, params, seed=0)
    for number, reset_state_id in enumerate(reset_state_ids):
        steps = replace(play(env, params, reset_state_id, max_steps), terminated=terminated).since(first)
        assert steps is not None
        if disturbed:
            steps = replace(steps, disturbed=np.arange(len(steps.actions)) % 2 == 1)
        task = env.task(reset_state_id)
        facts = EpisodeFacts(
            task_id=task.task_id,
            demonstration=number,
            attempt=0,
            reset_state_id=reset_state_id,
            instruction=task.instruction,
            success=terminated or bool(steps.success[-1]),
            length=len(steps.actions),
        )
        stage(root, facts, steps, fps=env.control_hz, videos=False)
    shapes = Shapes(
        cameras=env.image_shapes,
        state_dim=env.state_dim,
        action_dim=env.action_dim,
        fps=env.control_hz,
        videos=False,
        disturbed=disturbed,
    )
    append(root, staged(root), shapes, robot_type="dummy")
    return root


def play(env: DummyEnv, params: DummyParams, reset_state_id: int, max_steps: int) -> Steps:
    """Straight to the goal, as far as a step goes, until the point is there."""
    env.reset([0], [reset_state_id])
    states, actions, images, rewards, success = [], [], [], [], []
    while len(actions) < max_steps and not any(success):
        seen = env.observe([0])
        action = np.clip((seen.state[:, 2:] - seen.state[:, :2]) / params.step_size, -1.0, 1.0)
        result = env.step([0], action)
        states.append(seen.state[0])
        actions.append(action[0])
        images.append({name: image[0] for name, image in seen.images.items()})
        rewards.append(result.rewards[0])
        success.append(bool(result.success[0]))
    return Steps(
        images={name: np.stack([frame[name] for frame in images]) for name in env.image_shapes},
        state=np.stack(states),
        actions=np.stack(actions).astype(np.float32),
        rewards=np.asarray(rewards, np.float32),
        success=np.asarray(success),
    )
