"""The record of a checkpoint's policy, which builds it again without simulator, workers or configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from pydantic import TypeAdapter, ValidationError

from embodied_rl.errors import CheckpointError
from embodied_rl.extras import versions
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.weights.look import RECORD_FILE
from embodied_rl.schema import ModelConfig

PACKAGES: Final = ("torch", "transformers", "peft")
"""Packages whose versions are written down, beside our own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """The contents of :data:`RECORD_FILE`, beside the actor's shards."""

    model: ModelConfig
    """Adapters of a folder (``model.lora.path``) are described here by their rank, layers, ..., and the folder is not
    needed any more. A local ``path`` is absolute. That a run trusted the folder's code is not written down: whoever
    uses the checkpoint decides anew."""
    spec: PolicySpec
    versions: Mapping[str, str]
    """Package -> version that the checkpoint was written with."""

    @classmethod
    def of(cls, config: ModelConfig, spec: PolicySpec) -> Self:
        """Describe a run's policy.

        Raises:
            UserError: ``model.lora.path`` cannot be used.
        """
        lora = config.lora
        if lora.path is not None:
            from embodied_rl.models.weights.lora import described  # peft takes a second to import

            lora = described(lora)
        model = ModelConfig(
            model_type=config.model_type,
            path=_lasting(config.path),
            params=config.params,
            lora=lora,
            hf_overrides=config.hf_overrides,
            revision=config.revision,
            tokenizer_path=_lasting(config.tokenizer_path),
        )
        return cls(model=model, spec=spec, versions=versions(*PACKAGES))

    def write(self, directory: Path) -> None:
        """Write it into a checkpoint's directory."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / RECORD_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the record of a checkpoint.

        Raises:
            CheckpointError: it has none, or a damaged one.
        """
        path = directory / RECORD_FILE
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory}: has no {RECORD_FILE}, so nothing says which policy its weights are of; it was saved "
                "before checkpoints had one. Resume its run for a step (runner.resume_dir=..., runner.max_steps=<one "
                "more>) and use the checkpoint which that saves"
            ) from None
        try:
            return TypeAdapter(cls).validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{path}: cannot be used ({where or 'all of it'}: {first['msg']})") from error


def _lasting(path: str | None) -> str | None:
    """A local path as an absolute one; a name on the hub as it is."""
    return str(Path(path).absolute()) if path is not None and Path(path).is_dir() else path
