"""Micro-batches of a rollout: the same decisions, whatever their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.contracts import EnvObs, Trajectory
from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy, PolicyOutput
from embodied_rl.models.openvla.oft import OpenVlaOftPolicy
from embodied_rl.models.openvla.policy import OpenVlaPolicy
from embodied_rl.models.registry import build_policy
from embodied_rl.workers.inference import MicroBatches
from tests.models.flow.flow_models import POLICIES, flow_policy, flow_spec, look
from tests.models.small import MODELS, fresh
from tests.workers.job import Job, small

ROWS = 7


def seen(model: str) -> EnvObs:
    rng = torch.Generator().manual_seed(3)
    spec = MODELS[model][0]
    return EnvObs(
        env_ids=torch.arange(ROWS),
        images={
            camera: torch.randint(0, 256, (ROWS, *size, 3), dtype=torch.uint8, generator=rng)
            for camera, size in spec.image_shapes.items()
        },
        state=torch.randn(ROWS, spec.state_dim, generator=rng),
        instructions=tuple(("open the drawer", "lift it")[row % 2] for row in range(ROWS)),
    )


def decided(policy: Policy, obs: EnvObs, size: int | None, seed: int = 5) -> PolicyOutput:
    with torch.inference_mode():
        return MicroBatches(size).act(policy, obs, greedy=False, temperature=1.3, seed=seed)


def assert_alike(left: PolicyOutput, right: PolicyOutput) -> None:
    assert torch.allclose(left.actions, right.actions, atol=1e-5)
    assert torch.allclose(left.logprobs, right.logprobs, atol=1e-4)
    assert left.replay_inputs.keys() == right.replay_inputs.keys()
    for name, tensor in left.replay_inputs.items():
        assert torch.allclose(tensor.float(), right.replay_inputs[name].float(), atol=1e-4), name
    assert (left.values is None) == (right.values is None)
    if left.values is not None and right.values is not None:
        assert torch.allclose(left.values, right.values, atol=1e-5)
    if left.tokens is not None and right.tokens is not None:
        assert torch.equal(left.tokens, right.tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 100])
@pytest.mark.parametrize("model", ["mlp", "cnn", "tiny_vla", "correlated"])
def test_decisions_do_not_depend_on_the_size(model: str, size: int) -> None:
    if model == "correlated":
        spec, params = MODELS["tiny_vla"]
        torch.manual_seed(0)
        policy, obs = build_policy("tiny_vla", spec, {**params, "noise_correlation": 0.7}), seen("tiny_vla")
    else:
        policy, obs = fresh(model), seen(model)
    whole = decided(policy, obs, None)
    assert_alike(whole, decided(policy, obs, size))
    assert not torch.equal(whole.actions, decided(policy, obs, size, seed=6).actions)
    direct = policy.act(obs, greedy=False, temperature=1.3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(direct.actions, whole.actions), "all at once is what the policy does by itself"
    values = MicroBatches(size).values(policy, obs)
    assert torch.allclose(values, policy.values(obs), atol=1e-5)


@pytest.mark.parametrize("model", ["openvla", "openvla_oft"])
def test_openvla(tmp_path: Path, model: str) -> None:
    {"openvla": OpenVlaPolicy, "openvla_oft": OpenVlaOftPolicy}[model].write_tiny(tmp_path)
    spec = flow_spec(1, chunks=1 if model == "openvla" else 3)
    policy, obs = build_policy(model, spec, {"suite": "libero_spatial"}, str(tmp_path)), look(5)
    assert_alike(decided(policy, obs, None), decided(policy, obs, 2))


@pytest.mark.parametrize("params", [{}, {"stochastic_steps": "all"}])
@pytest.mark.parametrize("model", sorted(POLICIES))
def test_denoising_policies(tmp_path: Path, model: str, params: dict[str, Any]) -> None:
    POLICIES[model].write_tiny(tmp_path)
    policy, obs = flow_policy(model, tmp_path, **params), look(5)
    assert_alike(decided(policy, obs, None), decided(policy, obs, 2))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("env_workers", [1, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_a_rollout_does_not_depend_on_the_size(stages: int, env_workers: int, size: int) -> None:
    base = (
        "algorithm=ppo",
        f"rollout.pipeline_stage_num={stages}",
        f"cluster.component_placement.env=0-{env_workers - 1}",
        "env.train.auto_reset=true",
        "env.train.max_episode_steps=6",
        "env.train.max_steps_per_rollout_epoch=16",
    )

    def rolled(*overrides: str) -> list[Trajectory]:
        with Job(small(*base, *overrides)) as job:
            return job.roll()[0]

    whole, parts = rolled(), rolled(f"rollout.micro_batch_size={size}")
    assert len(whole) == len(parts) == stages * env_workers
    for left, right in zip(whole, parts, strict=True):
        assert torch.allclose(left.logprobs, right.logprobs, atol=1e-5)
        assert torch.allclose(left.rewards, right.rewards, atol=1e-5)
        assert left.values is not None and right.values is not None
        assert torch.allclose(left.values, right.values, atol=1e-5)


class Crowded(Policy):
    """Has memory for so many rows alone."""

    def __init__(self, policy: Policy, room: int) -> None:
        super().__init__()
        self.policy, self.room, self.spec = policy, room, policy.spec
        self.tried: list[int] = []

    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        self.tried.append(len(obs))
        if len(obs) > self.room:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 7 GiB\nand more")
        return self.policy.act(obs, greedy=greedy, temperature=temperature, generator=generator)


def test_where_memory_runs_out_less_is_tried_and_said_so() -> None:
    policy, obs, said = fresh("mlp"), seen("mlp"), list[str]()
    crowded, batches = Crowded(policy, room=2), MicroBatches(None, said.append)
    found = batches.act(crowded, obs, greedy=False, temperature=1.3, seed=5)
    assert_alike(found, decided(policy, obs, None))
    assert crowded.tried == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert batches.size == 1
    assert said[0].startswith("rollout: out of memory with 7 observations at once, 3 from now on")
    assert len(said) == 2
    with pytest.raises(UserError, match="not even one observation fits in memory: out of memory: tried to allocate"):
        MicroBatches(None, said.append).act(Crowded(policy, room=0), obs, greedy=True, temperature=1.0, seed=5)


def test_other_errors_are_not_swallowed() -> None:
    class Broken(Crowded):
        def act(self, *_: Any, **__: Any) -> PolicyOutput:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        MicroBatches(2).act(Broken(fresh("mlp"), 1), seen("mlp"), greedy=True, temperature=1.0, seed=5)


def test_draws_that_cannot_be_divided_are_refused() -> None:
    class Drawing(Crowded):
        def act(self, obs: EnvObs, *, generator: torch.Generator | None, **_: Any) -> PolicyOutput:
            torch.randn(99, generator=generator)
            raise AssertionError("it was drawn")

    with pytest.raises(RuntimeError, match=r"draws numbers of shape \[99\], expected 2 rows"):
        MicroBatches(2).act(Drawing(fresh("mlp"), 1), seen("mlp"), greedy=True, temperature=1.0, seed=5)


@pytest.mark.parametrize(("size", "watched"), [(None, False), (2, True)])
def test_a_policy_that_sees_all_at_once_is_not_watched(size: int | None, watched: bool) -> None:
    class Looking(Crowded):
        def act(self, obs: EnvObs, **options: Any) -> PolicyOutput:
            assert (torch._C._len_torch_function_stack() > 0) == watched
            return super().act(obs, **options)

    MicroBatches(size).act(Looking(fresh("mlp"), 99), seen("mlp"), greedy=True, temperature=1.0, seed=5)
