"""Training on a replay buffer, from the simulators to its update."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied_rl.commands.plan import arithmetic_lines
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.registry import build_policy
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.memory import Estimate, Need
from embodied_rl.tasks.planning import plan_of
from embodied_rl.workers.replay_actor import ReplayActor
from tests.configs import config_of, embodied
from tests.demonstrations.recording import record
from tests.workers.job import ChunkSpy, Job, easy, small

SAC = (
    "model=sac_mlp",
    "algorithm=sac",
    "algorithm.sac.hidden_size=16",
    "algorithm.replay.batch_size=32",
    "algorithm.replay.learning_starts=0",
    "algorithm.replay.random_chunks=0",
    "model.num_action_chunks=4",
)
RESETS = ("env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=16")


def replaying(*overrides: str) -> EmbodiedConfig:
    return small(*SAC, *overrides)


def actor_of(job: Job) -> ReplayActor:
    actor = job.actor
    assert isinstance(actor, ReplayActor)
    return actor


@pytest.mark.parametrize("resets", [(), RESETS])
def test_the_buffer_holds_what_the_envs_did(monkeypatch: pytest.MonkeyPatch, resets: tuple[str, ...]) -> None:
    """Each chunk's executed actions, rewards, and the state that the env showed after it, in its own episode."""
    spy = ChunkSpy(monkeypatch)
    gamma = 0.9
    with Job(easy(replaying("env.train.max_episode_steps=6", f"algorithm.gamma={gamma}", *resets), 0.95)) as job:
        trajectories, _, _ = job.roll()
        job.update()
        buffer = actor_of(job)._buffer
        found = buffer.sample(torch.arange(len(buffer)))
    assert found.actions.abs().max() <= 1
    row = 0
    for trajectory in trajectories:
        results = spy.results[int(trajectory.env_ids[0])]
        for member, env_id in enumerate(trajectory.env_ids.tolist()):
            for t, result in enumerate(results):
                steps = int(result.valid[member].sum())
                if not steps:
                    continue
                assert torch.equal(found.inputs["state"][row], trajectory.replay_inputs["state"][t, member])
                assert torch.equal(found.actions[row], trajectory.replay_inputs["samples"][t, member].tanh())
                reward = sum(gamma**k * float(result.rewards[member, k]) for k in range(steps))
                assert found.rewards[row].item() == pytest.approx(reward, abs=1e-5)
                ended = bool(result.terminated[member].any())
                assert found.discounts[row].item() == pytest.approx(0.0 if ended else gamma**steps)
                if not ended:
                    final = result.final_obs
                    after = result.next_obs
                    if final is not None and env_id in final.env_ids.tolist():
                        after, place = final, final.env_ids.tolist().index(env_id)
                    else:
                        place = member
                    assert after is not None
                    assert torch.equal(found.next_inputs["state"][row], after.state[place])
                row += 1
    assert row == len(found.rewards)
    assert 0 < (found.discounts == 0).sum() < row


def test_updates_follow_the_chunks_that_come() -> None:
    """16 envs of 2 chunks; half an update each, of those after the first 40."""
    with Job(replaying("algorithm.replay.update_to_data=0.5", "algorithm.replay.learning_starts=40")) as job:
        made = []
        before = job.weights()
        for step in range(3):
            trajectories, _, _ = job.roll(step)
            came = sum(int(t.valid.any(-1).sum()) for t in trajectories)
            metrics = job.update(step)
            assert metrics["samples"] == came
            made.append((metrics["buffer_chunks"], metrics["updates"]))
            if not made[0][1] and step == 0:
                assert all(torch.equal(before[name], tensor) for name, tensor in job.weights().items())
    total = [chunks for chunks, _ in made]
    expected = [math.floor(0.5 * max(0, chunks - 40)) for chunks in total]
    assert [updates for _, updates in made] == [b - a for a, b in zip([0, *expected], expected, strict=False)]
    assert expected[0] == 0 < expected[-1]


def test_the_policy_waits_for_its_critics() -> None:
    """Two steps in which they alone are trained, on what the policy does as it is."""
    with Job(replaying("algorithm.critic_warmup_steps=2")) as job:
        weights = [job.weights()]
        for step in range(3):
            job.roll(step)
            metrics = job.update(step)
            assert metrics["updates"] > 0 and ("policy_loss" in metrics) == (step == 2)
            weights.append(job.weights())
    start, *others = weights
    same = [all(torch.equal(start[name], tensor) for name, tensor in other.items()) for other in others]
    assert same == [True, True, False]


