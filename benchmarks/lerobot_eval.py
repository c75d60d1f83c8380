"""lerobot's side of :mod:`benchmarks.lerobot_race`: ``python -m benchmarks.lerobot_eval FILE EPISODES STEPS``.

It imports none of the project, since it runs in an environment of lerobot's. :class:`Script` is for both sides.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

SUITE: Final = "libero_spatial"
TASK, ENVS, PIXELS, CHUNK = 0, 2, 256, 8


def cpu_seconds() -> float:
    """Of all processes of this session that are there, so far, by the clock that clock_getcpuclockid(3) names."""
    session, seconds = os.getsid(0), 0.0
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with suppress(OSError):  # it has ended since
            if os.getsid(pid) == session:
                seconds += time.clock_gettime((~pid << 3) | 2)
    return seconds


class Script:
    """Small random motions, the same in every episode. It writes to ``file`` how fast they were played."""

    def __init__(self, file: Path, episodes: int, steps: int, chunk: int) -> None:
        self.file, self.steps, self.chunk = file, steps, chunk
        self.actions = torch.empty(steps, 7).uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(0))
        self.looks, self.last = 0, episodes // ENVS * steps // chunk
        self.began = 0.0, 0.0
        self.states: list[list[float]] = []

    def next(self, state: Tensor) -> Tensor:
        """[N,chunk,7] actions of all envs, which are in ``state`` [N,8]."""
        if not self.looks:
            self.began = time.perf_counter(), cpu_seconds()
        step = self.looks * self.chunk % self.steps
        self.looks += 1
        if step == self.steps - CHUNK:
            self.states += state.tolist()
        if self.looks == self.last:
            self.write()
        return self.actions[step : step + self.chunk].repeat(len(state), 1, 1)

    def write(self) -> None:
        seconds, cpu = time.perf_counter() - self.began[0], cpu_seconds() - self.began[1]
        steps = ENVS * (self.looks - 1) * self.chunk
        rates = {"steps_per_second": steps / seconds, "steps_per_cpu_second": steps / cpu}
        self.file.write_text(json.dumps({**rates, "states": self.states}))


def write_states(folder: Path) -> None:
    """The suite's initial states in files as lerobot reads them; the package has them in other ones."""
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    from libero.libero.benchmark import get_benchmark

    suite = get_benchmark(SUITE)()
    for number, task in enumerate(suite.tasks):
        (folder / task.problem_folder).mkdir(exist_ok=True)
        torch.save(suite.get_task_init_states(number), folder / task.problem_folder / task.init_states_file)
    (folder / "config.yaml").write_text(f"init_states: {folder}\n")


def evaluate(script: Script, episodes: int) -> None:
    """As ``lerobot-eval`` does it, with the policy's own pre- and postprocessing left out."""
    from lerobot.envs import make_env  # pyright: ignore[reportMissingImports]
    from lerobot.envs.configs import LiberoEnv  # pyright: ignore[reportMissingImports]
    from lerobot.policies import PreTrainedPolicy  # pyright: ignore[reportMissingImports]
    from lerobot.policies.act.configuration_act import ACTConfig  # pyright: ignore[reportMissingImports]
    from lerobot.scripts.lerobot_eval import eval_policy_all  # pyright: ignore[reportMissingImports]

    class Scripted(PreTrainedPolicy):
        config_class, name = ACTConfig, "scripted"

        def select_action(self, batch: dict[str, Any], **_: Any) -> Tensor:
            return script.next(batch["observation.state"])[:, 0]

        def reset(self) -> None: ...
        def get_optim_params(self) -> Any: ...
        def forward(self, batch: Any) -> Any: ...
        def predict_action_chunk(self, batch: Any, **_: Any) -> Any: ...

    env = LiberoEnv(
        task=SUITE,
        task_ids=[TASK],
        episode_length=script.steps,
        observation_height=PIXELS,
        observation_width=PIXELS,
    )
    before, after = env.get_env_processors()
    eval_policy_all(
        make_env(env, n_envs=ENVS, use_async_envs=True),
        Scripted(ACTConfig()),
        before,
        after,
        lambda observation: observation,
        lambda action: action,
        n_episodes=episodes,
        start_seed=0,
    )


def main() -> None:
    file, episodes, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        write_states(Path(folder))
        evaluate(Script(file, episodes, steps, chunk=1), episodes)


if __name__ == "__main__":
    main()
