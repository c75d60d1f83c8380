"""Engine names, and engines that are not installed."""

from __future__ import annotations

import sys

import pytest

from embodied_rl.errors import UserError
from embodied_rl.language.engines.base import BACKENDS
from tests.configs import small_math
from tests.models.causal_lm.language import language_spec


def test_unknown_engines_get_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"rollout.backend: got 'hff', expected one of hf, vllm.*Did you mean 'hf'\?"):
        BACKENDS.load("hff")


def test_an_engine_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not there
    config = small_math("rollout.backend=vllm")
    with pytest.raises(
        UserError, match=r"rollout.backend=vllm: vLLM cannot be imported .*scripts/vllm_env.sh.*hf needs"
    ):
        BACKENDS.load("vllm")(config.model, language_spec(), config.rollout, "cpu")
