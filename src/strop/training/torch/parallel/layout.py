"""How many ranks share what: sizes, and the meshes of ranks made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

dist: Any = torch.distributed


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Ranks by dimension, outermost first: ranks next to each other share the most. Raises ValueError for sizes that do not fit.

    ``replicate`` copies of the model, each sharded over ``shard`` x ``context`` ranks (FSDP2; with copies: HSDP). ``context`` x ``tensor``
    ranks read the same micro-batch, each some of its tokens. ``expert`` ranks, counted from the innermost, divide the experts of each
    layer; under tensor parallelism they divide at least as many ways as the linear layers.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    sequence: bool = False  # between tensor-parallel layers each rank has some of the tokens, not all

    def __post_init__(self) -> None:
        sizes = (self.replicate, self.shard, self.context, self.tensor, self.expert)
        if min(sizes) < 1:
            raise ValueError(f"parallel sizes {sizes} must all be at least 1")
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence_parallel is true and tensor_parallel_size is 1: there is nothing to divide the tokens among; "
                "set sequence_parallel=false, or raise tensor_parallel_size"
            )
        if self.expert > 1 and self.expert % self.tensor:
            raise ValueError(
                f"expert_parallel_size {self.expert} is no multiple of tensor_parallel_size {self.tensor}: the ranks that share a layer "
                "share its experts too; set it to a multiple, or to 1"
            )
        if (self.shard * self.context * self.tensor) % self.expert_ways:
            raise ValueError(
                f"expert_parallel_size {self.expert_ways} does not divide the {self.shard * self.context * self.tensor} ranks of one copy "
                "of the model; set it to a number that does"
            )

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Ranks, or groups of ranks, that read different micro-batches."""
        return self.replicate * self.shard

    @property
    def sample(self) -> int:
        """Ranks that read the same micro-batch."""
        return self.context * self.tensor

    @property
    def expert_ways(self) -> int:
        """Into how many parts the experts of a layer are divided."""
        return max(self.expert, self.tensor)


class Meshes:
    """The ranks of a learner, arranged by ``sizes``; made in all of them at once, after the default process group."""

    def __init__(self, sizes: ParallelSizes, device_type: str) -> None:
        if dist.get_world_size() != sizes.world:
            raise ValueError(f"the sizes {sizes} are for {sizes.world} ranks, and there are {dist.get_world_size()}")
        self.sizes = sizes
        self.dense: Any = dist.init_device_mesh(
            device_type,
            (sizes.replicate, sizes.shard, sizes.context, sizes.tensor),
            mesh_dim_names=("replicate", "shard", "context", "tensor"),
        )
        outer = sizes.shard * sizes.context * sizes.tensor // sizes.expert_ways
        self.experts: Any = dist.init_device_mesh(
            device_type,
            (sizes.replicate, outer, sizes.expert_ways),
            mesh_dim_names=("replicate", "expert_shard", "expert"),
        )

    @cached_property
    def fsdp(self) -> Any:
        """What ordinary parameters are sharded over: [shard x context], or [replicate, shard x context] with copies."""
        sharded = self.dense["shard", "context"]._flatten("shard_context")
        return self.dense["replicate", "shard_context"] if self.sizes.replicate > 1 else sharded

    @cached_property
    def expert_fsdp(self) -> Any:
        """What the experts of one rank are sharded over."""
        return self.experts["replicate", "expert_shard"] if self.sizes.replicate > 1 else self.experts["expert_shard"]

    @cached_property
    def sample(self) -> Any:
        """The process group of the ranks that read the same micro-batch."""
        return self.dense["context", "tensor"]._flatten("sample").get_group()

    @property
    def tensor(self) -> Any:
        return self.dense["tensor"].get_group()

    @property
    def context(self) -> Any:
        return self.dense["context"].get_group()

    @property
    def expert(self) -> Any:
        return self.experts["expert"].get_group()

    @property
    def data_rank(self) -> int:
        """Which of the ``sizes.data`` micro-batches this rank reads."""
        place: Sequence[int] = self.dense.get_coordinate()
        return place[0] * self.sizes.shard + place[1]

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that read the same micro-batch."""
        place = self.dense.get_coordinate()
        return not any(place[2:])
