"""The reference policy of a LoRA run: the policy itself with its adapters disabled."""

from __future__ import annotations

from strop.algorithms.base import Outputs
from strop.learner.parallel.micro_batch import MicroBatchOutputs, assemble_outputs
from strop.learner.parallel.parallelism import Parallelism, SingleDevice
from strop.learner.torch.learner import score_local
from strop.models.adapters import lora_layers
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch


class AdapterOffScorer:
    """Scores with the frozen base of a network that has adapters: bitwise equal to a copy of the base."""

    def __init__(
        self, network: Network, sampling: Sampling, *, score_tokens: int, parallelism: Parallelism | None = None
    ) -> None:
        """Raises ValueError for a network without adapters: its base is trained."""
        if not lora_layers(network.model):
            raise ValueError(
                f"{type(network.model).__name__} has no adapters to disable, so it cannot be its own reference; use a "
                "FrozenScorer with a copy"
            )
        self.network = network
        self.sampling = sampling
        self.score_tokens = score_tokens
        self.parallelism = parallelism or SingleDevice(network)

    async def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_local(batch)], len(batch.target))

    def score_local(self, batch: Batch) -> MicroBatchOutputs:
        """Score this rank's micro-batches: on several ranks a part of what ``score`` returns."""
        with self.network.disable_adapters():
            return score_local(self.parallelism, batch, self.sampling, self.score_tokens)