@pytest.mark.parametrize("step", [1, 2])
def test_the_wait_ends_with_the_runs_step_wherever_it_goes_on(tmp_path: Path, step: int) -> None:
    """Of a run whose policy waits for two steps, resumed before or after them."""
    waiting = replaying("algorithm.critic_warmup_steps=2")
    with Job(waiting) as job:
        job.roll()
        job.update()
        job.actor.save(tmp_path)
    with Job(waiting) as job:
        job.actor.load(tmp_path, weights_only=False)
        job.roll(step)
        assert ("policy_loss" in job.update(step)) == (step == 2)


def test_the_first_chunks_are_random() -> None:
    with Job(replaying()) as job:
        for step, at_random in enumerate((True, False)):
            trajectories, _, _ = job.roll(step, at_random=at_random)
            uniform = [torch.equal(t.logprobs, torch.full_like(t.logprobs, -math.log(2.0))) for t in trajectories]
            assert uniform == [at_random] * len(trajectories)
            actions = torch.cat([t.actions.flatten() for t in trajectories if t.actions is not None])
            if at_random:
                assert abs(actions.mean()) < 0.15 and actions.std() == pytest.approx(1 / math.sqrt(3), abs=0.1)
            job.update(step)


def test_half_of_a_batch_is_shown(tmp_path: Path) -> None:
    path = record(tmp_path / "shown", range(4))
    keys = ("algorithm.replay.batch_size=9", "algorithm.replay.demonstration_share=0.25")
    with Job(replaying(f"algorithm.replay.demonstrations={path}", *keys)) as job:
        job.roll()
        metrics = job.update()
        actor = actor_of(job)
        shown = actor._demonstrations
        assert shown is not None
        everything = shown.observations(torch.arange(shown.num_frames)).state
        batches = [actor._draw(number) for number in range(20)]
    for batch in batches:
        from_data = (batch.inputs["state"][:, None] == everything).all(-1).any(-1)
        assert from_data.tolist() == [False] * 7 + [True] * 2
    assert not torch.equal(batches[0].inputs["state"], batches[1].inputs["state"])
    assert metrics["updates"] > 0


def test_a_run_starts_from_a_checkpoints_critics(tmp_path: Path) -> None:
    with Job(replaying()) as job:
        job.roll()
        job.update()
        actor = actor_of(job)
        trained = [p.detach().clone() for p in actor._critics.parameters()]
        actor.save(tmp_path / "checkpoint", contents=("model",))
    assert not (tmp_path / "checkpoint/replay.safetensors").exists(), "weights alone"
    with Job(replaying(), initial=tmp_path / "checkpoint") as job:
        for found, expected in zip(actor_of(job)._critics.parameters(), trained, strict=True):
            assert torch.equal(found, expected)
        assert len(actor_of(job)._buffer) == 0


@pytest.mark.parametrize(("rate", "temperature"), [("null", 0.01), ("3e-4", 1.0)])
def test_a_temperature_that_is_not_trained_is_the_configurations(tmp_path: Path, rate: str, temperature: float) -> None:
    with Job(replaying("algorithm.sac.temperature_lr=1e-9")) as job:
        job.actor.save(tmp_path / "saved")
    config = replaying(f"algorithm.sac.temperature_lr={rate}", "algorithm.sac.initial_temperature=0.01")
    with Job(config, initial=tmp_path / "saved") as job:
        assert actor_of(job)._critics.temperature.item() == pytest.approx(temperature)


def test_critics_of_another_kind_are_not_taken(tmp_path: Path) -> None:
    keys = ("model=sac_mlp", "model.num_action_chunks=4", "algorithm=ppo", "critic.enable=true")
    runs = {"sac": replaying(), "ppo": small(*keys)}
    for name, config in runs.items():
        with Job(config) as job:
            weights = job.weights()
            job.actor.save(tmp_path / name)
        [other] = runs.keys() - {name}
        with Job(runs[other], initial=tmp_path / name) as job:
            there = job.weights()
            assert all(torch.equal(there[key], tensor) for key, tensor in weights.items())
    evaluated = replaying("algorithm.sac.num_critics=3", "runner.only_eval=true")
    with Job(evaluated, initial=tmp_path / "sac") as job:
        assert len(actor_of(job)._critics.state_dict()) > 0, "whatever the checkpoint's critics are"


def test_dropout_depends_on_the_update_alone() -> None:
    found = []
    for seed in (0, 1):
        with Job(
            replaying("model.lora.rank=2", "model.lora.dropout=0.3", "model.lora.target_modules=all-linear")
        ) as job:
            job.roll()
            torch.manual_seed(seed)  # as in a process that goes on
            job.update()
            found.append(job.weights())
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


