"""Generation workers: what they hand to the actor, and that their number changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.contracts import Trajectory
from embodied_rl.errors import UserError
from embodied_rl.language.accuracy import CompletionRecord
from embodied_rl.launch import connect, make_backend
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.runtime.serial import SerialGroup
from embodied_rl.schema import MathConfig
from embodied_rl.tasks.math.reporting import all_records
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.generation import GenerationReport, GenerationWorker
from tests.configs import small_math
from tests.gathered import full_state_dict

SCORES = "tests.language.rewards.scores"


class LanguageJob:
    """Connected workers in this process, with version 0 of the weights. Use as a context manager."""

    def __init__(self, config: MathConfig) -> None:
        self.config = config
        self._backend = make_backend(config)
        try:
            self._rollout, self._actor = connect(config, self._backend)
            self.sync(0)
        except BaseException:
            self._backend.shutdown()
            raise

    def __enter__(self) -> LanguageJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.shutdown()

    def sync(self, version: int) -> None:
        loaded = self._rollout.call(GenerationWorker.load_weights, version)
        self._actor.call(ActorWorker.publish_weights, version).wait()
        assert set(loaded.wait()) == {version}

    def generate(self, step: int = 0, number: int = 0) -> tuple[list[Trajectory], list[CompletionRecord]]:
        """A training step's trajectories, which the actor holds, too, and its completions."""
        received = self._actor.call(ActorWorker.receive, step=step)
        reports: list[GenerationReport] = self._rollout.call(GenerationWorker.generate, step=step, number=number).wait()
        received.wait()
        return list(self.actor._received), all_records(reports)

    def evaluate(self, step: int = 0) -> list[CompletionRecord]:
        return all_records(self._rollout.call(GenerationWorker.evaluate, step=step).wait())

    def update(self, step: int = 0) -> dict[str, float]:
        [report] = self._actor.call(ActorWorker.update, step=step).wait()
        return report.metrics

    def weights(self) -> dict[str, Tensor]:
        return full_state_dict(self.actor._policy)

    @property
    def actor(self) -> ActorWorker:
        assert isinstance(self._actor, SerialGroup)
        [worker] = self._actor.workers
        assert isinstance(worker, ActorWorker)
        return worker


def by_completion(trajectories: Sequence[Trajectory]) -> dict[int, dict[str, Any]]:
    """Completion's number -> its part of everything."""
    return {
        int(number): {
            "group": int(t.group_ids[row]),
            "rewards": t.rewards[0, row],
            "score": float(t.scores[row]),
            "valid": t.valid[0, row],
            "terminated": t.terminated[0, row],
            "truncated": t.truncated[0, row],
            "logprobs": t.logprobs[0, row],
            **{key: tensor[0, row] for key, tensor in t.replay_inputs.items()},
        }
        for t in trajectories
        for row, number in enumerate(t.env_ids)
    }


def test_the_actor_gets_what_was_generated() -> None:
    with LanguageJob(small_math(f"reward.function={SCORES}:by_text")) as job:
        trajectories, records = job.generate()
        policy = job.actor._policy
        assert isinstance(policy, CausalLMPolicy)
        found = by_completion(trajectories)
        assert [record.number for record in records] == list(range(24))
        assert sorted(found) == list(range(24))
        assert len({record.score for record in records}) > 12, "scores tell completions apart"
        for record in records:
            part = found[record.number]
            assert part["group"] == record.number // 4
            assert part["rewards"].sum() == pytest.approx(record.score)
            assert part["rewards"][record.length - 1] == pytest.approx(record.score)
            assert part["valid"].tolist() == [place < record.length for place in range(8)]
            ends = part["terminated"] if record.finish_reason == "stop" else part["truncated"]
            assert ends.nonzero().tolist() == [[record.length - 1]]
            assert int((part["terminated"] | part["truncated"]).sum()) == 1
            ids = part["response_ids"][: record.length].tolist()
            text = ids[:-1] if record.finish_reason == "stop" else ids
            assert policy.tokenizer.decode(text) == record.completion
            prompt = part["prompt_ids"][8 - int(part["prompt_lengths"]) :].tolist()
            assert policy.tokenizer.decode(prompt) == record.prompt
        assert len({record.prompt for record in records}) > 1


