"""The dimensions of a decoder: the matrices that a token is multiplied with, and what is attended to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerDimensions:
    """One layer of a decoder."""

    attention: int  # parameters of its attention's matrices
    mlp: int  # parameters of the MLP matrices that one token is multiplied with: its experts, the shared ones, the router
    resident: int  # parameters of its MLP in memory: all experts
    query_width: int  # over all heads: the inner dimension of query-key products
    value_width: int  # of all heads
    cache_width: int  # numbers per token in the KV cache
    window: int | None = None  # number of tokens that a token attends to, including itself; None: all before it


@dataclass(frozen=True, kw_only=True)
class DecoderDimensions:
    """A decoder: its layers, and its embedding, which the output layer may share."""

    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerDimensions, ...]

    @property
    def parameters(self) -> int:
        """Matrix parameters in memory, with all experts."""
        body = sum(layer.attention + layer.resident for layer in self.layers)
        return body + self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def cache_width(self) -> int:
        """Numbers per token in the KV cache, over all layers. A window drops them again."""
        return sum(layer.cache_width for layer in self.layers)
