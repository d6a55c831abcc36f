"""What the ranks of a learner send each other in a pass, and how long it takes over the links of a node and between nodes.

Collectives move ``(n - 1) / n`` of a tensor for a gather or a scatter, twice that for a sum. Rates are shares of the vendors'.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.hardware.devices import Device, linked_devices
from strop.planning.model_size import ModelSize
from strop.planning.sharding import Sharding

LINK_SHARE = 0.7  # of a link's rate that a collective reaches
HOST_RATE = 25e9  # bytes a second between a device and CPU memory
HOST_UPDATE_RATE = 20e9  # bytes a second of CPU memory that a device's share of the optimizer reads and writes there
BFLOAT16, FLOAT32 = 2, 4  # bytes
UPDATED = 28  # bytes that an optimizer step on the host touches for a weight: gradient, weight, two moments, read and written


@dataclass(frozen=True)
class LearnerTraffic:
    """The collectives of a learner of a model."""

    model: ModelSize
    device: Device
    sharding: Sharding

    def rate(self, size: int, stride: int = 1) -> float:
        """Return the bytes a second of a collective over ``size`` ranks that are ``stride`` ranks apart: of the link, or of the network
        cards of a node that the group has."""
        linked = linked_devices(self.device)
        if size * stride <= linked:
            return LINK_SHARE * self.device.link_gb * 1e9
        cards = max(1, linked // stride)
        return LINK_SHARE * 1e9 * min(self.device.link_gb, self.device.network_gb * cards)

    def forward(self, tokens: float) -> float:
        """Return the seconds of a rank's collectives in a forward pass over a micro-batch of ``tokens``, which its ranks share. A
        backward pass takes as long."""
        layers = self.model.num_layers / self.sharding.stages
        return layers * (self._tensor(tokens) + self._experts(tokens) + self._context(tokens))

    def _tensor(self, tokens: float) -> float:
        """Sum the outputs of attention and MLP."""
        size = self.sharding.tensor
        moved = 2 * 2 * (size - 1) / size * tokens / self.sharding.context * self.model.hidden * BFLOAT16
        return moved / self.rate(size)

    def _experts(self, tokens: float) -> float:
        """Send tokens to their experts and back; what leaves a node goes through a rank's own network card."""
        size, linked = self.sharding.expert, linked_devices(self.device)
        if not self.model.experts or size == 1:
            return 0.0
        own = tokens / self.sharding.context / self.sharding.tensor
        moved = 2 * own * self.model.active_experts * self.model.hidden * BFLOAT16
        inside = min(size, linked)
        near = moved * (inside - 1) / size / (LINK_SHARE * self.device.link_gb * 1e9)
        return near + moved * (size - inside) / size / (LINK_SHARE * self.device.network_gb * 1e9)

    def _context(self, tokens: float) -> float:
        """Pass keys and values around."""
        size = self.sharding.context
        cache = self.model.dimensions.layers[0].cache_width / self.sharding.tensor
        return (size - 1) / size * tokens * cache * BFLOAT16 / self.rate(size, self.sharding.tensor)

    @property
    def gathered_rank_weights(self) -> tuple[float, float]:
        """Dense weights and experts that a rank multiplies with in all of its layers, if FSDP gathers them; else 0."""
        model, sharding = self.model, self.sharding
        dense = (model.weights - model.expert_weights) / (sharding.tensor * sharding.stages)
        experts = model.expert_weights / (sharding.stages * sharding.expert)
        return (dense if sharding.shards > 1 else 0.0, experts if sharding.expert_shards > 1 else 0.0)

    def gather(self, number_bytes: float) -> float:
        """Return the seconds in which FSDP gathers all weights once, or scatters their gradients, of so many bytes a number."""
        sharding, (dense, experts) = self.sharding, self.gathered_rank_weights
        return number_bytes * (
            dense / self.rate(sharding.shards, sharding.tensor) + experts / self.rate(sharding.expert_shards, sharding.expert)
        )

    def copies(self) -> float:
        """Return the seconds in which the copies of HSDP add their gradients after a micro-batch."""
        sharding = self.sharding
        if sharding.replicate == 1:
            return 0.0
        return 2 * FLOAT32 * self.model.rank_weights(sharding) / self.rate(sharding.replicate, sharding.tensor * sharding.shards)

    def optimizer_step(self, gradient_bytes: int) -> float:
        """Return the seconds in which Megatron's ranks add gradients and gather the weights, once for an optimizer step."""
        sharding, model = self.sharding, self.model
        dense = (model.weights - model.expert_weights) / sharding.dense if sharding.optimizer_shards > 1 else 0.0
        experts = model.expert_weights / (sharding.stages * sharding.expert) if sharding.expert_optimizer_shards > 1 else 0.0
        moved = dense / self.rate(sharding.optimizer_shards, sharding.tensor)
        moved += experts / self.rate(sharding.expert_optimizer_shards, sharding.expert)
        return (gradient_bytes + BFLOAT16) * moved
