"""FLOPs that a model asks for: a multiply-add is 2, what is computed again (checkpointed layers, logits) counts once.

A forward pass over T tokens of which N are predicted, with P (query, key) pairs in each layer:

    2 T sum(layer matrices) + 2 P (query width + value width) + 2 N hidden vocabulary

A backward pass is twice that: once for what went in, once for the weights, which frozen ones (LoRA) do without. The same as
"6 N D" (Kaplan et al., arXiv:2001.08361) with attention and the output layer counted as they are; of experts only the chosen ones
(Narayanan et al., arXiv:2104.04473, count dense models like this).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strop.hardware.model_dimensions import DecoderDimensions


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """What a pass reads. ``pairs`` has an entry for every window that the model's layers have, with None for full attention."""

    read: int  # T
    predicted: int  # N
    pairs: dict[int | None, int]

    @classmethod
    def of_lengths(cls, lengths: Iterable[int], model: DecoderDimensions, *, predicted: int | None = None) -> PassCounts:
        """Return the counts of sequences that share nothing, [S] lengths; all tokens are predicted where ``predicted`` is None."""
        sizes = list(lengths)
        read = sum(sizes)
        pairs = {window: sum(causal_pairs(size, window) for size in sizes) for window in windows_of(model)}
        return cls(read=read, predicted=read if predicted is None else predicted, pairs=pairs)


def windows_of(model: DecoderDimensions) -> frozenset[int | None]:
    return frozenset(layer.window for layer in model.layers)


def causal_pairs(length: int, window: int | None = None) -> int:
    """Count (query, key) pairs of a sequence in which a token attends to itself and those before it, at most ``window`` tokens."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def forward_flops(model: DecoderDimensions, counts: PassCounts) -> float:
    """Count the FLOPs of a forward pass."""
    return _matrices(model, counts) + _attention(model, counts) + _output(model, counts)


def training_flops(model: DecoderDimensions, counts: PassCounts, *, frozen: bool = False) -> float:
    """Count the FLOPs of a forward and a backward pass. ``frozen``: the matrices have no gradients of their own (LoRA)."""
    passes = 2 if frozen else 3
    return passes * (_matrices(model, counts) + _output(model, counts)) + 3 * _attention(model, counts)


def _matrices(model: DecoderDimensions, counts: PassCounts) -> float:
    return 2.0 * counts.read * sum(layer.attention + layer.mlp for layer in model.layers)


def _attention(model: DecoderDimensions, counts: PassCounts) -> float:
    return sum(2.0 * counts.pairs[layer.window] * (layer.query_width + layer.value_width) for layer in model.layers)


def _output(model: DecoderDimensions, counts: PassCounts) -> float:
    return 2.0 * counts.predicted * model.hidden * model.vocabulary