def test_logprobs_are_those_that_training_computes() -> None:
    # Where all answers are wrong no sample would be gone through, and there would be no ratio.
    with LanguageJob(
        small_math("algorithm.sampling_params.temperature=0.7", "actor.skip_zero_advantages=false")
    ) as job:
        [trajectory], _ = job.generate()
        inputs = {key: tensor[0] for key, tensor in trajectory.replay_inputs.items()}
        with torch.no_grad():
            expected = job.actor._policy(inputs, temperature=0.7).logprobs
        difference = (expected - trajectory.logprobs[0])[trajectory.valid[0]]
        assert difference.abs().max() <= 1e-5
        metrics = job.update()
        assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("workers", ["0-1", "0-2"])
def test_the_number_of_workers_changes_nothing(workers: str) -> None:
    with LanguageJob(small_math(f"reward.function={SCORES}:by_text")) as one:
        trajectories, records = one.generate(step=3)
        alone, held_out = by_completion(trajectories), one.evaluate()
        alone_metrics, alone_weights = one.update(), one.weights()
    with LanguageJob(
        small_math(f"reward.function={SCORES}:by_text", f"cluster.component_placement.rollout={workers}")
    ) as several:
        trajectories, again = several.generate(step=3)
        assert len(trajectories) == int(workers[-1]) + 1
        together = by_completion(trajectories)
        assert again == records
        assert several.evaluate() == held_out
        metrics, weights = several.update(), several.weights()
    assert alone.keys() == together.keys()
    for number, part in alone.items():
        for name, value in part.items():
            other = together[number][name]
            if name == "logprobs":
                assert torch.allclose(value, other, atol=1e-5)
            elif isinstance(value, Tensor):
                assert torch.equal(value, other), name
            else:
                assert value == other
    assert metrics["grad_norm"] == pytest.approx(alone_metrics["grad_norm"], rel=1e-4)
    for name, tensor in alone_weights.items():
        assert torch.allclose(tensor, weights[name], atol=1e-4), name


def test_steps_rounds_and_evaluations_differ_and_repeat() -> None:
    with LanguageJob(small_math()) as job:
        _, first = job.generate(step=0)
        _, again = job.generate(step=0)
        _, more = job.generate(step=0, number=1)
        _, later = job.generate(step=1)
        assert first == again
        texts = [[(r.prompt, r.completion) for r in records] for records in (first, more, later)]
        assert texts[0] != texts[1]
        assert texts[0] != texts[2]
        assert [record.number for record in more] == list(range(24, 48)), "numbers are unique in the step"
        held_out = job.evaluate(step=0)
        assert [record.number for record in held_out] == list(range(8))
        assert held_out == job.evaluate(step=5), "greedy: the same weights give the same answers"
        assert not {record.prompt for record in held_out} & {record.prompt for record in [*first, *more, *later]}


def test_scoring_in_processes_changes_nothing() -> None:
    scores = f"reward.function={SCORES}:sometimes_unverified"
    with LanguageJob(small_math(scores)) as job:
        _, alone = job.generate()
    with LanguageJob(small_math(scores, "reward.num_processes=2")) as job:
        _, several = job.generate()
    assert several == alone


def test_an_evaluation_may_answer_each_prompt_several_times() -> None:
    with LanguageJob(small_math("data.eval_completions=3", "algorithm.sampling_params.temperature_eval=1.0")) as job:
        records = job.evaluate()
        assert [record.number for record in records] == list(range(24))
        prompts = [record.prompt for record in records]
        assert prompts[0::3] == prompts[1::3] == prompts[2::3]
        assert len(set(prompts)) == 8
        assert len({record.completion for record in records}) > 8
        assert {record.source for record in records} == {"arithmetic"}


