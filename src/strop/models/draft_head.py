"""A head that drafts tokens for the policy, as engines are sent it. Extensions bring one (``Network.draft``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

FOLDER = "draft"  # of the head, alongside the policy's weights
WEIGHTS = "model.safetensors"


class DraftHead(nn.Module):
    """A module that reads the states of the policy's layers and proposes the tokens after them."""

    key: str  # of the configuration, for messages: policy.draft

    def published_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what engines are sent at a publish, as ``draft.NAME``."""
        raise NotImplementedError

    def save(self, folder: Path) -> Path:
        """Write the head as engines load it (``config.json`` and WEIGHTS); return the folder."""
        raise NotImplementedError
