"""``reasoning_gym``: procedural problems of the package reasoning-gym, scored by its own verifiers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from pydantic import ConfigDict, Field

from embodied_rl.errors import UserError, suggestion
from embodied_rl.extras import install_command
from embodied_rl.language.datasets.registry import (
    CUTS,
    Message,
    Overlong,
    Problem,
    Prompt,
    PromptDataset,
    PromptEncoder,
    system_prompt_problems,
)
from embodied_rl.params import unknown_key
from embodied_rl.seeding import generator

_TRAINING: Final = 0
_HELD_OUT: Final = 2**31
"""First seeds of the package's data sets."""
_SEEDS: Final = 2**31 - 1
"""Number of seeds in each part. All stay below 2**32, the most that numpy takes."""
_TRIES: Final = 100
_ANSWER: Final = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_COMPOSITE: Final = "composite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One of several tasks."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    name: str
    """As in the package, for example ``chain_sum``."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Frequency, relative to the other tasks."""
    options: dict[str, Any] | None = None
    """Options of the task's own configuration in the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymParams:
    """``data.params`` of ``reasoning_gym``."""

    task: str | None = None
    """A task of the package, for example ``chain_sum``."""
    options: dict[str, Any] | None = None
    """Options of that task's own configuration in the package."""
    tasks: tuple[Task, ...] = ()
    """Instead: several, each with ``name``, ``weight`` and ``options``."""
    instruction: str = "\nGive the final answer between <answer> and </answer>."
    """Text after each question."""
    apply_chat_template: bool = True
    """Ask through the tokenizer's own chat template."""
    system_prompt: str | None = None
    """A system message before each conversation."""
    overlong: Overlong = "error"
    """Treatment of prompts of more than ``data.max_prompt_length`` tokens: end the run, draw another, or drop tokens
    at the start or at the end."""

    @property
    def chosen(self) -> tuple[Task, ...]:
        return self.tasks or (Task(name=self.task or "", options=self.options),)


