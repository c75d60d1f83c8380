"""``vllm``: decoding in vLLM, with paged attention, continuous batching and a prefix cache.

The engine lives in the worker's process. A copy of the policy in host memory takes each version of the weights from the
actor, and :meth:`VllmBackend.refresh` loads it into the engine through vLLM's own reloading.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from embodied_rl.errors import UserError, suggestion
from embodied_rl.language.engines.base import Completion, GenerationBackend, Sampling, StopStrings, causal_lm
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.causal_lm import CausalLMPolicy
from embodied_rl.models.weights.host import require_accelerator
from embodied_rl.models.weights.lora import ADAPTER
from embodied_rl.schema import GenerationConfig, ModelConfig

if TYPE_CHECKING:
    from vllm import LLMEngine  # pyright: ignore[reportMissingImports]

_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over as references
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # TokenChooser has the interface of the first
}
_DEFAULT_ENVIRONMENT: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # a training run reports to nobody
}
_PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_MAX_CPU_CACHE: Final = 1 << 30
"""Bytes of the key-value cache in host memory, where vLLM would take most of the machine's."""
_CHECK_LENGTHS: Final = (3, 5)
_CHECK_TOKENS: Final = 8
_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of a token's log-probability. Two correct programs may differ by it in bfloat16; wrong weights
give far more."""


class VllmBackend(GenerationBackend):
    """See the module. ``rollout.engine_kwargs`` are arguments of vLLM's ``EngineArgs``."""

    interruptible = True

    def __init__(self, model: ModelConfig, spec: PolicySpec, config: GenerationConfig, device: str) -> None:
        _import_vllm()
        if config.enable_offload:
            require_accelerator("rollout.enable_offload", device)
        policy = self._policy = causal_lm("vllm", model, spec)
        self.tokenizer, self.stop_token_ids = policy.tokenizer, policy.stop_token_ids
        self._offload = config.enable_offload
        self._asleep, self._stale, self._checked = False, True, False
        if device == "cpu":
            _require_head_size(policy)
        self._arguments = _engine_arguments(policy, config, device)
        self.max_length = self._arguments.get("max_model_len")
        self._running: LLMEngine | None = None
        # In one process with the actor, the actor's process group has to be there first: vLLM takes it then, and would
        # else make one that the actor cannot take.
        if multiprocessing.parent_process() is not None:
            self._start()

    def weights(self) -> Mapping[str, Tensor]:
        return self._policy.state_dict()

    def refresh(self) -> None:
        self._stale = True
        if self._running is None:
            self._start()
        if not self._asleep:
            self._load()

    def wake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False
            self._load()

    def sleep(self) -> None:
        if self._offload and not self._asleep:
            self._engine.sleep(level=2)  # drops the weights, too: the policy has them
            self._asleep = self._stale = True

    def close(self) -> None:
        if self._running is None:
            return
        # An actor in this process may have ended the process group before, and vLLM's groups with it.
        with contextlib.suppress(ValueError):
            self._running.engine_core.shutdown()
        self._running = None

    @property
    def _engine(self) -> LLMEngine:
        assert self._running is not None  # refresh() comes before all that needs it
        return self._running

    def _start(self) -> None:
        with tempfile.TemporaryDirectory(prefix="embodied_rl-vllm-") as folder:
            config: Any = self._policy.model.config
            config.architectures = [type(self._policy.model).__name__]
            config.save_pretrained(folder)
            self._running = _start_engine({"model": folder, **self._arguments})
        self.sleep()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        report: Callable[[int, int], None],
        interrupt: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        from embodied_rl.language.engines.vllm_parts import Request

        if self._stale:
            raise RuntimeError("the engine has not got the weights: refresh() comes before generate()")
        stops, n, total = sorted(self.stop_token_ids), sampling.n, len(prompts) * sampling.n
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            for index in range(n):
                request = Request(sampling=sampling, seed=seed, index=index, stops=stops, vocabulary=self.vocabulary)
                self._engine.add_request(str(number * n + index), {"prompt_token_ids": list(prompt)}, request.params())
        answers = _Answers(self._engine, StopStrings(self.tokenizer, sampling.stop), sampling.min_new_tokens)
        while self._engine.has_unfinished_requests():
            with self._stance():
                answers.take(self._engine.step())
            report(len(answers.complete), total)
            if interrupt:
                interrupt()
        return [[answers.complete[number * n + index] for index in range(n)] for number in range(len(prompts))]

    def _stance(self) -> contextlib.AbstractContextManager[object]:
        """vLLM compiles a function of its sampler even where ``enforce_eager`` is set, which takes longer than all that
        the function does in a run."""
        eager = self._engine.model_config.enforce_eager
        return torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()

    def _load(self) -> None:
        """Give the engine the policy's weights."""
        self._engine.collective_rpc("take_weights", args=(merged_weights(self._policy),))
        # What is being decoded is read again: its keys and values belong to the weights before.
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM kept its prefix cache, which belongs to the weights before")
        self._stale = False
        if not self._checked:
            check_engine(self, self._policy)
            self._checked = True


