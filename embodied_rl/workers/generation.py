"""The generation worker: completes prompts, scores the completions and hands them to the actor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from embodied_rl.channel.base import run_blocking
from embodied_rl.contracts import Delivery
from embodied_rl.errors import UserError
from embodied_rl.language.accuracy import CompletionRecord
from embodied_rl.language.completions import Sample, completion_trajectory
from embodied_rl.language.datasets.registry import Problem, PromptEncoder, build_dataset, problem_id
from embodied_rl.language.engines.base import BACKENDS, Completion, GenerationBackend, Sampling
from embodied_rl.language.engines.sampling import prompt_seed
from embodied_rl.language.rewards.functions import overlong_penalty
from embodied_rl.language.rewards.scoring import Item, Scorer
from embodied_rl.models.base import PolicySpec
from embodied_rl.monitoring.peak_memory import UNKNOWN, Peak, PeakMemory
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.monitoring.work import main_type, peak_of
from embodied_rl.plan import Channels, RunPlan
from embodied_rl.runtime.worker import Worker, WorkerContext
from embodied_rl.schema import MathConfig
from embodied_rl.workers.trajectory import split_by_rank
from embodied_rl.workers.weight_planes import receiving_end
from embodied_rl.workers.weight_sync import WeightReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReport:
    """A generation worker's answer to the runner."""

    records: tuple[CompletionRecord, ...]
    seconds: dict[str, float]
    """Phase -> wall seconds."""
    interruptions: int = 0
    """Versions of the weights that came in the middle of the rollout."""
    lengths: tuple[tuple[int, int], ...] = ()
    """Tokens of prompt and completion, of each completion."""
    peak: float | None = None
    """FLOP/s of the worker's device; None: nobody knows."""
    peak_memory: Peak = UNKNOWN
    """Of the process, in the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """One of the prompts of a training step or an evaluation."""

    number: int
    """Over all workers."""
    text: str
    """As the model reads it."""
    token_ids: tuple[int, ...]
    problem: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    prompt: _Prompt
    number: int
    """Over all workers, in the order of the prompts' numbers."""
    completion: Completion


