"""Episodes for tests in which every frame can be told from every other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from embodied_rl.demonstrations.lerobot import writer
from embodied_rl.demonstrations.lerobot.episode import EpisodeFacts, Steps, stage, staged
from embodied_rl.demonstrations.lerobot.metadata import Shapes

FPS = 20.0
HEIGHT, WIDTH = 16, 24


def shapes(*, videos: bool = True, action_dim: int = 2, disturbed: bool = False) -> Shapes:
    cameras = {"agentview": (HEIGHT, WIDTH), "wrist": (HEIGHT, WIDTH)}
    return Shapes(cameras=cameras, state_dim=3, action_dim=action_dim, fps=FPS, videos=videos, disturbed=disturbed)


def level(episode: int, step: int) -> int:
    """Of all pixels of the agentview; the wrist's is 255 minus it. Steps are 4 apart: coding cannot hide one."""
    return (37 * episode + 4 * step) % 200


def put(
    root: Path,
    episode: int,
    length: int,
    *,
    success: bool = True,
    keep: bool = True,
    videos: bool = True,
    dim: int = 2,
    disturbed: Sequence[int] | None = None,
) -> EpisodeFacts:
    """Stage an episode of task ``episode % 2``: state (episode, step, 0.5), actions (episode + step / 100, ...).

    Args:
        disturbed: the steps that are marked as such; None: none is told from the others.
    """
    steps = np.arange(length)
    levels = np.array([level(episode, step) for step in range(length)], dtype=np.uint8)[:, None, None, None]
    image = np.broadcast_to(levels, (length, HEIGHT, WIDTH, 3)).copy()
    numbers = np.stack([np.full(length, episode), steps, np.full(length, 0.5)], axis=1)
    facts = EpisodeFacts(
        task_id=episode % 2,
        demonstration=episode,
        attempt=0,
        reset_state_id=100 + episode,
        instruction=f"do task {episode % 2}",
        success=success,
        length=length,
    )
    content = Steps(
        images={"agentview": image, "wrist": 255 - image},
        state=numbers.astype(np.float32),
        actions=np.repeat((episode + steps / 100)[:, None], dim, axis=1).astype(np.float32),
        rewards=(steps / 10).astype(np.float32),
        success=(steps == length - 1) & success,
        disturbed=None if disturbed is None else np.isin(steps, disturbed),
    )
    stage(root, facts, content if keep else None, fps=FPS, videos=videos)
    return facts


def data_set(root: Path, lengths: Sequence[int], *, videos: bool = True, failures: Sequence[int] = ()) -> Path:
    """A data set whose episodes have these lengths; it orders them by task: the even ones, then the odd."""
    for episode, length in enumerate(lengths):
        put(root, episode, length, videos=videos, success=episode not in failures)
    writer.append(root, staged(root), shapes(videos=videos), robot_type="test")
    return root