def test_a_preset_that_adapts_a_penalty_has_none_to_save(tmp_path: Path) -> None:
    """Keys that are not read may come from a file."""
    config = replaying()
    kl = replace(config.algorithm.kl_ctrl, type="adaptive")
    with Job(replace(config, algorithm=replace(config.algorithm, kl_ctrl=kl))) as job:
        job.roll()
        job.update()
        actor_of(job).save(tmp_path / "checkpoint", contents=("model", "optimizer"))
        actor_of(job).load(tmp_path / "checkpoint", weights_only=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.sac.target_critics=3",), r"target_critics: got 3, more than num_critics=2"),
        (("algorithm.replay.capacity=10",), r"capacity: got 10, fewer than the 32 chunks of one training step"),
        (("algorithm.replay.capacity=47",), r"the 32 chunks of one training step and the 16 states in which"),
        (
            ("algorithm.replay.capacity=63", "env.train.auto_reset=true", "env.train.ignore_terminations=false"),
            r"the 32 chunks of one training step and the 32 states in which its episodes may end",
        ),
        (("cluster=process", "cluster.component_placement.actor=0-1"), r"got sac with 2 actor ranks"),
        (("actor.enable_offload=true",), r"its critics stay on the device"),
        (("actor.fsdp_config.cpu_offload=true",), r"cpu_offload=true, but its critics stay on the device"),
        (("critic.enable=true",), r"critic\.enable: got true"),
        (("algorithm.clip_ratio_low=0.1",), r"clip_ratio_low: this run would not read it, since .*replay buffer"),
        (
            ("algorithm.kl_beta=0.1",),
            r"kl_beta: got 0\.1, but .*replay buffer and would not read it; .* 0\.0, or set that",
        ),
        (
            ("algorithm.sac.temperature_lr=null", "algorithm.sac.target_entropy=-7.5"),
            r"target_entropy: this run would not read it, since .*temperature_lr is null",
        ),
        (("algorithm.update_epoch=2",), r"update_epoch: this run would not read it"),
        (("actor.micro_batch_size=8",), r"micro_batch_size: this run would not read it"),
        (("critic.params={}",), r"critic\.params: this run would not read it"),
        (("algorithm.replay.demonstration_share=0.1",), r"demonstration_share: .*demonstrations is null"),
        (("algorithm.learner=td3",), r"algorithm\.learner"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], message: str) -> None:
    base = [key for key in SAC if not key.startswith(overrides[0].split("=")[0] + "=")]
    with pytest.raises(ConfigError, match=message):
        small(*base, *overrides)


