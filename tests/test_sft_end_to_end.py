"""Whole runs of ``task=sft``, and ``task=math`` from their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embodied_rl.cli import config_of
from embodied_rl.errors import CheckpointError, UserError
from embodied_rl.launch import run
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.schema import MathConfig
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.generation import GenerationWorker
from tests.checkpoints.saved import saved_weights
from tests.configs import small_math, tiny_math_run
from tests.logged import accounted
from tests.workers.test_generation import LanguageJob, by_completion

LENGTH = "rollout.max_new_tokens=12"  # "3+4+0=07;7" and its end


def run_dir(config: MathConfig) -> Path:
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    return directory


def test_demonstrations_reach_the_actor_with_their_end() -> None:
    with LanguageJob(small_math(LENGTH, task="sft")) as job:
        received = job._actor.call(ActorWorker.receive, step=0)
        [tokens] = job._rollout.call(GenerationWorker.demonstrate, step=0).wait()
        received.wait()
        policy = job.actor._policy
        assert isinstance(policy, CausalLMPolicy)
        found = by_completion(job.actor._received)
        assert sorted(found) == list(range(6))
        assert tokens == sum(int(part["response_lengths"]) for part in found.values())
        for part in found.values():
            prompt = str(policy.tokenizer.decode(part["prompt_ids"][-int(part["prompt_lengths"]) :].tolist()))
            length = int(part["response_lengths"])
            response = part["response_ids"][:length].tolist()
            left, right = prompt.removesuffix("=").split("+")
            total = int(left) + int(right)
            assert policy.tokenizer.decode(response[:-1]) == f"{left}+{right}+0={total:02d};{total}"
            assert response[-1] == policy.tokenizer.eos_token_id
            assert part["valid"].tolist() == [place < length for place in range(12)]
            assert part["terminated"].nonzero().tolist() == [[length - 1]]
        metrics = job.update()
        assert metrics["samples"] == 6
        assert metrics["policy_loss"] == pytest.approx(torch.log(torch.tensor(53.0)).item(), abs=0.5), "53 tokens"


def test_the_likelihood_rises_and_math_goes_on_from_it(tmp_path: Path) -> None:
    sft = tiny_math_run(
        tmp_path, LENGTH, "runner.max_steps=40", "runner.save_interval=40", "actor.optim.lr=0.01", task="sft"
    )
    run(sft)
    lines = [json.loads(line) for line in (run_dir(sft) / "metrics.jsonl").read_text().splitlines()]
    assert len(accounted(run_dir(sft))) == 40
    losses = [line["actor/policy_loss"] for line in lines if "actor/policy_loss" in line]
    assert len(losses) == 40
    assert losses[-1] < 0.6 * losses[0]
    assert (run_dir(sft) / "eval_step_000040" / "eval.json").is_file()

    start = tmp_path / "results" / sft.runner.experiment_name
    # Nothing is trained: the checkpoint after the run holds the weights that it started from.
    math = tiny_math_run(
        tmp_path,
        LENGTH,
        f"runner.init_from={start}",
        "runner.max_steps=1",
        "actor.optim.lr=1e-30",
        "runner.eval_at_end=false",
        "runner.val_before_train=true",
    )
    run(math)
    first = saved_weights(run_dir(sft) / "checkpoints/global_step_40")
    last = saved_weights(run_dir(math) / "checkpoints/global_step_1")
    assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())
    before = json.loads((run_dir(math) / "eval_step_000000" / "eval.json").read_text())
    after = json.loads((run_dir(sft) / "eval_step_000040" / "eval.json").read_text())
    assert before["overall"] == after["overall"]
    assert before["meta"]["checkpoint"] == "global_step_40"


def test_a_start_that_does_not_exist_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"runner.init_from=/nowhere: no such directory"):
        run(tiny_math_run(tmp_path, "runner.init_from=/nowhere"))
    with pytest.raises(CheckpointError, match=f"runner.init_from={tmp_path}: holds no whole checkpoint"):
        run(tiny_math_run(tmp_path, f"runner.init_from={tmp_path}"))


def test_a_demonstration_that_the_tokenizer_does_not_know_is_one_message(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+0=", "answer": n, "shown": f"Σ={n}"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (f"data.params.train_data_paths=[{tmp_path / 'train.jsonl'}]", "data.params.demonstration_key=shown")
    keys = ("reward.function=last_number", "cluster=serial", f"runner.output_dir={tmp_path}", "data.eval_size=1")
    config = config_of("task=sft", "data=files", *data, *keys, "data.rollout_batch_size=4", "runner.report=false")
    with pytest.raises(UserError, match=r"'\d\+0=' has characters that the model's tokenizer does not know: 'Σ=\d'"):
        run(config)


def test_a_demonstration_that_is_too_long_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 1\d tokens with its end, expected at most rollout.max_new_tokens=8"):
        run(tiny_math_run(tmp_path, task="sft"))