def test_unverified_completions_are_neither_trained_on_nor_compared_with() -> None:
    with LanguageJob(small_math(f"reward.function={SCORES}:sometimes_unverified")) as job:
        trajectories, records = job.generate()
        unverified = [record.number for record in records if record.score is None]
        assert 0 < len(unverified) < 24
        found = by_completion(trajectories)
        for record in records:
            assert bool(found[record.number]["valid"].any()) == (record.score is not None)
        verified: dict[int, int] = {}
        for record in records:
            verified[record.number // 4] = verified.get(record.number // 4, 0) + (record.score is not None)
        assert job.update()["samples"] == sum(count for count in verified.values() if count >= 2)


def test_completions_that_were_cut_can_be_left_out() -> None:
    with LanguageJob(small_math(f"reward.function={SCORES}:by_text", "reward.mask_truncated=true")) as job:
        trajectories, records = job.generate()
        found = by_completion(trajectories)
        assert {record.finish_reason for record in records} == {"stop", "length"}
        for record in records:
            assert bool(found[record.number]["valid"].any()) == (record.finish_reason == "stop")


def test_long_completions_lose_in_training_alone() -> None:
    penalty = "reward.overlong_buffer_length=4", "reward.overlong_penalty_factor=2"
    with LanguageJob(small_math(f"reward.function={SCORES}:by_text", *penalty)) as job:
        trajectories, records = job.generate()
        found = by_completion(trajectories)
        for record in records:
            assert record.score is not None
            lost = max(record.length - 4, 0) / 4 * 2  # of 8 tokens
            assert found[record.number]["rewards"].sum().item() == pytest.approx(record.score - lost, abs=1e-6)
            assert found[record.number]["score"] == pytest.approx(record.score)


def test_nothing_verified_teaches_nothing() -> None:
    with LanguageJob(small_math(f"reward.function={SCORES}:never")) as job:
        before = job.weights()
        job.generate()
        metrics = job.update()
        assert metrics["samples"] == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in job.weights().items())


@pytest.mark.parametrize("reward_type", ["chunk_level", "action_level"])
def test_a_value_head_is_trained_by_ppo(reward_type: str) -> None:
    config = small_math(
        "algorithm=ppo",
        f"algorithm.reward_type={reward_type}",
        f"reward.function={SCORES}:by_text",
        "actor.optim.lr=0.01",
    )
    with LanguageJob(config) as job:
        losses = []
        for step in range(3):
            job.generate(step=step)
            losses.append(job.update(step=step)["value_loss"])
            job.sync(step + 1)
        assert all(loss == loss for loss in losses)
        assert job.weights()["value_head.weight"].abs().sum() > 0


@pytest.mark.parametrize("logprob_type", ["token_level", "action_level", "chunk_level"])
def test_every_logprob_level_trains(logprob_type: str) -> None:
    with LanguageJob(small_math(f"algorithm.logprob_type={logprob_type}", f"reward.function={SCORES}:by_text")) as job:
        before = job.weights()
        job.generate()
        assert job.update()["grad_norm"] > 0
        assert any(not torch.equal(tensor, before[name]) for name, tensor in job.weights().items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.dataset=arithmetik"], "Did you mean 'arithmetic'?"),
        (["rollout.backend=vlm"], "rollout.backend: got 'vlm', expected one of hf"),
        (["reward.function=final"], "reward.function: got 'final'"),
        (["data.max_prompt_length=600"], "together more than the 512 tokens that the model takes"),
        (["data.eval_size=500"], "data.eval_size=500: "),
    ],
)
def test_what_does_not_fit_ends_the_start(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused, LanguageJob(small_math(*overrides)):
        pass
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.max_prompt_length=3"], "has 4 tokens, expected 1 to data.max_prompt_length=3"),
        (
            ["++model.params.architecture.characters='0123456789='"],
            "characters that the model's tokenizer does not know",
        ),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_one_message(overrides: list[str], message: str) -> None:
    with LanguageJob(small_math(*overrides)) as job, pytest.raises(UserError) as refused:
        job.generate()
    assert message in str(refused.value)
