"""Whole runs on prompts from files, with a model's folder as a user has it: weights, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from embodied_rl.cli import config_of
from embodied_rl.errors import UserError
from embodied_rl.launch import run
from embodied_rl.models.causal_lm import character_tokenizer
from embodied_rl.schema import MathConfig
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.generation import GenerationWorker
from tests.language.chat import CHAT_TEMPLATE
from tests.workers.test_generation import LanguageJob, by_completion

ROWS = [{"question": f"{n}+{n}=", "answer": 2 * n, "solution": f"{2 * n}"} for n in range(14)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tokenizer = character_tokenizer("0123456789+=abcdefghijklmnopqrstuvwxyz <>\n")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids("<eos>"),
        )
    ).save_pretrained(folder)
    return folder


def configured(model: Path, *overrides: str, task: str = "math", rows: list[Any] = ROWS) -> MathConfig:
    folder = model.parent
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        f"task={task}",
        "data=files",
        f"data.params.train_data_paths=[{data}]",
        "data.params.prompt_key=question",
        "data.params.val_size=3",
        "data.rollout_batch_size=4",
        "data.max_prompt_length=48",
        "model=causal_lm",
        f"model.path={model}",
        "rollout.max_new_tokens=6",
        "cluster=serial",
        "cluster.num_threads={actor: 1, rollout: 1}",
        f"runner.output_dir={folder / 'results'}",
        "runner.max_steps=2",
        "runner.logger.logger_backends=[jsonl]",
        *overrides,
    )
    assert isinstance(config, MathConfig)
    return config


def text_of(tokenizer: Any, ids: list[int]) -> str:
    """A token a character."""
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def run_dir(config: MathConfig) -> Path:
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    return directory


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


CHAT = ("data.params.apply_chat_template=true", "data.params.system_prompt=be brief")


def test_two_steps_on_the_rows_of_a_file(model: Path) -> None:
    config = configured(model, *CHAT, "algorithm.group_size=2")
    assert config.reward.function == "math_verify"
    run(config)
    steps = [lines_of(run_dir(config) / f"samples/step_00000{n}.jsonl") for n in (1, 2)]
    held_out = lines_of(run_dir(config) / "eval_step_000002" / "samples.jsonl")
    trained = [sample["prompt"] for step in steps for sample in step[::2]]
    assert len(set(trained)) == 8, "no row twice before all are drawn"
    assert len(held_out) == 3
    assert not set(trained) & {sample["prompt"] for sample in held_out}
    asked = {f"<system>be brief\n<user>{row['question']}\n<assistant>": str(row["answer"]) for row in ROWS}
    for sample in [*steps[0], *steps[1], *held_out]:
        assert asked[sample["prompt"]] == sample["answer"]


def test_any_number_of_workers_gets_the_same_rows(model: Path) -> None:
    found = []
    for workers in ("0", "0-2"):
        job = LanguageJob(configured(model, *CHAT, f"cluster.component_placement.rollout={workers}"))
        with job:
            found.append([(r.number, r.prompt, r.completion) for step in range(4) for r in job.generate(step=step)[1]])
    assert found[0] == found[1]


def test_demonstrations_of_a_file_are_imitated(model: Path) -> None:
    config = configured(
        model, *CHAT, "data.params.demonstration_key=solution", "data.rollout_batch_size=11", task="sft"
    )
    with LanguageJob(config) as job:
        received = job._actor.call(ActorWorker.receive, step=0)
        job._rollout.call(GenerationWorker.demonstrate, step=0).wait()
        received.wait()
        tokenizer: Any = job.actor._policy.tokenizer
        seen = set()
        for part in by_completion(job.actor._received).values():
            prompt = text_of(tokenizer, part["prompt_ids"][-int(part["prompt_lengths"]) :].tolist())
            response = text_of(tokenizer, part["response_ids"][: int(part["response_lengths"])].tolist())
            [row] = [row for row in ROWS if prompt == f"<system>be brief\n<user>{row['question']}\n<assistant>"]
            assert response == f"{row['solution']}<eos>"
            seen.add(row["question"])
        assert len(seen) == 11
    run(config)
    losses = [line for line in lines_of(run_dir(config) / "metrics.jsonl") if "actor/policy_loss" in line]
    assert len(losses) == 2


def test_what_was_left_out_is_said_once(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = [{"question": "1" * 60, "answer": 1}, {"question": "2" * 60, "answer": 1}]
    config = configured(
        model, "data.params.overlong=filter", "cluster.component_placement.rollout=0-1", rows=[*ROWS, *long]
    )
    with LanguageJob(config):
        pass
    said = capfd.readouterr().out
    assert said.count("data.params.overlong=filter: left out") == 1


def test_a_long_prompt_ends_the_start(model: Path) -> None:
    rows = [*ROWS, {"question": "1" * 480, "answer": 1}]
    with pytest.raises(UserError, match=r"train.jsonl, line 15: the prompt '1+' has 480 tokens"):
        run(configured(model, rows=rows))
