"""Keys and passwords do not belong in a configuration, which every run writes to its folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Final

from embodied_rl.params import flat
from embodied_rl.schema import Config

_NAMES: Final = re.compile(
    r"(\w*_)?(api_?key|auth_token|access_token|hf_token|hub_token|password|passwd|secret(_key)?)"
)
"""Of options; wherever users give some of their own."""
_VARIABLES: Final = re.compile(r"(.*_)?(token|secret|password|passwd|passphrase|key|credentials?)(_.*)?")
"""Of environment variables, in small letters; ``TOKENIZERS_PARALLELISM`` is none."""
_ENVIRONMENTS: Final = re.compile(r"cluster\.(env_vars|node_groups\.[^.]+\.env)\.[^.]+.*")
_VALUES: Final = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,})\b|://[^/\s:@]+:[^/\s@]+@"
)
"""Tokens of hubs by their beginnings, and addresses with a password."""


def secret_problems(config: Config) -> Iterator[str]:
    """Each option that holds a secret, without its value."""
    for key, value in flat(dataclasses.asdict(config)):
        name = key.rpartition(".")[2].lower()
        named = bool(_NAMES.fullmatch(name)) or (name == "key" and key.startswith("runner.logger.wandb."))
        named = named or bool(_ENVIRONMENTS.fullmatch(key) and _VARIABLES.fullmatch(name))
        if value is not None and (named or (isinstance(value, str) and _VALUES.search(value))):
            yield (
                f"{key}: looks like a secret, and configurations are stored and shared; leave it out, and give it by "
                "the environment (WANDB_API_KEY, HF_TOKEN, ...) or by the service's own login"
            )
