"""Draft heads of tiny policies."""

from __future__ import annotations

import torch

from strop.models.draft.eagle_config import new_shape
from strop.models.draft.eagle_head import EagleHead
from strop.models.network import Network
from support.models import to_float64


def add_head(network: Network, *, layers: int = 1, seed: int = 0, sharpness: float = 1.0) -> EagleHead:
    """Give a network a new head, in the network's dtype. ``sharpness`` multiplies its matrices, to be far from a start at 0.02."""
    head = EagleHead(new_shape(network.model.config, layers=layers))
    head.initialize(network.head.weight, seed)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(sharpness)
    double = next(network.model.parameters()).dtype == torch.float64
    network.draft = to_float64(head) if double else head
    assert network.draft is not None
    return network.draft
