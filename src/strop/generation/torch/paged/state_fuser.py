"""What a draft head reads of the policy's passes in the embedded engine: a fused state for each token, held beside its keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.models.draft.state_capture import StateCapture
from strop.models.network import Network


class StateFuser:
    """Makes the fused states [n, H] of tokens from what some layers of the policy put out."""

    def __init__(self, network: Network) -> None:
        assert network.draft is not None
        self.network, self.head = network, network.draft
        self.capture = StateCapture(network.decoder, self.head.shape.aux_layers)
        self.layers = torch.tensor(self.head.shape.aux_layers)
        self.size = self.head.shape.hidden_size

    def empty(self, tokens: int) -> Tensor:
        """Return room for the outputs of the layers, [tokens, layers, H] float32."""
        return torch.empty(tokens, len(self.layers), self.size)

    def take(self) -> Tensor:
        """Fuse what was captured of the last pass."""
        return self.fuse(self.capture.take())

    @torch.no_grad()
    def fuse(self, states: Tensor) -> Tensor:
        """[n, layers * H] -> [n, H] float32."""
        with self.network.autocast():
            return self.head.fuse(states).float()