class ReasoningGym(PromptDataset):
    """Problems are made when they are drawn, each from a seed that is a function of ``data.seed``, step, round and
    number.

    Held-out ones are of seeds of their own. A small task may have few problems, so that some are on both sides.
    """

    Params = ReasoningGymParams

    def __init__(self, params: ReasoningGymParams) -> None:
        self._params, self._tasks = params, params.chosen
        weights = np.array([task.weight for task in self._tasks])
        self._weights = weights / weights.sum()
        self._encoder: PromptEncoder | None = None
        for task in self._tasks:  # a wrong option is known at once
            _made(task.name, json.dumps(task.options or {}, sort_keys=True), _TRAINING)

    @classmethod
    def problems(cls, params: ReasoningGymParams, *, imitation: bool) -> Iterator[str]:
        del imitation  # the right answers are known
        if (params.task is None) == (not params.tasks):
            if params.tasks:
                yield "data.params.task: got both task and tasks; leave one out, such as data.params.task=null"
            else:
                yield "data.params.task: got no task; name one, such as chain_sum, or several with data.params.tasks"
            return
        if params.tasks and params.options is not None:
            yield "data.params.options: belongs to a single task; give each of data.params.tasks its own options"
        yield from system_prompt_problems(params.system_prompt, chat=params.apply_chat_template)
        try:
            known = _known()
        except UserError as error:
            yield str(error)
            return
        for task in params.chosen:
            if task.name not in known:
                yield (
                    f"data.params.task: got {task.name!r}, expected one of the {len(known)} tasks of reasoning-gym."
                    f"{suggestion(task.name, known) or ' Some are: ' + ', '.join(sorted(known)[:8])}"
                )
                continue
            options = {field.name for field in dataclasses.fields(known[task.name][1])} - {"seed", "size"}
            for key in task.options or {}:
                if key not in options:
                    yield unknown_key(f"data.params.options.{key}", [f"data.params.options.{name}" for name in options])

    def prepare(self, encoder: PromptEncoder) -> str | None:
        self._encoder = encoder
        encoder.text(self._problem(self._tasks[0], _TRAINING).prompt)  # no chat template: known at once
        return None

    def draw(self, *, seed: int, step: int, count: int, number: int = 0) -> Sequence[Problem]:
        had: set[Prompt] = set()
        problems: list[Problem] = []
        for earlier in range(number + 1):
            # The first round asks as it comes; it could not know that a task has so few problems.
            problems = []
            for index in range(count):
                key = [seed, step, earlier, index]
                problems.append(self._fitting(_TRAINING, key, had if earlier else frozenset()))
                had.add(problems[-1].prompt)
        return problems

    def held_out(self, count: int | None) -> Sequence[Problem]:
        if count is None:
            raise UserError("data.eval_size=null: there is no end of held-out problems; set a number")
        return [self._fitting(_HELD_OUT, [index]) for index in range(count)]

    def _fitting(self, part: int, key: list[int], had: Set[Prompt] = frozenset()) -> Problem:
        """The first one drawn that is not too long and not among ``had``, where some try finds one."""
        rng = generator(part, *key)
        again: Problem | None = None
        for _ in range(_TRIES):
            task = self._tasks[int(rng.choice(len(self._tasks), p=self._weights))]
            problem = self._problem(task, part + int(rng.integers(_SEEDS)))
            encoder = self._encoder if self._params.overlong == "filter" else None
            if encoder is not None and len(encoder.whole(problem.prompt)) > encoder.max_length:
                continue
            if problem.prompt not in had:
                return problem
            again = again or problem
        if again is not None:
            return again
        raise UserError(
            f"data.params.overlong=filter: {_TRIES} problems in a row had more than data.max_prompt_length="
            f"{self._encoder.max_length if self._encoder else 0} tokens; raise that, or make the problems shorter"
        )

    def _problem(self, task: Task, seed: int) -> Problem:
        options = json.dumps(task.options or {}, sort_keys=True)
        _, entry = _made(task.name, options, seed)
        text = entry["question"] + self._params.instruction
        messages = [Message(role="user", content=text)]
        if self._params.system_prompt is not None:
            messages.insert(0, Message(role="system", content=self._params.system_prompt))
        answer = entry["answer"]
        return Problem(
            prompt=tuple(messages) if self._params.apply_chat_template else text,
            answer="" if answer is None else str(answer),
            demonstration=None if answer is None else f"<answer>{answer}</answer>",
            cut=CUTS.get(self._params.overlong),
            source=task.name,
            metadata=json.dumps({"task": task.name, "options": options, "seed": seed}),
        )


def reasoning_gym(*, prompt: str, completion: str, answer: str, metadata: str) -> float | None:
    """The package's own score, 0 to 1, of what stands in the last ``<answer>``, or else of the last line.

    None where its verifier raises: some do on answers of a form that they do not expect.
    """
    del prompt, answer
    try:
        where = json.loads(metadata)
        dataset, entry = _made(where["task"], where["options"], where["seed"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            "reward.function=reasoning_gym: the problem is none of data=reasoning_gym; use it with that data set, or "
            "another reward function"
        ) from error
    try:
        return float(dataset.score_answer(final_answer(completion), entry))
    except Exception:
        return None


def final_answer(completion: str) -> str | None:
    """A completion's answer: the content of the last ``<answer>``, or else the last line; None: nothing."""
    tagged = _ANSWER.findall(completion)
    lines = tagged[-1:] or completion.strip().splitlines()[-1:]
    return lines[0].strip() or None if lines else None


def _known() -> Mapping[str, Any]:
    """Name -> (class, configuration's class)."""
    try:
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise UserError(
            f"data=reasoning_gym needs the package reasoning-gym: {error}; run: {install_command('reasoning_gym')}"
        ) from error
    return {name: entry for name, entry in factory.DATASETS.items() if name != _COMPOSITE}


@functools.lru_cache(maxsize=4096)
def _made(name: str, options: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """A data set of the package and its one problem, made once for all its completions.

    One: some tasks' data sets take time and memory for each problem that they could give.
    """
    dataset_class, config_class = _known()[name]
    try:
        dataset = dataset_class(config_class(**json.loads(options), seed=seed, size=1))
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"data.params.options: reasoning-gym's {name} does not take {options}: "
            f"{str(error) or 'one of its assertions failed'}"
        ) from error
    return dataset, dataset[0]
