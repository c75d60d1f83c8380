"""``reward_model``: scores by a sequence classifier of Hugging Face, in batches, in the generation worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from embodied_rl.errors import UserError, first_line
from embodied_rl.models.weights.folder import LOADING_ERRORS, load_model
from embodied_rl.models.weights.loading import Loading, check_revision, override, read_config, untrusted
from embodied_rl.params import parse_params

if TYPE_CHECKING:
    from embodied_rl.language.rewards.scoring import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelParams:
    """``reward.params`` of ``reward_model``."""

    path: str
    """A folder, or a name on the hub: a sequence classifier with one label, and its tokenizer."""
    revision: str | None = None
    """Branch, tag or commit of a name on the hub; null: its newest."""
    trust_remote_code: bool = False
    """Run the code that the folder brings for its model or tokenizer; false: such a folder is refused."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Settings of transformers' config that differ from the folder's, as ``model.hf_overrides``."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Texts at once."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens; a longer text loses its beginning. null: as many as the model takes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The weights' type."""


class RewardModel:
    """The score is the classifier's one logit for the prompt, as the policy reads it, with the completion behind it.

    Args:
        params: the config's ``reward.params``.

    Raises:
        UserError: wrong options, or not such a model.
    """

    def __init__(self, params: Mapping[str, Any], device: str) -> None:
        self._params: RewardModelParams = parse_params(RewardModelParams, params, "reward.params")
        self._device, path = device, self._params.path
        loading = Loading(
            key="reward.params",
            revision=self._params.revision,
            trust_remote_code=self._params.trust_remote_code,
            hf_overrides=self._params.hf_overrides,
        )
        check_revision(loading, path)
        try:
            config = read_config(path, loading)
            config.num_labels = 1
            override(config, loading.hf_overrides, "reward.params.hf_overrides")
            model: Any = load_model(
                AutoModelForSequenceClassification,
                path,
                loading=loading,
                expected="trained reward model with one label",
                config=config,
                dtype=getattr(torch, self._params.dtype),
            )
            self._tokenizer = AutoTokenizer.from_pretrained(
                path, truncation_side="left", padding_side="right", **loading.hub_options()
            )
        except LOADING_ERRORS as error:
            if refused := untrusted(error, path, loading, "tokenizer_config.json"):
                raise refused from None
            raise UserError(
                f"reward.params.path={path}: no sequence classifier with one label and a tokenizer: {first_line(error)}"
            ) from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self._model: Any = model.eval().requires_grad_(False).to(torch.device(device))
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._max_length = min(filter(None, (self._params.max_length, limit)), default=None)

    @torch.inference_mode()
    def score(self, items: Sequence[Item], report: Callable[[int, int], None] = lambda done, of: None) -> list[float]:
        """One logit for each; ``report`` is called with (items that have theirs, all) after each pass."""
        # What a chat template begins with, the tokenizer would write again.
        begins = self._tokenizer("").input_ids[:1] == [self._tokenizer.bos_token_id]
        first = self._tokenizer.bos_token if begins else ""
        texts = [item.prompt.removeprefix(first) + item.completion for item in items]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))  # of like length together: less padding
        scores = [0.0] * len(texts)
        for start in range(0, len(order), self._params.batch_size):
            indices = order[start : start + self._params.batch_size]
            batch = self._tokenizer(
                [texts[index] for index in indices],
                padding=True,
                truncation=self._max_length is not None,
                max_length=self._max_length,
                return_tensors="pt",
            ).to(self._device)
            logits = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            for index, value in zip(indices, logits[:, 0].tolist(), strict=True):
                scores[index] = value
            report(start + len(indices), len(order))
        return scores