class _Answers:
    """The completions of a call, each numbered by its request's id.

    The engine is told to leave a completion that a stop string has ended.
    """

    def __init__(self, engine: Any, strings: StopStrings, min_tokens: int) -> None:
        self._engine, self._strings, self._min_tokens = engine, strings, min_tokens
        self._token_ids: dict[int, list[int]] = defaultdict(list)
        self._logprobs: dict[int, list[float]] = defaultdict(list)
        self.complete: dict[int, Completion] = {}

    def take(self, outputs: Sequence[Any]) -> None:
        """Add a step's outputs: new tokens of each request, or all of them at its end."""
        for output in outputs:
            [answer], number = output.outputs, int(output.request_id)
            token_ids, logprobs = self._token_ids[number], self._logprobs[number]
            token_ids += answer.token_ids
            logprobs += (answer.logprobs.logprobs[start] for start in answer.logprobs.start_indices)
            by_token = answer.finish_reason == "stop"
            string = None
            if self._strings and not by_token:
                string = self._strings.completed_by_last(token_ids, self._min_tokens)
            if string is not None and not output.finished:
                self._engine.abort_request([output.request_id])
            if output.finished or string is not None:
                self.complete[number] = Completion(
                    token_ids=tuple(token_ids),
                    logprobs=tuple(logprobs),
                    finish_reason="stop" if by_token or string is not None else "length",
                    stop=string,
                )


def _import_vllm() -> None:
    os.environ.update(_ENVIRONMENT)
    os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] = torch.get_float32_matmul_precision()  # it would set its own
    for name, value in _DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it misses Triton, on a CPU
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"rollout.backend=vllm: vLLM cannot be imported ({error}); install it with pip install -e '.[vllm]' for "
            "CUDA, or run scripts/vllm_env.sh and .venv-vllm/bin/python for a machine without a GPU (docs/vllm.md); "
            "rollout.backend=hf needs nothing"
        ) from error
    del vllm


def _engine_arguments(policy: CausalLMPolicy, config: GenerationConfig, device: str) -> dict[str, Any]:
    """vLLM's arguments, but for the folder with the model's configuration.

    Raises:
        UserError: ``rollout.engine_kwargs`` has a name that vLLM does not know, or one that we decide.
    """
    from vllm import EngineArgs  # pyright: ignore[reportMissingImports]

    from embodied_rl.language.engines import vllm_parts

    ours = {
        "skip_tokenizer_init": True,
        "dtype": policy.params.dtype,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logits_processors": [vllm_parts.TokenChooser],
        "logprobs_mode": "processed_logits",
        "async_scheduling": False,  # TokenChooser counts the tokens that there are
        "worker_extension_cls": f"{vllm_parts.__name__}.{vllm_parts.WeightReload.__name__}",
        "enable_sleep_mode": config.enable_offload,
        "disable_log_stats": True,
    }
    defaults: dict[str, Any] = {"max_num_seqs": config.max_batch_size}
    if policy.max_length is not None:
        defaults["max_model_len"] = policy.max_length
    if device == "cpu":
        length = config.engine_kwargs.get("max_model_len", policy.max_length)
        defaults["enforce_eager"] = True  # compiling takes longer than short runs do
        defaults["kv_cache_memory_bytes"] = _cpu_cache_bytes(policy, config.max_batch_size, length)
    else:
        defaults["device_ids"] = [torch.device(device).index or 0]
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in config.engine_kwargs:
        if name in _PARALLEL:
            raise UserError(
                f"rollout.engine_kwargs.{name}: an engine uses one device; give rollout more devices in "
                "cluster.component_placement, and each gets an engine"
            )
        if name in ours or name == "model":
            raise UserError(f"rollout.engine_kwargs.{name}: set by rollout.backend=vllm itself; leave it out")
        if name not in known:
            raise UserError(
                f"rollout.engine_kwargs.{name}: no argument of vLLM's EngineArgs.{suggestion(name, known - set(ours))}"
            )
    return {**defaults, **config.engine_kwargs, **ours}


