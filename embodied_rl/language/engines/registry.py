"""Engine names. A new engine adds one line to :data:`BACKENDS`. Importing this needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embodied_rl.registry import load_class

if TYPE_CHECKING:
    from embodied_rl.language.engines.base import GenerationBackend

BACKENDS: dict[str, str] = {
    "hf": "embodied_rl.language.engines.hf:HfBackend",
    "vllm": "embodied_rl.language.engines.vllm_backend:VllmBackend",
}
"""``rollout.backend`` -> "module:Class"."""


def backend_class(name: str) -> type[GenerationBackend]:
    """The engine that ``rollout.backend`` names.

    Raises:
        UserError: no such name, module or class.
    """
    return load_class("rollout.backend", BACKENDS, name)
