"""Video files of small images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embodied_rl.demonstrations.lerobot.episode import decode_video, encode_video
from embodied_rl.envs.dummy import DummyEnv, DummyParams


def test_equal_images_give_equal_files(tmp_path: Path) -> None:
    env = DummyEnv(1, DummyParams(image_size=16), seed=0)
    env.reset([0], [20])
    images, generator = [], np.random.default_rng(0)
    for _ in range(9):
        images.append(env.observe([0]).images["agentview"][0].copy())
        env.step([0], generator.uniform(-1, 1, (1, env.action_dim)).astype(np.float32))
    files, others = set(), [np.zeros(0, np.uint8)] * 20
    for _ in range(1_000):  # where they differed, one of a hundred did: it hangs on what memory the encoder is given
        others[generator.integers(20)] = np.full(generator.integers(1_000, 300_000), generator.integers(256), np.uint8)
        encode_video(tmp_path / "video.mp4", np.stack(images), 20)
        files.add((tmp_path / "video.mp4").read_bytes())
    assert len(files) == 1
    assert [seconds for seconds, _ in decode_video(tmp_path / "video.mp4")] == [number / 20 for number in range(9)]
