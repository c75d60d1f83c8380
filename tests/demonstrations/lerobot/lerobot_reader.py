"""Runs in ``.venv-lerobot``, not in the tests' process: prints what lerobot reads of a data set, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(root: str, frames: list[int]) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # type: ignore[import-not-found]

    frame = 1 / json.loads((Path(root) / "meta/info.json").read_text())["fps"]
    data = LeRobotDataset("local/test", root=root, video_backend="pyav", delta_timestamps={"action": [0.0, frame]})
    items = [data[frame] for frame in frames]
    print(
        json.dumps(
            {
                "episodes": data.num_episodes,
                "frames": data.num_frames,
                "fps": data.fps,
                "task": [item["task"] for item in items],
                "state": [item["observation.state"].tolist() for item in items],
                "action": [item["action"].tolist() for item in items],
                "padded": [item["action_is_pad"].tolist() for item in items],
                "level": [float(item["observation.images.agentview"][1, 8, 8]) * 255 for item in items],
                "success": [bool(item["next.success"]) for item in items],
                "mean": data.meta.stats["action"]["mean"].tolist(),
                "image_shape": list(data.meta.stats["observation.images.agentview"]["mean"].shape),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], [int(frame) for frame in sys.argv[2:]])
