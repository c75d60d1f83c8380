"""A run that was interrupted goes on with the very trajectories, metrics and weights of one that was not."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from safetensors.torch import load_file

from embodied_rl.contracts import Trajectory
from embodied_rl.envs.open_episodes import FILE
from embodied_rl.launch import run
from embodied_rl.training.replay import FILE as BUFFER
from embodied_rl.workers.actor import ActorWorker, UpdateReport
from tests.checkpoints.saved import saved_tensors
from tests.configs import embodied
from tests.test_end_to_end import assert_equal, metrics_of, only_run

GOING_ON = ["algorithm=ppo", "env.train.auto_reset=true"]
SMALL = {
    "dummy": ["env=dummy", "env.train.max_episode_steps=16", "env.train.total_num_envs=16"],
    # Episodes of up to four rollouts: the interruption falls into the middle of them.
    "dummy, going on": [
        "env=dummy",
        *GOING_ON,
        "env.train.stagger=true",
        "env.train.max_episode_steps=16",
        "env.train.max_steps_per_rollout_epoch=4",
        "env.train.total_num_envs=16",
        "++env.init_params.success_radius=0.6",
        "++env.init_params.step_size=0.4",
        "algorithm.rollout_epoch=2",
    ],
    "dummy, a part trained": [
        "env=dummy",
        "model.trainable={*:false,*.4.*:true}",
        "env.train.max_episode_steps=16",
        "env.train.total_num_envs=16",
    ],
    "dummy, by success": [
        "env=dummy",
        "algorithm=ppo",
        "algorithm.adv_norm.mean_level=task",
        "env.train.task_sampling=success",
        "env.train.max_episode_steps=16",
        "env.train.total_num_envs=16",
        "++env.init_params.success_radius=0.6",
        "++env.init_params.step_size=0.4",
    ],
    "dummy, going on, with a critic": [
        "env=dummy",
        *GOING_ON,
        "critic.enable=true",
        "actor.lr_sched.lr_decay_style=linear",
        "env.train.max_episode_steps=16",
        "env.train.max_steps_per_rollout_epoch=4",
        "env.train.total_num_envs=16",
    ],
    "gymnasium": ["env=gymnasium", "env.train.total_num_envs=16"],
    "gymnasium, going on": [
        "env=gymnasium",
        "env.init_params.id=Pendulum-v1",
        *GOING_ON,
        "env.train.max_steps_per_rollout_epoch=24",
        "env.train.total_num_envs=4",
    ],
    "gymnasium, from a buffer": [  # which is full after one step
        "env=gymnasium",
        "env.init_params.id=Pendulum-v1",
        "model=sac_mlp",
        "algorithm=sac",
        "algorithm.replay.capacity=40",
        "algorithm.replay.batch_size=16",
        "algorithm.replay.learning_starts=0",
        "algorithm.replay.random_chunks=40",
        "algorithm.replay.update_to_data=0.3",
        "algorithm.sac.hidden_size=16",
        "algorithm.sac.policy_interval=2",
        "algorithm.sac.decision_penalty=0.5",
        "actor.lr_sched.lr_decay_style=linear",
        "env.train.auto_reset=true",
        "env.train.max_steps_per_rollout_epoch=8",
        "env.train.total_num_envs=4",
    ],
    "maniskill, going on": [
        "env=maniskill_push_cube",
        *GOING_ON,
        "model.num_action_chunks=2",
        "env.train.max_episode_steps=10",
        "env.train.max_steps_per_rollout_epoch=4",
        "env.train.total_num_envs=4",
    ],
    "robosuite, going on": [
        "env=robosuite_lift",
        *GOING_ON,
        "env.train.max_episode_steps=20",
        "env.train.max_steps_per_rollout_epoch=8",
        "env.train.total_num_envs=4",
    ],
    "libero_10, going on": [
        "env=libero_10",
        "model=tiny_vla",
        *GOING_ON,
        "env.init_params.draft=true",
        "env.task_ids=[0, 3]",
        "env.train.total_num_envs=4",
        "env.train.max_episode_steps=24",
        "env.train.max_steps_per_rollout_epoch=16",
        "env.init_params.reward=subgoals",  # values begin at 0, and an untrained policy never succeeds
        "rollout.pipeline_stage_num=1",
    ],
    "libero_10, with a critic": [
        "env=libero_10",
        "model=tiny_vla",
        "env.init_params.reward=subgoals",
        "algorithm=ppo",
        "critic.enable=true",
        "env.init_params.draft=true",
        "env.task_ids=[0]",
        "env.train.total_num_envs=4",
        "env.train.max_episode_steps=16",
        "rollout.pipeline_stage_num=1",
    ],
    "libero_10": [
        "env=libero_10",
        "model=tiny_vla",
        "env.init_params.draft=true",
        "env.task_ids=[0]",
        "env.train.total_num_envs=4",
        "env.train.max_episode_steps=16",
        "algorithm.group_size=2",
        "rollout.pipeline_stage_num=1",
        # A policy without training never succeeds there, and must learn something all the same.
        "algorithm.entropy_bonus=0.01",
    ],
}
STEPS = 3


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Trajectory]]:
    """Step -> what the actor trained on."""
    seen: dict[int, list[Trajectory]] = {}
    update = ActorWorker.update

    @functools.wraps(update)
    def recording(self: ActorWorker, *, step: int) -> UpdateReport:
        seen[step] = sorted(self._received, key=lambda t: (t.rollout_epoch, int(t.env_ids[0])))
        return update(self, step=step)

    monkeypatch.setattr(ActorWorker, "update", recording)
    return seen


LONG = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("simulator")]


@pytest.mark.parametrize(
    "env",
    [
        "dummy",
        "dummy, going on",
        "dummy, a part trained",
        "dummy, by success",
        "dummy, going on, with a critic",
        "gymnasium",
        "gymnasium, going on",
        "gymnasium, from a buffer",
        pytest.param("libero_10", marks=LONG),
        pytest.param("libero_10, going on", marks=LONG),
        pytest.param("libero_10, with a critic", marks=LONG),
        pytest.param("maniskill, going on", marks=LONG),
        pytest.param("robosuite, going on", marks=LONG),
    ],
)
def test_trajectories_metrics_and_weights_are_the_same(
    tmp_path: Path, env: str, trained_on: dict[int, list[Trajectory]]
) -> None:
    if module := {"libero_10": "libero", "maniskill": "mani_skill", "robosuite": "robosuite"}.get(env.split(",")[0]):
        pytest.importorskip(module, reason=f"the extra for {env} is not installed")

    def train(name: str, *overrides: str) -> Path:
        config = embodied(
            *SMALL[env],
            "cluster=serial",
            "cluster.num_threads.actor=1",
            "runner.eval_at_end=false",
            "runner.logger.logger_backends=[jsonl]",
            f"runner.output_dir={tmp_path / 'results'}",
            f"runner.experiment_name={name}",
            *overrides,
        )
        run(config)
        return only_run(config)

    whole = train("whole", f"runner.max_steps={STEPS}")
    expected = dict(trained_on)
    trained_on.clear()
    train("parts", "runner.max_steps=1")
    parts = train("parts", f"runner.max_steps={STEPS}", "runner.resume_dir=auto")

    going_on = "env.train.auto_reset=true" in SMALL[env]
    assert (parts / "checkpoints/global_step_1" / FILE).exists() == going_on
    assert sorted(trained_on) == sorted(expected) == list(range(STEPS))
    for step, trajectories in expected.items():
        for one, other in zip(trajectories, trained_on[step], strict=True):
            assert_equal(dataclasses.asdict(one), dataclasses.asdict(other))
        assert all(t.valid.any() for t in trajectories)
    assert metrics_of(whole) == metrics_of(parts)
    assert all(line["actor/grad_norm"] > 0 for line in metrics_of(whole))
    name = f"checkpoints/global_step_{STEPS}"
    assert_equal(saved_tensors(whole / name), saved_tensors(parts / name))
    buffers = [folder / name / BUFFER for folder in (whole, parts)]
    assert [buffer.exists() for buffer in buffers] == ["algorithm=sac" in SMALL[env]] * 2
    if buffers[0].exists():
        assert_equal(*map(load_file, buffers))
