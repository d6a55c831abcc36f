"""The reference policy of a LoRA run: the policy itself with its adapters disabled."""

from __future__ import annotations

from strop.algorithms.base import Outputs
from strop.models.adapters import low_rank_layers
from strop.models.network import Network
from strop.sampling import Sampling
from strop.training.torch.learner import score_shares
from strop.training.torch.parallel.placement import OneDevice, Placement
from strop.training.torch.parallel.share import Shares, assemble_outputs
from strop.types import Batch


class AdapterOffScorer:
    """Scores with the frozen base of a network that has adapters: bitwise equal to a copy of the base."""

    def __init__(self, network: Network, sampling: Sampling, *, score_tokens: int, placement: Placement | None = None) -> None:
        """Raises ValueError for a network without adapters: its base is trained."""
        if not low_rank_layers(network.model):
            raise ValueError(
                f"{type(network.model).__name__} has no adapters to disable, so it cannot be its own reference; use a "
                "FrozenScorer with a copy"
            )
        self.network = network
        self.sampling = sampling
        self.score_tokens = score_tokens
        self.placement = placement or OneDevice(network)

    async def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_shares(batch)], len(batch.target))

    def score_shares(self, batch: Batch) -> Shares:
        """Score this rank's micro-batches: on several ranks a part of what ``score`` returns."""
        with self.network.adapters_off():
            return score_shares(self.placement, batch, self.sampling, self.score_tokens)
