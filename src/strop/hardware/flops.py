"""FLOPs of a model: a multiply-add is 2, and recomputation (checkpointed layers, logits) is not counted.

A forward pass over T tokens of which N are predicted, with P (query, key) pairs in each layer:

    2 T sum(layer matrices) + 2 P (query width + value width) + 2 N hidden vocabulary

A backward pass is twice that: once for the inputs and once for the weights, which frozen weights (LoRA) do not need. The same as
"6 N D" (Kaplan et al., arXiv:2001.08361) with attention and the output layer counted as they are; of experts only the chosen ones
(Narayanan et al., arXiv:2104.04473, count dense models like this).
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.hardware.model_dimensions import DecoderDimensions


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """The token counts of a pass. ``pairs`` has an entry for each window size of the model's layers, with None for full
    attention.
    """

    read: int  # T
    predicted: int  # N
    pairs: dict[int | None, int]


def windows_of(model: DecoderDimensions) -> frozenset[int | None]:
    return frozenset(layer.window for layer in model.layers)


def forward_flops(model: DecoderDimensions, counts: PassCounts) -> float:
    """Count the FLOPs of a forward pass."""
    return _matrices(model, counts) + _attention(model, counts) + _output(model, counts)


def training_flops(model: DecoderDimensions, counts: PassCounts, *, frozen: bool = False) -> float:
    """Count the FLOPs of a forward and a backward pass. ``frozen``: the matrices have no gradients (LoRA)."""
    passes = 2 if frozen else 3
    return passes * (_matrices(model, counts) + _output(model, counts)) + 3 * _attention(model, counts)


def _matrices(model: DecoderDimensions, counts: PassCounts) -> float:
    return 2.0 * counts.read * sum(layer.attention + layer.mlp for layer in model.layers)


def _attention(model: DecoderDimensions, counts: PassCounts) -> float:
    return sum(2.0 * counts.pairs[layer.window] * (layer.query_width + layer.value_width) for layer in model.layers)


def _output(model: DecoderDimensions, counts: PassCounts) -> float:
    return 2.0 * counts.predicted * model.hidden * model.vocabulary
