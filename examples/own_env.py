"""A simulator of one's own, and a policy that learns in it. Run: python examples/own_env.py"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import embodied_rl as er
from embodied_rl.envs.base import SimObs, SimStep, Task


class Cart:
    def reset(self, *, seed: int) -> tuple[np.ndarray, dict]:
        self.state = np.array([np.random.default_rng(seed).uniform(-1, 1), 0.0], np.float32)
        return self.state, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        speed = np.clip(0.9 * self.state[1] + 0.1 * float(action[0]), -0.3, 0.3)
        self.state = np.array([np.clip(self.state[0] + speed, -1, 1), speed], np.float32)
        return self.state, -abs(float(self.state[0])), False, False, {}


@dataclass(frozen=True, kw_only=True)
class CartParams:
    tolerance: float = 0.1
    """Distance from the middle that counts as success."""


class CartEnv:
    Params = CartParams
    batched, control_hz = False, 10.0
    action_dim, state_dim, num_reset_states = 1, 2, 64
    image_shapes: Mapping[str, tuple[int, int]] = {}

    def __init__(self, num_slots: int, params: CartParams, seed: int) -> None:
        self.carts, self.start = [Cart() for _ in range(num_slots)], np.zeros(num_slots)
        self.params, self.seed = params, seed

    def task(self, reset_state_id: int) -> Task:
        return Task(task_id=0, instruction="bring the cart to the middle", suite="cart")

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        for slot, state in zip(slots, reset_state_ids, strict=True):
            self.start[slot] = abs(self.carts[slot].reset(seed=self.seed + state)[0][0])

    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        steps = [self.carts[slot].step(action) for slot, action in zip(slots, actions, strict=True)]
        rewards = np.array([step[1] for step in steps]) + self.start[list(slots)]  # 0 at the start
        success = np.array([abs(step[0][0]) < self.params.tolerance for step in steps])
        return SimStep(rewards=rewards.astype(np.float32), success=success)

    def observe(self, slots: Sequence[int]) -> SimObs:
        return SimObs(images={}, state=np.stack([self.carts[slot].state for slot in slots]))

    def render(self, slots: Sequence[int]) -> np.ndarray:
        columns = np.array([31.5 * (self.carts[slot].state[0] + 1) for slot in slots])
        free = np.abs(np.arange(64) - columns[:, None]) > 1.0
        return np.broadcast_to(255 * free[:, None, :, None], (len(slots), 64, 64, 3)).astype(np.uint8)

    def close(self) -> None: ...


if __name__ == "__main__":  # the run loads this file for CartEnv
    run = er.train(
        "env=dummy",
        f"env.env_type={__file__}:CartEnv",
        "model=mlp",
        "algorithm=grpo",
        "env.eval.episodes_per_task=32",
        "env.eval.video_cfg.save_video=false",
        "runner.max_steps=15",
        "runner.val_before_train=true",
        "runner.report=false",
        "cluster=serial",
    )
    print(f"in the middle: {run.evaluations[0].rate:.0%} before training, {run.success:.0%} after")
