"""The comparison of an engine with the policy: it passes what is right and finds what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.language.engines.base import Completion
from embodied_rl.language.engines.hf import HfBackend
from embodied_rl.language.engines.vllm_backend import check_engine
from tests.configs import small_math
from tests.models.causal_lm.language import SMALL, language_policy, language_spec


def engine(**architecture: int) -> HfBackend:
    model = replace(small_math().model, params={"architecture": {**SMALL, **architecture}})
    engine = HfBackend(model, language_spec(), small_math().rollout, "cpu")
    for name, tensor in language_policy().state_dict().items():
        engine.weights()[name].copy_(tensor)
    return engine


def test_an_engine_with_the_policys_weights_passes() -> None:
    check_engine(engine(), language_policy())


def test_an_engine_for_very_short_texts_is_asked_for_a_single_token() -> None:
    short = engine()
    short.max_length = 2
    check_engine(short, language_policy())


@pytest.mark.parametrize("name", ["model.model.embed_tokens.weight", "model.model.layers.1.self_attn.o_proj.weight"])
def test_one_wrong_tensor_is_found(name: str) -> None:
    wrong = engine()
    wrong.weights()[name].mul_(1.2)
    with pytest.raises(UserError, match=r"differ by \d.*expected at most 0.001 in float32"):
        check_engine(wrong, language_policy())


def test_what_is_no_number_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = engine()
    nothing = Completion(token_ids=(5,), logprobs=(float("nan"),), finish_reason="length")
    monkeypatch.setattr(broken, "generate", lambda prompts, *rest: [[nothing] for _ in prompts])
    with pytest.raises(UserError, match="differ by inf"):
        check_engine(broken, language_policy())


def test_weights_in_bfloat16_may_differ_more() -> None:
    policy = language_policy()
    policy.params = replace(policy.params, dtype="bfloat16")
    slightly = engine()
    with torch.no_grad():
        slightly.weights()["model.model.norm.weight"].mul_(1.01)
    check_engine(slightly, policy)
    with pytest.raises(UserError):
        check_engine(slightly, language_policy())
