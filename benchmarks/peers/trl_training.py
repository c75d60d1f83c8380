"""Trains with TRL's GRPOTrainer and times it (runs in the peers' environment).

    python -m benchmarks.peers.trl_training INPUT.json OUTPUT.json

The input names the folder of the model, the prompts with their answers, and the settings; :mod:`benchmarks.trl_race`
writes it. The reward function is the project's own. TRL's methods are wrapped in clocks and do what they always do.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from embodied_rl.language.rewards.functions import final_answer

PHASES = ("generation", "reward", "log-probabilities", "advantages", "forward", "backward", "optimizer")
"""What is timed; all else is the rest: data loading, clipping, the trainer's own loop."""


def zeros() -> dict[str, float]:
    return {name: 0.0 for name in PHASES}


class Clock:
    """Wall and CPU seconds by phase; an inner phase's time is not the outer one's."""

    def __init__(self) -> None:
        self.wall, self.cpu = zeros(), zeros()
        self._open: list[str] = []
        self._mark = (time.perf_counter(), time.process_time())

    def _credit(self) -> None:
        now = (time.perf_counter(), time.process_time())
        if self._open:
            self.wall[self._open[-1]] += now[0] - self._mark[0]
            self.cpu[self._open[-1]] += now[1] - self._mark[1]
        self._mark = now

    def open(self, name: str) -> None:
        self._credit()
        self._open.append(name)

    def close(self) -> None:
        self._credit()
        self._open.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.open(name)
        try:
            yield
        finally:
            self.close()

    def drain(self) -> tuple[dict[str, float], dict[str, float]]:
        self._credit()
        found = self.wall, self.cpu
        self.wall, self.cpu = zeros(), zeros()
        return found


class Timed(GRPOTrainer):
    """The trainer with a clock around its own methods."""

    clock: Clock

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("generation"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._scoring = True
        try:
            with self.clock.phase("advantages"):  # what is left of it: also padding and masks
                return super()._generate_and_score_completions(inputs)
        finally:
            self._scoring = False

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("log-probabilities" if self._scoring else "forward"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("forward"):
            return super().compute_loss(*args, **kwargs)


class Steps(TrainerCallback):
    """Notes the time after each training step: so many optimiser steps."""

    def __init__(self, trainer: Timed, optimizer_steps: int) -> None:
        self.trainer, self.optimizer_steps = trainer, optimizer_steps
        self.rows: list[dict[str, Any]] = []
        self._mark = (0.0, 0.0)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._mark = (time.perf_counter(), time.process_time())

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.clock.open("optimizer")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.clock.close()

    def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        if state.global_step % self.optimizer_steps:
            return
        now = (time.perf_counter(), time.process_time())
        wall, cpu = self.trainer.clock.drain()
        metrics = self.trainer._metrics["train"]
        self.rows.append(
            {
                "wall": now[0] - self._mark[0],
                "cpu": now[1] - self._mark[1],
                "phases": {name: {"wall": wall[name], "cpu": cpu[name]} for name in PHASES},
                "accuracy": metrics["reward"][-1],
                "length": metrics["completions/mean_length"][-1],
                "groups_equal": metrics["frac_reward_zero_std"][-1],
            }
        )
        self._mark = now


def score(*, prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [
        final_answer(prompt=prompt, completion=completion, answer=right)
        for prompt, completion, right in zip(prompts, completions, answer, strict=True)
    ]


def train(given: dict[str, Any], output: str) -> list[dict[str, Any]]:
    """Every training step's times."""
    group, steps, optimizer_steps = given["group_size"], given["steps"], given["optimizer_steps"]
    completions = given["prompts_per_step"] * group
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(given["model"])
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in given["problems"]]
    trainer = Timed(
        model=model,
        reward_funcs=score,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=output,
            max_steps=steps * optimizer_steps,
            per_device_train_batch_size=completions // optimizer_steps,
            steps_per_generation=optimizer_steps,
            gradient_accumulation_steps=1,
            num_generations=group,
            max_completion_length=given["max_new_tokens"],
            temperature=given["temperature"],
            beta=0.0,
            epsilon=given["clip_ratio_low"],
            epsilon_high=given["clip_ratio_high"],
            delta=given["clip_ratio_c"],
            loss_type="bnpo",  # the mean over a mini-batch's tokens: our token-mean
            scale_rewards="group",
            learning_rate=given["lr"],
            lr_scheduler_type="constant",
            adam_beta1=given["adam_beta1"],
            adam_beta2=given["adam_beta2"],
            adam_epsilon=given["adam_eps"],
            weight_decay=given["weight_decay"],
            max_grad_norm=given["clip_grad"],
            optim="adamw_torch_fused",
            torch_compile=given["torch_compile"],
            shuffle_dataset=False,  # our prompts in our order
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=given["seed"],
        ),
    )
    trainer.clock, trainer._scoring = Clock(), False
    backward = trainer.accelerator.backward

    def timed_backward(*args: Any, **kwargs: Any) -> None:
        with trainer.clock.phase("backward"):
            backward(*args, **kwargs)

    trainer.accelerator.backward = timed_backward
    timing = Steps(trainer, optimizer_steps)
    trainer.add_callback(timing)
    trainer.train()
    return timing.rows


def main() -> None:
    source, target = sys.argv[1:]
    given = json.loads(Path(source).read_text())
    torch.set_num_threads(given["threads"])
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with tempfile.TemporaryDirectory() as output:
        rows = train(given, output)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    Path(target).write_text(json.dumps({"steps": rows, "versions": versions}) + "\n")


if __name__ == "__main__":
    main()