def test_a_buffer_of_one_step_is_large_enough() -> None:
    with Job(replaying("algorithm.replay.capacity=48")) as job:
        job.roll()
        metrics = job.update()
    assert metrics["buffer_chunks"] == metrics["samples"]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), ["adv_type: got 'grpo'"]),  # the env's own preset
        (("algorithm=dapo",), ["adv_type: got 'grpo'", "filter_rewards: got True", "max_resample_rounds: got 3"]),
        (("algorithm=ppo",), ["adv_type: got 'gae'"]),
        (("algorithm.adv_type=raw", "algorithm.filter_rewards=true"), ["filter_rewards: got True"]),
        (("algorithm.adv_type=raw", "algorithm.max_resample_rounds=2"), ["max_resample_rounds: got 2"]),
    ],
)
def test_a_preset_of_rollouts_is_no_preset_of_a_buffer(overrides: tuple[str, ...], found: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        embodied("env=dummy", "model=sac_mlp", *overrides, "algorithm.learner=sac")
    assert len(raised.value.problems) == len(found)
    for problem, start in zip(raised.value.problems, found, strict=True):
        assert problem.startswith(f"algorithm.{start}, but algorithm.learner=sac trains on a replay buffer")
        assert "use algorithm=sac" in problem
    with pytest.raises(ConfigError, match=r"critic\.enable: got true, but .*learner=sac has critics of its own"):
        embodied("env=dummy", "model=sac_mlp", "algorithm=ppo", "algorithm.learner=sac", "critic.enable=true")


@pytest.mark.parametrize(
    "asked", ["kl_beta: 0.5", "bc_coef: 1.0\n  bc_path: /data", "positive_nll_coef: 0.3", "entropy_bonus: 0.1"]
)
def test_a_term_of_the_loss_that_a_file_asks_for(asked: str, tmp_path: Path) -> None:
    """Unlike keys that say how often or how fast, which a preset may have for other learners."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\nalgorithm:\n  {asked}\n")
    with pytest.raises(ConfigError, match=rf"algorithm\.{asked.partition(':')[0]}: got .*would not read it"):
        embodied(f"hydra.searchpath=[{tmp_path}]", "env=dummy", "model=sac_mlp", "algorithm=sac", "experiment=mine")


def test_the_learner_alone_may_be_asked_for() -> None:
    """With keys as ``algorithm=sac`` has them."""
    config = embodied("env=dummy", "model=sac_mlp", "algorithm.learner=sac", "algorithm.adv_type=raw")
    assert config.algorithm.learner == "sac"


def test_keys_of_the_buffer_are_refused_elsewhere() -> None:
    for key in ("algorithm.replay.capacity=50", "algorithm.sac.tau=0.1", "critic.optim.lr=0.1"):
        with pytest.raises(ConfigError, match="this run would not read it"):
            embodied("env=dummy", "algorithm=ppo", key)
    with pytest.raises(ConfigError, match="task=math has no simulator"):
        config_of("task=math", "algorithm.learner=sac")


def test_a_policy_that_critics_cannot_train_is_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match=r"learner=sac: model_type=mlp .*model=sac_mlp"):
        plan_of(embodied("env=dummy", "algorithm=sac", "model=mlp"))
    choices = PolicySpec(
        action_dim=1, num_action_chunks=1, state_dim=4, image_shapes={}, values_per_chunk=0, action_choices=(2,)
    )
    with pytest.raises(UserError, match=r"squash: got true, but this env's actions are choices"):
        build_policy("mlp", choices, {"squash": True})


def test_the_plan_counts_the_buffer_and_the_critics() -> None:
    small, large = (
        Estimate(plan_of(embodied("env=dummy", "model=sac_mlp", "algorithm=sac", *keys))).of("actor")
        for keys in ([], ["algorithm.replay.capacity=300000", "algorithm.sac.num_critics=3"])
    )
    # state [4], chunk [1,2], reward and weight in float32, and whether there is one
    assert large.buffer == 3 * small.buffer == 300_000 * (4 * (4 + 2 + 2) + 1)
    critic = 6 * 256 + 256 + 256 * 256 + 256 + 256 + 1
    assert large.weights - small.weights == 4 * (2 + 3) * critic  # with a target network, a gradient and two moments
    lines = "\n".join(arithmetic_lines(plan_of(embodied("env=dummy", "model=sac_mlp", "algorithm=sac"))))
    assert "the buffer: 100000 chunks" in lines and "an update: 1 a chunk after the first 100, each on 256" in lines


def test_the_plan_counts_a_buffers_copy_at_a_save() -> None:
    def need(*keys: str) -> Need:
        return Estimate(plan_of(embodied("env=dummy", "model=sac_mlp", "algorithm=sac", *keys))).of("actor")

    saving = need()
    assert saving.snapshot == saving.buffer > 0
    assert need("runner.save_contents=[model]").snapshot == need("runner.save_interval=-1").snapshot == 0
    assert saving.total - need("runner.save_contents=[model]").total == saving.buffer


def test_the_plan_counts_the_updates_of_the_chunks_that_come_later() -> None:
    """A step of 4 envs has 20 chunks."""
    keys = ("env.train.total_num_envs=4", "env.train.max_episode_steps=5", "model.num_action_chunks=1")
    ratio = ("algorithm.replay.update_to_data=0.5", "algorithm.replay.learning_starts=30", "cluster=serial")
    plan = plan_of(embodied("env=dummy", "model=sac_mlp", "algorithm=sac", "runner.max_steps=4", *keys, *ratio))
    for finished, line in (
        (0, "the run: 4 steps = at most 80 chunks = 25 updates of the critics"),
        (1, "the run: 3 steps = at most 60 chunks = 25 updates of the critics"),
        (3, "the run: 1 steps = at most 20 chunks = 10 updates of the critics"),
    ):
        lines = arithmetic_lines(replace(plan, start=replace(plan.start, step=finished)))
        assert any(text.startswith(line) for text in lines), lines
        assert any(text.endswith("one of the policy for each 1") for text in lines), lines


def test_the_plan_says_that_the_policy_waits() -> None:
    plan = plan_of(embodied("env=dummy", "model=sac_mlp", "algorithm=sac", "algorithm.critic_warmup_steps=2"))
    lines = arithmetic_lines(plan)
    assert any(text.endswith("one of the policy for each 1 after the first 2 steps") for text in lines), lines
