"""The actor equips its blocks as configured."""

from __future__ import annotations

import pytest

from embodied_rl.models.base import Policy
from embodied_rl.workers import actor
from tests.workers.job import Job, small


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), []),
        (("actor.gradient_checkpointing=true",), ["checkpoint_blocks"]),
        (("actor.torch_compile=true", "actor.gradient_checkpointing=true"), ["compile_blocks", "checkpoint_blocks"]),
        # The reference has no backward pass.
        (
            ("actor.torch_compile=true", "actor.gradient_checkpointing=true", "algorithm.kl_beta=0.1"),
            ["compile_blocks", "checkpoint_blocks", "compile_blocks"],
        ),
    ],
)
def test_blocks_are_compiled_then_recomputed(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], expected: list[str]
) -> None:
    called: list[str] = []

    def recorder(name: str) -> None:
        def record(policy: Policy) -> None:
            assert policy.shard_units()
            called.append(name)

        monkeypatch.setattr(actor, name, record)

    for name in ("compile_blocks", "checkpoint_blocks"):
        recorder(name)
    with Job(small(*overrides)):
        assert called == expected
