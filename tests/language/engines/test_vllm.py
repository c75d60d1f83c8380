"""The ``vllm`` engine: it chooses what ``hf`` chooses, reports what training computes, and takes every version of the
weights. Run it with ``.venv-vllm/bin/python -m pytest`` (docs/vllm.md)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from embodied_rl.errors import UserError
from embodied_rl.language.engines.base import Completion, GenerationBackend, Sampling
from embodied_rl.language.engines.hf import HfBackend
from embodied_rl.language.engines.vllm_backend import VllmBackend
from embodied_rl.models.causal_lm import CausalLMPolicy, character_tokenizer
from embodied_rl.models.registry import policy_of
from embodied_rl.schema import ModelConfig
from tests.configs import small_math
from tests.models.causal_lm.language import language_spec, replay_inputs

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM: scripts/vllm_env.sh makes .venv-vllm"
    ),
    pytest.mark.timeout(600),
    pytest.mark.cold_start,
]
REPOSITORY = Path(__file__).parents[3]
NEW_TOKENS = 16
SPEC = language_spec(NEW_TOKENS, values_per_chunk=1)
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17], [20]]
SEEDS = [11, 12, 13, 14]
TIED = {"type": "qwen2", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 96, "max_length": 64}
TOLERANCE = 1e-4


def tied() -> ModelConfig:
    """Input and output embedding share their weights."""
    return replace(small_math().model, params={"architecture": TIED})


def untied(folder: Path) -> ModelConfig:
    """A folder of another family, with embeddings of their own and a vocabulary larger than the tokenizer's."""
    tokenizer = character_tokenizer("0123456789+=;")
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<eos>"),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return replace(small_math().model, path=str(folder), params={})


def lora() -> ModelConfig:
    return replace(tied(), lora=replace(tied().lora, rank=4))


def build(backend: type[GenerationBackend], model: ModelConfig, **changes: Any) -> Any:
    config = replace(small_math().rollout, max_new_tokens=NEW_TOKENS, max_batch_size=64, **changes)
    return backend(model, SPEC, config, "cpu")


def give(engine: GenerationBackend, model: ModelConfig, version: int) -> CausalLMPolicy:
    """Put weights into the engine, every one of which is large enough to matter; returns their policy."""
    policy = policy_of(model, SPEC)
    assert isinstance(policy, CausalLMPolicy)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(mean + 0.15 * torch.randn(parameter.shape, generator=generator))
    for name, tensor in policy.state_dict().items():
        engine.weights()[name].copy_(tensor)
    engine.refresh()
    return policy.eval()


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"n": 4, "temperature": 0.8, "max_new_tokens": NEW_TOKENS, **changes})


def generate(
    engine: GenerationBackend,
    options: Sampling,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    seeds: Sequence[int] = SEEDS,
) -> list[list[Completion]]:
    return engine.generate(prompts, options, seeds, lambda done, of: None)


