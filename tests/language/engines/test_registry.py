"""Engine names, and engines that are not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from embodied_rl.errors import ConfigError, UserError
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


def test_code_of_a_folder_and_vllm(tmp_path: Path) -> None:
    """vLLM gets no such code; a tokenizer's it does not need."""
    vllm = ("rollout.backend=vllm", "model.trust_remote_code=true", "cluster=process")
    own, plain = tmp_path / "own", tmp_path / "plain"
    for folder, content in ((own, '{"auto_map": {"AutoModelForCausalLM": "own.Own"}}'), (plain, "{}")):
        folder.mkdir()
        (folder / "config.json").write_text(content)
    for path in (str(own), "somebody/weights"):
        with pytest.raises(ConfigError, match=rf"trust_remote_code=true for model.path={path}, but .*backend=hf"):
            small_math(*vllm, f"model.path={path}")
    small_math(*vllm, f"model.path={plain}")
    small_math(*vllm)
    small_math("model.trust_remote_code=true", f"model.path={own}")
