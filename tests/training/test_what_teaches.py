"""Every preset with every kind of reward: a group that should teach does, and one that should not does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.cli import config_of
from embodied_rl.contracts import RolloutStart, Trajectory
from embodied_rl.envs.chunked import ChunkedEnv
from embodied_rl.language.completions import Sample, completion_trajectory
from embodied_rl.language.engines.base import Completion
from embodied_rl.models.base import Policy
from embodied_rl.schema import Config, EmbodiedConfig
from embodied_rl.workers.trajectory import TrajectoryBuilder
from tests.configs import REQUIRED
from tests.fakes import Script, ScriptedSim, seen_after
from tests.models.causal_lm.language import language_policy, language_spec
from tests.training.learner import Learner, same, values_per_chunk
from tests.training.rollouts import CHUNK, small_policy

OTHERS = ("base", "sft", "rlpd", "sac")
PRESETS = sorted(path.stem for path in Path("config/algorithm").glob("*.yaml") if path.stem not in OTHERS)
ENVS = sorted(path.stem for path in Path("config/env").glob("*.yaml"))
SIZE = 4
STEPS = 2 * CHUNK


@dataclass(frozen=True, slots=True)
class Shape:
    """How an env pays."""

    dense: bool
    """Progress, and 1 more while the goal holds; else that 1 alone."""
    relative: bool
    coefficient: float


SHAPES = [
    Shape(dense, relative, coefficient)
    for dense in (False, True)
    for relative in (False, True)
    for coefficient in (1.0, 5.0)
]


@dataclass(frozen=True, slots=True)
class Member:
    """An episode's course."""

    progress: float = 0.0
    """Of the dense level, in the first step."""
    success_at: int | None = None

    def levels(self, shape: Shape) -> list[float]:
        """Of the reward, after each step."""
        return [float(step == self.success_at) + self.progress * shape.dense for step in range(1, STEPS + 1)]

    def script(self, shape: Shape) -> Script:
        return Script(rewards=self.levels(shape), success=[step == self.success_at for step in range(1, STEPS + 1)])

    def paid(self, shape: Shape) -> float:
        """What the episode's rewards add up to."""
        taken = self.levels(shape)[: self.success_at]
        return shape.coefficient * (taken[-1] if shape.relative else sum(taken))


FAILS, SOLVES = Member(), Member(success_at=4)
GROUPS: dict[str, list[Member]] = {
    "some succeed": [SOLVES, FAILS, FAILS, SOLVES],
    "one fails": [SOLVES, SOLVES, SOLVES, FAILS],
    "all fail": [FAILS] * SIZE,
    "all succeed": [SOLVES] * SIZE,
    # As where objects still settle: a robot that does nothing is paid.
    "all fail, and idle pays": [Member(progress=0.06)] * SIZE,
    "all fail, nearer and farther": [Member(progress=0.25 * place) for place in range(SIZE)],
    "all succeed, on other ways": [Member(progress=0.25 * place, success_at=4) for place in range(SIZE)],
    "the failure made more progress": [Member(progress=0.9), SOLVES, SOLVES, SOLVES],
}
MIXED = {"some succeed", "one fails", "the failure made more progress"}


