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


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """The parallel sizes of a learner, as a configuration says them."""

    tensor: int = 1
    context: int = 1
    stages: int = 1
    expert: int = 1
    expert_tensor: int = 1  # Megatron Core alone
    replicate: int = 1  # the torch learner alone
    sequence: bool = False

    def shard(self, devices: int, *, megatron: bool) -> Sharding:
        """Return how these divide the learner over ``devices``."""
        stage = devices // self.stages
        data = stage // (self.tensor * self.context * self.replicate)
        if megatron:
            expert = self.expert * self.expert_tensor
            return Sharding(
                optimizer_shards=data * self.context,
                tensor=self.tensor,
                context=self.context,
                stages=self.stages,
                expert=expert,
                expert_optimizer_shards=max(1, stage // expert),
                sequence=self.sequence,
            )
        expert = max(self.expert, self.tensor)
        return Sharding(
            shards=data * self.context,
            replicate=self.replicate,
            tensor=self.tensor,
            context=self.context,
            stages=self.stages,
            expert=expert,
            expert_shards=data * self.context * self.tensor // expert,
            sequence=self.sequence,
        )