def tokens(groups: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def logprobs_of(policy: CausalLMPolicy, groups: Sequence[Sequence[Completion]], temperature: float) -> torch.Tensor:
    inputs = replay_inputs(
        [prompt for prompt, group in zip(PROMPTS, groups, strict=True) for _ in group],
        [completion.token_ids for group in groups for completion in group],
        max_prompt=9,
        max_response=NEW_TOKENS,
        pad=0,
    )
    with torch.no_grad():
        return policy.evaluate(inputs, temperature=temperature or 1.0).logprobs[..., 0]


def worst_gap(policy: CausalLMPolicy, groups: Sequence[Sequence[Completion]], temperature: float) -> float:
    expected = logprobs_of(policy, groups, temperature)
    return max(
        float((row[: len(c.token_ids)] - torch.tensor(c.logprobs)).abs().max())
        for row, c in zip(expected, (c for group in groups for c in group), strict=True)
    )


@pytest.fixture(scope="module", params=["tied", "untied", "lora"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    if request.param == "untied":
        return untied(tmp_path_factory.mktemp("untied"))
    return tied() if request.param == "tied" else lora()


@pytest.fixture(scope="module")
def engine(model: ModelConfig) -> Iterator[VllmBackend]:
    engine = build(VllmBackend, model)
    yield engine
    engine.close()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "n": 1},
    {"temperature": 1.5, "min_new_tokens": 6},
    {"top_p": 0.7},
    {"top_k": 3, "repetition_penalty": 1.5},
    {"stop": ("1", "+", "2=", "03"), "min_new_tokens": 3, "temperature": 1.5},
]


def test_it_chooses_what_hf_chooses_and_reports_what_training_computes_in_every_version(
    engine: VllmBackend, model: ModelConfig
) -> None:
    other = build(HfBackend, model)
    previous = None
    for version in range(4):
        policy = give(engine, model, version)
        give(other, model, version)
        for options in OPTIONS:
            asked = sampling(**options)
            groups, expected = generate(engine, asked), generate(other, asked)
            assert tokens(groups) == tokens(expected), options
            assert [[(c.finish_reason, c.stop) for c in g] for g in groups] == [
                [(c.finish_reason, c.stop) for c in g] for g in expected
            ]
            assert worst_gap(policy, groups, asked.temperature) <= TOLERANCE, options
            assert all(len(c.logprobs) == len(c.token_ids) for group in groups for c in group)
            assert any(c.stop for group in groups for c in group) == ("stop" in options)
        assert tokens(groups) != previous, "other weights, other completions"
        previous = tokens(groups)


def test_what_is_written_is_not_seen_before_it_is_whole(engine: VllmBackend, model: ModelConfig) -> None:
    give(engine, model, 0)
    before = generate(engine, sampling())
    for tensor in engine.weights().values():
        tensor.zero_()
    assert generate(engine, sampling()) == before


def test_prompts_and_their_order_do_not_matter_and_the_seed_decides(engine: VllmBackend, model: ModelConfig) -> None:
    give(engine, model, 1)
    together = generate(engine, sampling())
    assert tokens(generate(engine, sampling())) == tokens(together)
    for prompt, seed, group in reversed(list(zip(PROMPTS, SEEDS, together, strict=True))):
        [alone] = generate(engine, sampling(), [prompt], [seed])
        assert tokens([alone]) == tokens([group])
    assert len({completion.token_ids for completion in together[0]}) > 1
    assert tokens(generate(engine, sampling(), seeds=[seed + 100 for seed in SEEDS])) != tokens(together)


def test_a_completion_ends_with_its_end_token_or_is_cut(engine: VllmBackend, model: ModelConfig) -> None:
    give(engine, model, 2)
    completions = [c for group in generate(engine, sampling(n=32, temperature=1.5)) for c in group]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        ends = [token in engine.stop_token_ids for token in completion.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == NEW_TOKENS
        assert max(completion.token_ids) < engine.vocabulary


def test_weights_that_come_in_the_middle_are_used_from_there_on(engine: VllmBackend, model: ModelConfig) -> None:
    old = give(engine, model, 3)
    asked, at = sampling(n=2, min_new_tokens=NEW_TOKENS), 5
    news: list[CausalLMPolicy] = []
    calls = 0

    def interrupt() -> bool:
        nonlocal calls
        calls += 1
        if calls == at:
            news.append(give(engine, model, 4))
        return calls == at

    groups = engine.generate(PROMPTS, asked, SEEDS, lambda done, of: None, interrupt)
    recorded = torch.tensor([completion.logprobs for group in groups for completion in group])
    by_old, by_new = logprobs_of(old, groups, 0.8), logprobs_of(news[0], groups, 0.8)
    torch.testing.assert_close(recorded[:, :at], by_old[:, :at], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(recorded[:, at:], by_new[:, at:], atol=TOLERANCE, rtol=0)
    assert (by_old - by_new).abs().max() > 0.1, "a test with like weights says little"


def test_small_steps_and_a_small_cache_change_nothing() -> None:
    """Long prompts are read in parts, and completions that find no place in the cache begin again."""
    model, asked = tied(), sampling(n=8, min_new_tokens=NEW_TOKENS)
    long = [[4 + place % 30 for place in range(offset, offset + 30)] for offset in range(4)]
    kwargs = {
        "max_num_batched_tokens": 24,
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_memory_bytes": 6 * 32 * 2 * 2 * 2 * 32 * 4,  # blocks x tokens x k,v x layers x heads x size x bytes
    }
    engine = build(VllmBackend, model, engine_kwargs=kwargs)
    try:
        policy = give(engine, model, 0)
        groups = engine.generate(long, asked, SEEDS, lambda done, of: None)
    finally:
        engine.close()
    other = build(HfBackend, model)
    for name, tensor in policy.state_dict().items():
        other.weights()[name].copy_(tensor)
    assert tokens(groups) == tokens(other.generate(long, asked, SEEDS, lambda done, of: None))


def test_weights_that_do_not_arrive_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer of tied embeddings is a packed copy on a CPU, which vLLM's reloading does not renew."""
    monkeypatch.setattr("embodied_rl.language.engines.vllm_parts.repack_tied_head", lambda model: None)
    engine = build(VllmBackend, tied())
    try:
        with pytest.raises(UserError, match=r"the generation engine does not compute what the policy does"):
            give(engine, tied(), 0)
    finally:
        engine.close()


def test_generation_waits_for_weights() -> None:
    with pytest.raises(RuntimeError, match=r"refresh\(\) comes before generate\(\)"):
        generate(build(VllmBackend, tied()), sampling())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_modl_len": 64}, r"max_modl_len: no argument of vLLM's EngineArgs. Did you mean 'max_model_len'\?"),
        ({"dtype": "float16"}, "engine_kwargs.dtype: set by rollout.backend=vllm itself; leave it out"),
        ({"tensor_parallel_size": 2}, "an engine uses one device; give rollout more devices"),
    ],
)
def test_engine_kwargs_that_cannot_be(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(VllmBackend, tied(), engine_kwargs=kwargs)


def test_a_value_that_vllm_refuses_is_a_users_mistake() -> None:
    engine = build(VllmBackend, tied(), engine_kwargs={"max_model_len": 4096})
    with pytest.raises(UserError, match=r"vLLM refuses the model or rollout.engine_kwargs"):
        engine.refresh()


def test_heads_of_a_size_that_vllm_lacks_name_the_override() -> None:
    architecture = {**TIED, "num_heads": 4}
    model = replace(tied(), params={"architecture": architecture})
    message = r"attention heads of 16 numbers; on a CPU vLLM has 32, 64, .*architecture.num_heads=2 fits"
    with pytest.raises(UserError, match=message):
        build(VllmBackend, model)


def test_there_is_nothing_to_offload_from_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"rollout.enable_offload=true: this worker has no accelerator"):
        build(VllmBackend, tied(), enable_offload=True)


def test_threads_can_still_be_set(engine: VllmBackend) -> None:
    engine.refresh()
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
    assert "vllm" in sys.modules


@pytest.mark.slow
def test_a_run_samples_what_it_samples_with_hf_in_one_process_and_in_several(tmp_path: Path) -> None:
    """The second step's completions come from weights that were trained on the first's."""
    samples = {}
    for name, overrides in {
        "hf": ["rollout.backend=hf", "cluster=serial"],
        "serial": ["rollout.backend=vllm", "cluster=serial"],
        "process": ["rollout.backend=vllm", "cluster=process", "rollout.engine_kwargs.max_num_batched_tokens=512"],
    }.items():
        command = [
            sys.executable,
            "train.py",
            "task=math",
            "model=tiny_lm",
            "algorithm.n_minibatches=1",
            "model.params.architecture={type: qwen2, hidden_size: 64, num_layers: 2, num_heads: 2}",
            "actor.optim.lr=1.0e-2",
            "reward.function=tests.language.engines.scores:even_length",
            "algorithm.group_size=4",
            "data.params.digits=1",
            "data.rollout_batch_size=6",
            "data.eval_size=8",
            "data.max_prompt_length=8",
            "rollout.max_new_tokens=8",
            "rollout.repetition_penalty=1.2",
            "rollout.stop=['=', 'ab']",
            "runner.max_steps=2",
            f"runner.output_dir={tmp_path / name}",
            "runner.logger.logger_backends=[jsonl]",
            *overrides,
        ]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        [found] = (tmp_path / name).glob("**/samples/step_*2.jsonl")
        samples[name] = [json.loads(line)["completion"] for line in found.read_text().splitlines()]
    assert len(samples["hf"]) == 24
    assert len(set(samples["hf"])) > 12
    assert samples["serial"] == samples["hf"]
    assert samples["process"] == samples["hf"]
