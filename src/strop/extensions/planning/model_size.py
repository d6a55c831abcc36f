"""The sizes of a model that a plan needs, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from strop.extensions.planning.sharding import Sharding
from strop.hardware import DecoderDimensions
from strop.models.decoder_dimensions import UnknownDimensions, dimensions_of, read_config


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A decoder's dimensions with its name, its heads and its experts."""

    name: str
    dimensions: DecoderDimensions
    heads: int
    experts: int = 0  # of a layer
    active_experts: int = 0  # that a token is multiplied with

    @classmethod
    def from_config(cls, name: str, values: Mapping[str, Any]) -> ModelSize:
        """Read ``config.json``. Raises UnknownDimensions, whose message says what it lacks."""
        try:
            dimensions, config = dimensions_of(values), read_config(values).get_text_config()
        except UnknownDimensions as error:
            raise UnknownDimensions(f"{name}: {error}") from error
        counts = (getattr(config, key, None) for key in ("n_routed_experts", "num_experts", "num_local_experts"))
        experts = next(filter(None, counts), 0)
        return cls(
            name=name,
            dimensions=dimensions,
            heads=int(config.num_attention_heads),
            experts=int(experts),
            active_experts=int(config.num_experts_per_tok) if experts else 0,
        )

    @property
    def num_layers(self) -> int:
        return len(self.dimensions.layers)

    @property
    def hidden(self) -> int:
        return self.dimensions.hidden

    @cached_property
    def weights(self) -> int:
        return self.dimensions.parameters

    @cached_property
    def expert_weights(self) -> float:
        """Weights of the experts of all layers: what a token is not multiplied with, scaled up by the experts that it misses."""
        if not self.experts:
            return 0.0
        missed = sum(layer.resident - layer.mlp for layer in self.dimensions.layers)
        return missed * self.experts / (self.experts - self.active_experts)

    @cached_property
    def cache_width(self) -> int:
        """Numbers that a token leaves in the cache of all layers."""
        return self.dimensions.cache_width

    @cached_property
    def mlp_width(self) -> float:
        """Inner width of a layer's MLP, of experts those that a token goes through, on average over the layers."""
        return sum(layer.mlp for layer in self.dimensions.layers) / (3 * self.hidden * self.num_layers)

    @cached_property
    def layer_weights(self) -> float:
        """Weights of all layers: without the embedding and the output layer."""
        return float(sum(layer.attention + layer.resident for layer in self.dimensions.layers))

    @property
    def embedding_weights(self) -> int:
        return self.dimensions.hidden * self.dimensions.vocabulary

    def rank_weights(self, sharding: Sharding) -> float:
        """Weights that a rank of a learner holds."""
        return (self.weights - self.expert_weights) / sharding.dense + self.expert_weights / sharding.experts
