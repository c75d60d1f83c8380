"""vLLM on a CUDA device: asleep it holds neither weights nor cache, and it wakes with the newest version."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from embodied_rl.language.engines.hf import HfBackend
from embodied_rl.language.engines.vllm_backend import VllmBackend
from tests.configs import small_math
from tests.language.engines.test_vllm import NEW_TOKENS, SPEC, generate, give, sampling, tied, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
pytest.importorskip("vllm", reason="the vllm extra is not installed")

CACHE = 1 << 30


def free() -> int:
    """Bytes of the device that nobody holds, in this process or another."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_it_sleeps_between_rollouts_and_wakes_with_new_weights() -> None:
    config = replace(
        small_math().rollout,
        max_new_tokens=NEW_TOKENS,
        max_batch_size=64,
        enable_offload=True,
        engine_kwargs={"enforce_eager": True, "kv_cache_memory_bytes": CACHE},
    )
    plain = HfBackend(tied(), SPEC, replace(config, enable_offload=False, engine_kwargs={}), "cuda:0")
    engine = VllmBackend(tied(), SPEC, config, "cuda:0")
    asleep = 0
    for version in (1, 2, 3):
        for each in (plain, engine):
            give(each, tied(), version)
        asleep = asleep or free()
        assert free() > asleep - CACHE // 4, "nothing is left behind by the version before"
        engine.wake()
        assert free() < asleep - CACHE // 2, "the cache is there again"
        # Sums on a GPU differ in their order, so some token may be another one.
        got, expected = tokens(generate(engine, sampling())), tokens(generate(plain, sampling()))
        same = [one == other for group in zip(got, expected, strict=True) for one, other in zip(*group, strict=True)]
        assert sum(same) >= 0.75 * len(same)
        engine.sleep()
        engine.sleep()
        with pytest.raises(RuntimeError, match="the engine has not got the weights"):
            generate(engine, sampling())
    engine.close()
