"""Players that need a policy: one alone, and one from which another takes over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from embodied_rl import checkpoints
from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.checkpoints.store import resolve, verify
from embodied_rl.contracts import EnvObs
from embodied_rl.demonstrations.play import Player
from embodied_rl.envs.base import SimEnv, SimObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import policy_of
from embodied_rl.schema import ActionModelConfig


class PolicyPlayer:
    """A policy that decides on a chunk of actions, executes it, and looks again.

    Args:
        temperature: 0 takes the most likely actions.
        device: torch device, where the policy is.
    """

    def __init__(self, policy: Policy, temperature: float, device: str) -> None:
        self._policy = policy.to(device).eval().requires_grad_(False)
        self._temperature, self._device = temperature, device
        self._left: list[NDArray[np.float32]] = []

    def start(self, generator: np.random.Generator) -> None:
        self._generator = torch.Generator(self._device).manual_seed(int(generator.integers(2**63)))
        self._left = []

    @torch.inference_mode()
    def act(self, obs: SimObs, instruction: str) -> NDArray[np.float32]:
        if not self._left:
            seen = EnvObs(
                env_ids=torch.zeros(1, dtype=torch.int64, device=self._device),
                images={camera: torch.from_numpy(image).to(self._device) for camera, image in obs.images.items()},
                state=torch.from_numpy(obs.state).to(self._device),
                instructions=(instruction,),
            )
            output = self._policy.act(
                seen,
                greedy=self._temperature == 0.0,
                temperature=self._temperature or 1.0,
                generator=self._generator,
            )
            chunk = output.actions[0].float().cpu().numpy()
            if not np.isfinite(chunk).all():
                raise UserError("collect: the policy's actions are NaN or infinite; use other weights")
            self._left = list(chunk)
        return self._left.pop(0)


class Takeover:
    """The learner plays at first, then the demonstrator, from wherever that has led.

    Args:
        after: control steps that the learner plays.
    """

    def __init__(self, learner: Player, demonstrator: Player, after: int) -> None:
        self._learner, self._demonstrator, self._after = learner, demonstrator, after

    def start(self, generator: np.random.Generator) -> None:
        self._generator, self._step = generator, 0
        self._learner.start(generator)

    def act(self, obs: SimObs, instruction: str) -> NDArray[np.float32]:
        if self._step == self._after:
            self._demonstrator.start(self._generator)
        player = self._learner if self._step < self._after else self._demonstrator
        self._step += 1
        return player.act(obs, instruction)


def model_policy(config: ActionModelConfig, sim: SimEnv, weights: Path | None, seed: int) -> Policy:
    """The policy of ``model``, for the env ``sim``.

    Args:
        weights: a checkpoint; None: those of ``model.path``.
        seed: of what the weights do not give.
    """
    spec = PolicySpec(
        action_dim=sim.action_dim,
        num_action_chunks=config.num_action_chunks,
        state_dim=sim.state_dim,
        image_shapes=sim.image_shapes,
        values_per_chunk=0,
    )
    torch.manual_seed(seed)
    with_adapters = weights is not None and checkpoints.shards.has_adapters(weights)

    def load(policy: Policy) -> None:
        if weights is not None:
            checkpoints.shards.load_weights(policy, weights)

    policy = policy_of(config, spec, None if with_adapters else load)
    if with_adapters:
        load(policy)
    return policy


def teacher_policy(path: str, sim: SimEnv, key: str) -> Policy:
    """The policy of a checkpoint, or of a run's newest, of whatever model.

    Raises:
        CheckpointError: there is no whole one.
        UserError: it was trained on other observations or actions than the env's.
    """
    found = resolve(path, Path(path), key=key)
    assert found is not None  # it is not "auto"
    verify(found)
    record = PolicyRecord.read(found)
    spec = record.spec
    theirs = (spec.action_dim, spec.state_dim, dict(spec.image_shapes))
    ours = (sim.action_dim, sim.state_dim, dict(sim.image_shapes))
    if theirs != ours:
        raise UserError(
            f"{key}={path}: its policy was trained with (actions, state, cameras) {theirs}, and the env has {ours}; "
            "use an env with what it knows, or another teacher"
        )
    policy = policy_of(record.model, spec)
    checkpoints.shards.load_weights(policy, found)
    return policy
