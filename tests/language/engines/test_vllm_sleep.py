"""``rollout.enable_offload`` with vLLM: the engine sleeps while others use its device, and wakes with new weights.

A CPU has nothing to free, and vLLM refuses to prepare for it there; all else is the real engine: its scheduler pauses
and goes on, and weights that level 2 would have dropped are overwritten. Run it with ``.venv-vllm/bin/python -m
pytest``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied_rl.language.engines import vllm_backend
from embodied_rl.language.engines.hf import HfBackend
from embodied_rl.language.engines.vllm_backend import VllmBackend
from tests.configs import small_math
from tests.language.engines.test_vllm import build, generate, give, sampling, tied, tokens

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM: scripts/vllm_env.sh makes .venv-vllm"
    ),
    pytest.mark.timeout(600),
]


def forget(worker: Any) -> None:
    for parameter in worker.get_model().parameters():
        parameter.data.fill_(torch.nan)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What vLLM's engine is told, in order."""
    from vllm import LLMEngine  # pyright: ignore[reportMissingImports]

    made: list[str] = []
    sleep, wake_up, rpc = LLMEngine.sleep, LLMEngine.wake_up, LLMEngine.collective_rpc
    reset, add = LLMEngine.reset_prefix_cache, LLMEngine.add_request

    def noted_sleep(engine: Any, level: int = 1) -> None:
        made.append(f"sleep {level}")
        sleep(engine, level)
        rpc(engine, forget)

    def noted_wake(engine: Any) -> None:
        made.append("wake_up")
        wake_up(engine)

    def noted_rpc(engine: Any, method: Any, **arguments: Any) -> Any:
        made.append(str(method))
        return rpc(engine, method, **arguments)

    def noted_reset(engine: Any, **arguments: Any) -> bool:
        made.append("reset_prefix_cache")
        return reset(engine, **arguments)

    def noted_add(engine: Any, *arguments: Any) -> Any:
        if made[-1] != "requests":
            made.append("requests")
        return add(engine, *arguments)

    for name, function in (
        ("sleep", noted_sleep),
        ("wake_up", noted_wake),
        ("collective_rpc", noted_rpc),
        ("reset_prefix_cache", noted_reset),
        ("add_request", noted_add),
    ):
        monkeypatch.setattr(LLMEngine, name, function)
    return made


@pytest.fixture
def engine(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmBackend]:
    """One that takes the CPU for an accelerator."""
    arguments = vllm_backend._engine_arguments
    monkeypatch.setattr(vllm_backend, "require_accelerator", lambda key, device: None)
    monkeypatch.setattr(
        vllm_backend, "_engine_arguments", lambda *given: {**arguments(*given), "enable_sleep_mode": False}
    )
    engine = build(VllmBackend, tied(), enable_offload=True)
    asked = arguments(engine._policy, replace(small_math().rollout, enable_offload=True), "cpu")
    assert asked["enable_sleep_mode"] is True
    yield engine
    engine.close()


LOADED = ["take_weights", "reset_prefix_cache"]


def test_it_wakes_with_the_weights_that_came_while_it_slept(engine: VllmBackend, calls: list[str]) -> None:
    plain = build(HfBackend, tied())
    for version in (1, 2, 3):
        give(plain, tied(), version)
        give(engine, tied(), version)
        assert calls == (["sleep 2"] if version == 1 else []), "it starts, and goes to sleep at once"
        assert engine._engine.is_sleeping()
        with pytest.raises(RuntimeError, match="the engine has not got the weights"):
            generate(engine, sampling())
        calls.clear()
        engine.wake()
        assert calls == ["wake_up", *LOADED, *(["requests"] if version == 1 else [])], "at first it is compared"
        assert not engine._engine.is_sleeping()
        assert tokens(generate(engine, sampling())) == tokens(generate(plain, sampling()))
        engine.wake()
        engine.sleep()
        engine.sleep()
        assert calls[-2:] == ["requests", "sleep 2"] and calls.count("sleep 2") == 1
        calls.clear()


def test_new_weights_go_to_an_engine_that_is_awake_at_once(engine: VllmBackend, calls: list[str]) -> None:
    plain = build(HfBackend, tied())
    give(engine, tied(), 1)
    engine.wake()
    calls.clear()
    for each in (engine, plain):
        give(each, tied(), 2)
    assert calls == LOADED
    assert tokens(generate(engine, sampling())) == tokens(generate(plain, sampling()))


@pytest.mark.parametrize("fails", ["wake_up", "take_weights"])
def test_an_engine_that_did_not_wake_generates_nothing(
    engine: VllmBackend, calls: list[str], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    from vllm import LLMEngine  # pyright: ignore[reportMissingImports]

    plain = build(HfBackend, tied())
    for each in (plain, engine):
        give(each, tied(), 1)
    with monkeypatch.context() as patch:
        name = "wake_up" if fails == "wake_up" else "collective_rpc"
        patch.setattr(LLMEngine, name, lambda *_, **__: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            engine.wake()
    with pytest.raises(RuntimeError, match="the engine has not got the weights"):
        generate(engine, sampling())
    engine.sleep()
    engine.wake()
    assert tokens(generate(engine, sampling())) == tokens(generate(plain, sampling()))


def test_without_the_option_it_stays_awake(calls: list[str]) -> None:
    engine = build(VllmBackend, tied())
    give(engine, tied(), 1)
    engine.sleep()
    engine.wake()
    generate(engine, sampling())
    assert "sleep 2" not in calls and "wake_up" not in calls
    engine.close()
