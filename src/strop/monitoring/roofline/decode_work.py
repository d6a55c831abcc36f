"""What sampling has to do at least: the weights are read once a step, and each sequence's keys and values once."""

from __future__ import annotations

from dataclasses import dataclass

from strop.hardware.model_dimensions import DecoderDimensions


@dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """The FLOPs and bytes of decoding steps of a model, counted from its dimensions."""

    model: DecoderDimensions
    itemsize: int  # bytes of a number, in weights and cache
    precision: str

    def count_flops(self, sequences: float, attended: float) -> float:
        """Count the FLOPs of sampling ``sequences`` tokens that attend to ``attended`` tokens together."""
        pairs = sum(
            (attended if layer.window is None else min(attended, sequences * layer.window))
            * (layer.query_width + layer.value_width)
            for layer in self.model.layers
        )
        return 2.0 * sequences * self.model.active_parameters + 2.0 * pairs

    def count_bytes(self, steps: float, sequences: float, attended: float) -> float:
        """Count the bytes that ``steps`` steps read of weights (of experts, no more than the sequences can choose) and of the cache."""
        each = sequences / steps if steps else 0.0
        weights = self.model.hidden * self.model.vocabulary + sum(
            layer.attention + min(layer.resident, each * layer.mlp) for layer in self.model.layers
        )
        cached = sum(
            (attended if layer.window is None else min(attended, sequences * layer.window)) * layer.cache_width
            for layer in self.model.layers
        )
        written = sequences * self.model.cache_width
        return self.itemsize * (steps * weights + cached + written)
