"""Over how many ranks the parts of a learner are divided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Ranks that share a part of the learner. Adjacent ranks share tensors, then tokens, then FSDP's shards; stages are outermost."""

    shards: int = 1  # of weights, gradients and optimizer over data-parallel ranks (FSDP), context ranks among them
    replicate: int = 1  # copies of those shards (HSDP)
    optimizer_shards: int = 1  # of the optimizer alone (Megatron's distributed optimizer)
    tensor: int = 1
    context: int = 1
    stages: int = 1
    expert: int = 1  # ranks that have different experts, or parts of them
    expert_shards: int = 1  # of an expert rank's experts (FSDP)
    expert_optimizer_shards: int = 1  # of their optimizer alone (Megatron)
    sequence: bool = False  # norms and residuals are divided over tensor ranks too

    @property
    def dense(self) -> int:
        """Ranks that share a dense weight."""
        return self.shards * self.tensor * self.stages

    @property
    def experts(self) -> int:
        """Ranks that share the experts of a model."""
        return self.stages * self.expert * self.expert_shards

    @property
    def of_one_micro_batch(self) -> int:
        """Ranks that work on the same micro-batch."""
        return self.tensor * self.context * self.stages