def play(config: Config, policy: Policy, shape: Shape, members: Sequence[Member]) -> Trajectory:
    """The group's rollout, through the module that shapes all rewards."""
    env = ChunkedEnv(
        ScriptedSim(SIZE, [member.script(shape) for member in members]),
        env_ids=range(SIZE),
        num_action_chunks=CHUNK,
        max_episode_steps=STEPS,
        auto_reset=False,
        ignore_terminations=False,
        use_rel_reward=shape.relative,
        reward_coef=shape.coefficient,
    )
    values = values_per_chunk(config)
    generator = torch.Generator().manual_seed(0)
    obs = env.reset(range(SIZE))
    builder = TrajectoryBuilder(RolloutStart(obs=obs, group_ids=torch.zeros(1, SIZE, dtype=torch.int64)))
    for number in range(STEPS // CHUNK):
        with torch.no_grad():
            output = policy.act(obs, greedy=False, temperature=1.0, generator=generator)
        # A critic that expects nothing: advantages are the rewards' alone.
        builder.decided(replace(output, values=torch.zeros(SIZE, values) if values else None), 0)
        result = env.chunk_step(output.actions)
        result = replace(result, last=number + 1 == STEPS // CHUNK)
        builder.happened(result, torch.zeros(SIZE) if values else None, None)
        obs = seen_after(result)
    [trajectory] = builder.complete()
    return trajectory


def config_with(preset: str, *overrides: str) -> Config:
    critic = ["algorithm.value_loss_coef=0"] if preset == "ppo" else []
    return config_of(
        f"algorithm={preset}", f"algorithm.group_size={SIZE}", "algorithm.n_minibatches=1", *critic, *overrides
    )


def taught(learner: Learner, trajectory: Trajectory) -> bool:
    """Whether the batch has an advantage and the update a gradient, which must agree."""
    before = learner.weights()
    batch = learner.batch([trajectory])
    # Of float32 scores that are all equal, a mean over the batch may be off by rounding.
    advantages = bool((batch.advantages[batch.loss_mask].abs() > 1e-4).any())
    learner.update(batch, step=0)
    after = learner.weights()
    moved = max((after[name] - tensor).abs().max().item() for name, tensor in before.items())
    assert (moved > 1e-6) == advantages, (moved, batch.advantages)
    return advantages


def differ(numbers: Sequence[float]) -> bool:
    return max(numbers) - min(numbers) > 1e-6


def test_all_envs_pay_in_one_of_these_shapes() -> None:
    for env in ENVS:
        config = config_of(f"env={env}", *REQUIRED.get(env, ()))
        assert isinstance(config, EmbodiedConfig)
        assert Shape(False, config.env.use_rel_reward, config.env.reward_coef) in SHAPES


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_groups_of_episodes(mesh: DeviceMesh, preset: str, shape: Shape) -> None:
    config = config_with(preset, "env=dummy")
    algorithm = config.algorithm
    for name, members in GROUPS.items():
        learner = Learner(mesh, config)
        trajectory = play(config, small_policy(values_per_chunk(config)), shape, members)
        paid = [member.paid(shape) for member in members]
        assert trajectory.rewards.sum((0, 2)).tolist() == pytest.approx(paid, abs=1e-5)
        assert trajectory.scores.tolist() == [member.success_at is not None for member in members]
        if algorithm.filter_rewards:
            expected = name in MIXED
        elif ADVANTAGES[algorithm.adv_type].needs_values:
            expected = any(paid)  # rewards are valued as they are
        else:
            expected = differ(paid)
        assert taught(learner, trajectory) == expected, name
        if name in MIXED:
            assert expected, "where some succeed, every preset learns in every env"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_successes_are_imitated(mesh: DeviceMesh, shape: Shape) -> None:
    config = config_with("grpo", "env=dummy", "algorithm.positive_nll_coef=0.5")
    for name, moves in (("all fail", False), ("all fail, and idle pays", False), ("all succeed", True)):
        learner = Learner(mesh, config)
        before = learner.weights()
        batch = learner.batch([play(config, small_policy(), shape, GROUPS[name])])
        assert not batch.advantages[batch.loss_mask].any()
        learner.update(batch, step=0)
        assert same(learner.weights(), before) != moves, name


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion's outcome."""

    score: float | None
    penalty: float = 0.0


RIGHT, WRONG, UNKNOWN = Answer(1.0), Answer(0.0), Answer(None)
ANSWERS: dict[str, list[Answer]] = {
    "some right": [RIGHT, WRONG, WRONG, RIGHT],
    "some right, too long": [Answer(1.0, -1.0), WRONG, WRONG, WRONG],
    "some right, some unknown": [RIGHT, UNKNOWN, WRONG, UNKNOWN],
    "all wrong": [WRONG] * SIZE,
    "all right": [RIGHT] * SIZE,
    "all right, some too long": [RIGHT, RIGHT, Answer(1.0, -0.5), RIGHT],
    "all wrong, some too long": [WRONG, WRONG, Answer(0.0, -0.5), WRONG],
    "all right but the unknown": [RIGHT, RIGHT, RIGHT, UNKNOWN],
    "all wrong but the unknown": [WRONG, UNKNOWN, WRONG, WRONG],
    "one known": [UNKNOWN, RIGHT, UNKNOWN, UNKNOWN],
    "none known": [UNKNOWN] * SIZE,
}
TOKENS = 6


def language_learner(mesh: DeviceMesh, config: Config) -> Learner:
    return Learner(mesh, config, make_policy=lambda values: language_policy(language_spec(TOKENS, values)))


def answered(config: Config, learner: Learner, answers: Sequence[Answer]) -> Trajectory:
    """A prompt's completions, whose log-probabilities are the learner's own."""
    ids = torch.randint(0, 40, (SIZE, TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    samples = [
        Sample(
            group_id=0,
            sample_id=number,
            prompt=(3, 4, 5),
            completion=Completion(
                token_ids=tuple(row[: 3 + number]), logprobs=(0.0,) * (3 + number), finish_reason="stop"
            ),
            score=answer.score,
            penalty=answer.penalty,
        )
        for number, (row, answer) in enumerate(zip(ids, answers, strict=True))
    ]
    trajectory = completion_trajectory(
        samples,
        max_prompt_length=4,
        max_new_tokens=TOKENS,
        pad_token_id=0,
        policy_version=0,
    )
    inputs = {key: tensor[0] for key, tensor in trajectory.replay_inputs.items()}
    with torch.no_grad():
        logprobs = learner.policy(inputs, temperature=1.0).logprobs[None]
    critic = config.algorithm.adv_type == "gae"
    return replace(
        trajectory,
        logprobs=logprobs,
        values=torch.zeros(1, SIZE, 1) if critic else None,
        bootstrap_values=torch.zeros(1, SIZE) if critic else None,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_groups_of_completions(mesh: DeviceMesh, preset: str) -> None:
    config = config_with(preset, "task=math")
    algorithm = config.algorithm
    for name, answers in ANSWERS.items():
        learner = language_learner(mesh, config)
        paid = [answer.score + answer.penalty for answer in answers if answer.score is not None]
        scores = [answer.score for answer in answers if answer.score is not None]
        if len(paid) < 2 and ADVANTAGES[algorithm.adv_type].batch_normalized:
            continue  # one number has no deviation
        if algorithm.filter_rewards:
            expected = len(scores) > 1 and 0 < sum(scores) < len(scores) and differ(paid)
        elif ADVANTAGES[algorithm.adv_type].needs_values:
            expected = differ(paid)  # normalised over the batch, which is this group: one decision each
        else:
            expected = len(paid) > 1 and differ(paid)
        assert taught(learner, answered(config, learner, answers)) == expected, name
        if name.startswith("some right") and differ(paid):
            assert expected, "where some are right, every preset learns"