def _start_engine(arguments: Mapping[str, Any]) -> LLMEngine:
    """Raises UserError: vLLM does not take the model or the arguments."""
    from vllm import EngineArgs, LLMEngine  # pyright: ignore[reportMissingImports]

    set_num_threads = torch.set_num_threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, to vLLM's authors
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"rollout.backend=vllm: vLLM refuses the model or rollout.engine_kwargs: {error}") from error
    finally:
        # On a CPU vLLM takes the function away from whoever else is in this process.
        torch.set_num_threads = set_num_threads


def _attention(policy: CausalLMPolicy) -> tuple[int, int, int]:
    """Layers, key-value heads, and numbers of each head."""
    config = policy.model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, size


def _cpu_cache_bytes(policy: CausalLMPolicy, batch: int, length: int | None) -> int:
    """Size for a whole batch of the longest texts, where that is not too much."""
    layers, heads, size = _attention(policy)
    per_token = 2 * layers * heads * size * getattr(torch, policy.params.dtype).itemsize
    blocks = -(-(length or 4096) // 128) + 1  # vLLM hands it out in blocks of 128 tokens
    return min(_MAX_CPU_CACHE, batch * blocks * 128 * per_token)


def _require_head_size(policy: CausalLMPolicy) -> None:
    """Raises UserError: vLLM has no attention of that size on a CPU."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # pyright: ignore[reportMissingImports]

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    size = _attention(policy)[-1]
    if size in sizes:
        return
    message = f"rollout.backend=vllm: attention heads of {size} numbers; on a CPU vLLM has {', '.join(map(str, sizes))}"
    architecture = policy.params.architecture
    if architecture is not None:
        fitting = [n for n in range(architecture.num_heads, 0, -1) if architecture.hidden_size / n in sizes]
        fitting = [n for n in fitting if n % architecture.num_key_value_heads == 0]
        override = f"num_heads={fitting[0]}" if fitting else f"hidden_size={architecture.num_heads * min(sizes)}"
        message += f"; model.params.architecture.{override} fits"
    raise UserError(f"{message}; rollout.backend=hf takes any")


@torch.no_grad()
def merged_weights(policy: CausalLMPolicy) -> Iterator[tuple[str, Tensor]]:
    """The language model's weights with Hugging Face's names, adapters added to those under them, the value head left
    out. Tied weights come once. What has no adapter is the policy's own tensor, so copy it."""
    adapters = {name: layer for name, layer in policy.model.named_modules() if isinstance(layer, LoraLayer)}
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            continue
        module, base, kind = name.partition(".base_layer.")
        if not base:
            yield name, parameter.detach()
            continue
        delta = adapters[module].get_delta_weight(ADAPTER) if kind == "weight" else None  # type: ignore[operator]
        yield f"{module}.{kind}", parameter if delta is None else parameter + delta


def check_engine(engine: GenerationBackend, policy: CausalLMPolicy) -> None:
    """Compare an engine's log-probabilities of short greedy completions with the policy's.

    Args:
        policy: with the weights that the engine should have.

    Raises:
        UserError: they differ.
    """
    prompts = [[(7 * index + length) % engine.vocabulary for index in range(length)] for length in _CHECK_LENGTHS]
    longest = max(_CHECK_LENGTHS) + _CHECK_TOKENS
    if engine.max_length is not None and engine.max_length < longest:
        prompts = [[0]]
    new_tokens = min(_CHECK_TOKENS, (engine.max_length or longest) - len(prompts[-1]))
    sampling = Sampling(n=1, temperature=0.0, max_new_tokens=new_tokens)
    groups = engine.generate(prompts, sampling, [0] * len(prompts), lambda done, of: None)
    worst = 0.0
    for prompt, [completion] in zip(prompts, groups, strict=True):
        response = torch.tensor([completion.token_ids])
        with torch.no_grad():
            evaluation = policy.evaluate(
                {
                    "prompt_ids": torch.tensor([prompt]),
                    "prompt_lengths": torch.tensor([len(prompt)]),
                    "response_ids": response,
                    "response_lengths": torch.tensor([response.shape[1]]),
                },
                temperature=1.0,
            )
        difference = evaluation.logprobs[0, :, 0] - torch.tensor(completion.logprobs)
        worst = max(worst, float(difference.abs().nan_to_num(torch.inf).max()))
    allowed = _TOLERANCE[policy.params.dtype]
    if worst > allowed:
        raise UserError(
            f"the generation engine does not compute what the policy does: with the same weights, log-probabilities of "
            f"the same tokens differ by {worst:.3g}, expected at most {allowed:g} in {policy.params.dtype}; this model "
            "or these rollout.engine_kwargs do not work with this release of the engine; use rollout.backend=hf"
        )
