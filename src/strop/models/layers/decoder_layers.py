"""Find the layers of a decoder."""

from __future__ import annotations

from torch import nn


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder: its module list with the most parameters, or an empty list."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    largest = max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))
    return list(largest)
