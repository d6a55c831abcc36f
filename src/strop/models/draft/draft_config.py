"""Section ``policy.draft``: a draft head that is trained beside the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from strop.base_config import BaseConfig, PathText
from strop.problems import Problem

LayerIndices = Annotated[tuple[int, ...], Field(strict=False)]


class DraftConfig(BaseConfig):
    """An EAGLE-3 head (arXiv 2503.01840) that learns to predict the policy's tokens from its hidden states."""

    identity_keys: ClassVar[tuple[str, ...]] = ("enabled", "model_name", "num_layers", "aux_layer_indices")

    enabled: bool = Field(False, description="Train a draft head beside the policy, for speculative decoding.")
    model_name: PathText | None = Field(
        None,
        description="A hub name or folder with an EAGLE-3 head of this policy; null starts a new one, of the policy's shape.",
    )
    loss_weight: float = Field(1.0, gt=0, description="Factor of the head's loss. The policy's gradient does not depend on it.")
    num_layers: int | None = Field(
        None, ge=1, le=8, description="Layers of a new head; null is 1, and with model_name what the checkpoint has (layers)."
    )
    aux_layer_indices: LayerIndices | None = Field(
        None,
        description="Layers of the policy, from 0, whose outputs the head reads; null is the checkpoint's, else layer 1, the middle one "
        "and the fourth from the end.",
    )
    head_lr: float | None = Field(None, gt=0, description="Learning rate of the head; null is that of the policy's optimizer.")

    def errors(self, key: str) -> Iterator[Problem]:
        indices = self.aux_layer_indices
        if indices is not None and (not indices or list(indices) != sorted({*indices}) or indices[0] < 0):
            yield Problem(
                f"{key}.aux_layer_indices",
                f"found {list(indices)}: the head reads one or more layers, in the order of the model and each once",
                "Set it to null, or to a list such as [1, 13, 24].",
            )