class GenerationWorker(Worker):
    """Takes every ``world_size``-th prompt of a training step and of an evaluation.

    A prompt's completions depend on the weights, the seed, the step and the prompt's number, not on the other prompts:
    any number of workers gives the same ones.
    """

    def __init__(self, context: WorkerContext, plan: RunPlan[MathConfig], channels: Channels) -> None:
        super().__init__(context)
        config = plan.config
        self._model, self._rollout = config.model, config.rollout
        self._data, self._reward_config = config.data, config.reward
        self._sampling, self._group_size = config.algorithm.sampling_params, config.algorithm.group_size
        self._seed, self._actor_ranks = config.actor.seed, plan.world_size("actor")
        self._trajectories, self._channel = (
            Channels.need(channels.trajectories),
            receiving_end(channels.weights, plan, context),
        )
        self._timer = PhaseTimer(ended=context.trace.phase)
        self._peak_memory = PeakMemory(context.device)
        self._interruptions = 0
        self._open = ExitStack()

    def close(self) -> None:
        self._open.close()

    def setup(self, spec: PolicySpec) -> None:
        """Build engine, data set and reward; the weights come with the first :meth:`load_weights`.

        Raises:
            UserError: one of them does not exist or does not take its options, or they do not fit each other.
        """
        self._dataset = build_dataset(self._data.dataset, self._data.params)
        self._scorer = Scorer(self._reward_config, device=self.context.device)
        self._open.callback(self._scorer.close)
        make: type[GenerationBackend] = BACKENDS.load(self._rollout.backend)
        self._backend = make(self._model, spec, self._rollout, self.context.device)
        self._open.callback(self._backend.close)
        self._weights = WeightReceiver(self._backend.weights(), self._channel, self.context.rank)
        self._peak = peak_of(self.context.device, main_type(self._backend.weights().values()))
        if self._rollout.interruptible and not self._backend.interruptible:
            raise UserError(
                f"rollout.interruptible: got true, but rollout.backend={self._rollout.backend} takes no weights in the "
                "middle of a completion; set it to false"
            )
        longest, limit = self._data.max_prompt_length + self._rollout.max_new_tokens, self._backend.max_length
        if limit is not None and longest > limit:
            raise UserError(
                f"data.max_prompt_length={self._data.max_prompt_length} and rollout.max_new_tokens="
                f"{self._rollout.max_new_tokens}: together more than the {limit} tokens that the model takes"
            )
        self._encoder = PromptEncoder(self._backend.tokenizer, self._data.max_prompt_length)
        note = self._dataset.prepare(self._encoder)
        if note and self.context.rank == 0:  # all ranks have the same data
            print(note, flush=True)
        self._held_out = self._dataset.held_out(self._data.eval_size)

    def count_held_out(self) -> int:
        """Number of prompts of an evaluation, over all workers."""
        return len(self._held_out)

    async def load_weights(self, version: int) -> int:
        """Take this version of the weights from the actor, unless it came in the middle of a rollout; returns what is
        held then.

        Raises:
            UserError: the engine cannot take it.
        """
        if await self._weights.receive_until(version):
            self._backend.refresh()
        return self._weights.version

    async def generate(self, *, step: int, number: int = 0) -> GenerationReport:
        """Complete and score a training step's prompts, and give each actor rank its share: whole groups.

        Args:
            number: which of the step's rounds this is; each has prompts of its own.
        """
        self._peak_memory.begin()
        count, size = self._data.rollout_batch_size, self._group_size
        with self._timer.phase("prompts"):
            problems = self._dataset.draw(seed=self._data.seed, step=step, count=count, number=number)
            prompts = self._own(problems, number * count)
        oldest, self._interruptions = self._weights.version, 0
        answers = self._complete(
            prompts,
            Sampling(
                n=size,
                temperature=self._sampling.temperature,
                top_p=self._rollout.top_p,
                top_k=self._rollout.top_k,
                min_new_tokens=self._rollout.min_new_tokens,
                repetition_penalty=self._rollout.repetition_penalty,
                stop=tuple(self._rollout.stop),
                max_new_tokens=self._rollout.max_new_tokens,
            ),
            held_out=False,
            step=step,
        )
        report = self._report(answers)
        samples = [
            Sample(
                group_id=answer.prompt.number,
                sample_id=answer.number,
                prompt=answer.prompt.token_ids,
                completion=answer.completion,
                score=self._known_score(record),
                penalty=self._penalty(record),
            )
            for answer, record in zip(answers, report.records, strict=True)
        ]
        await self._deliver(samples, step, oldest)
        return replace(report, interruptions=self._interruptions, peak_memory=self._peak_memory.end())

    async def demonstrate(self, *, step: int) -> int:
        """Give each actor rank its share of the demonstrations of a training step's prompts; returns their tokens.

        Raises:
            UserError: a problem without demonstration, or a demonstration that is longer than a completion may be.
        """
        problems = self._dataset.draw(seed=self._data.seed, step=step, count=self._data.rollout_batch_size)
        prompts = self._own(problems, 0)
        samples = [
            Sample(
                group_id=prompt.number,
                sample_id=prompt.number,
                prompt=prompt.token_ids,
                completion=self._demonstration(prompt),
                score=0.0,
            )
            for prompt in prompts
        ]
        await self._deliver(samples, step, self._weights.version)
        return sum(len(sample.completion.token_ids) for sample in samples)

    def evaluate(self, *, step: int) -> GenerationReport:
        """``data.eval_completions`` of every held-out prompt, at the evaluation's temperature, from all tokens."""
        prompts = self._own(self._held_out, 0)
        sampling = Sampling(
            n=self._data.eval_completions,
            temperature=self._sampling.temperature_eval,
            min_new_tokens=self._rollout.min_new_tokens,
            stop=tuple(self._rollout.stop),
            max_new_tokens=self._rollout.max_new_tokens,
        )
        return self._report(self._complete(prompts, sampling, held_out=True, step=step))

    async def _deliver(self, samples: Sequence[Sample], step: int, policy_version: int) -> None:
        """Give each actor rank its share.

        Args:
            policy_version: of the oldest weights that made any of them.
        """
        trajectory = completion_trajectory(
            samples,
            max_prompt_length=self._data.max_prompt_length,
            max_new_tokens=self._rollout.max_new_tokens,
            pad_token_id=self._backend.pad_token_id,
            policy_version=policy_version,
        )
        for rank, part in enumerate(split_by_rank(trajectory, self._actor_ranks)):
            await self._trajectories.put(Delivery(step=step, trajectory=part), key=rank)

    def _demonstration(self, prompt: _Prompt) -> Completion:
        """As the policy would have to give it, its end included."""
        tokenizer, limit, text = self._backend.tokenizer, self._rollout.max_new_tokens, prompt.problem.demonstration
        if text is None:
            raise UserError(f"the prompt {prompt.text[:80]!r} has no demonstration, and task=sft imitates one")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise UserError(
                f"the demonstration of {prompt.text[:80]!r} has characters that the model's tokenizer does not know: "
                f"{text[:80]!r}; use another model, or with model=tiny_lm set model.params.architecture.characters"
            )
        # Of several, the tokenizer's own ends a turn of its chat template.
        end = tokenizer.eos_token_id
        ids = [*ids, end if isinstance(end, int) else min(self._backend.stop_token_ids)]
        if len(ids) > limit:
            raise UserError(
                f"the demonstration of {prompt.text[:80]!r} has {len(ids)} tokens with its end, expected at most "
                f"rollout.max_new_tokens={limit}; raise that"
            )
        return Completion(token_ids=tuple(ids), logprobs=(0.0,) * len(ids), finish_reason="stop")

    def _own(self, problems: Sequence[Problem], first: int) -> list[_Prompt]:
        """This worker's share, as tokens; the first of ``problems`` has the number ``first``."""
        rank, world = self.context.rank, self.context.world_size
        return [
            _Prompt(
                number=first + index,
                text=self._encoder.text(problem.prompt),
                token_ids=self._encoder.tokens(problem),
                problem=problem,
            )
            for index, problem in enumerate(problems)
            if index % world == rank
        ]

    def _complete(self, prompts: Sequence[_Prompt], sampling: Sampling, *, held_out: bool, step: int) -> list[_Answer]:
        self._weights.require_complete()
        with self._timer.phase("load"):
            self._backend.wake()
        with self._timer.phase("generate"):
            groups = self._backend.generate(
                [prompt.token_ids for prompt in prompts],
                sampling,
                [prompt_seed(self._seed, held_out=held_out, step=step, prompt=prompt.number) for prompt in prompts],
                lambda done, of: self.context.report_progress("generation", done, of),
                None if held_out or not self._rollout.interruptible else self._take_waiting_weights,
            )
        with self._timer.phase("offload"):
            self._backend.sleep()
        return [
            _Answer(prompt=prompt, number=prompt.number * sampling.n + index, completion=completion)
            for prompt, group in zip(prompts, groups, strict=True)
            for index, completion in enumerate(group)
        ]

    def _take_waiting_weights(self) -> bool:
        """Between two tokens: whether a newer version came and was taken."""
        if not self._weights.waiting:
            return False
        run_blocking(self._weights.receive())  # only workers with a process of their own run ahead
        self._backend.refresh()
        self._interruptions += 1
        return True

    def _known_score(self, record: CompletionRecord) -> float | None:
        """None leaves the completion out of training."""
        masked = self._reward_config.mask_truncated and record.finish_reason == "length"
        return None if masked else record.score

    def _penalty(self, record: CompletionRecord) -> float:
        cfg = self._reward_config
        return overlong_penalty(
            record.length,
            max_length=self._rollout.max_new_tokens,
            buffer_length=cfg.overlong_buffer_length,
            factor=cfg.overlong_penalty_factor,
        )

    def _report(self, answers: Sequence[_Answer]) -> GenerationReport:
        """Texts and scores."""
        with self._timer.phase("reward"):
            items = [
                Item(
                    prompt=answer.prompt.text,
                    completion=self._backend.text(answer.completion),
                    answer=answer.prompt.problem.answer,
                    metadata=answer.prompt.problem.metadata,
                )
                for answer in answers
            ]
            scores = self._scorer.score(items, lambda done, of: self.context.report_progress("scoring", done, of))
        records = [
            CompletionRecord(
                number=answer.number,
                prompt=item.prompt,
                completion=item.completion,
                answer=item.answer,
                prompt_id=problem_id(answer.prompt.problem),
                source=answer.prompt.problem.source,
                score=score,
                length=len(answer.completion.token_ids),
                finish_reason=answer.completion.finish_reason,
            )
            for answer, item, score in zip(answers, items, scores, strict=True)
        ]
        return GenerationReport(
            records=tuple(records),
            seconds=self._timer.drain(),
            lengths=tuple((len(a.prompt.token_ids), len(a.completion.token_ids)) for a in answers),
            peak=self._peak,
        )
