"""Context parallelism: the ranks of a sample group share the tokens and the predicted tokens of a micro-batch.

Outside of attention, tokens are independent; ``strop.learner.parallel.context.context_plan`` implements the exchange in attention. Each
rank applies the output layer to an equal part of the predicted tokens and gathers all results: every rank computes the same loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.learner.parallel.collectives import all_gather, copy_to_ranks, join_rows
from strop.learner.parallel.context.context_plan import ContextPlan
from strop.learner.parallel.micro_batch import tensor_fields
from strop.learner.parallel.parallel_dims import DeviceMeshes
from strop.models.attention.attention_plan import AttentionPlan
from strop.models.network import OutputsT

dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


class SampleSharding:
    """A ``TokenSharding`` (strop.models.network) over a sample group: contiguous chunks of tokens, in the order of the context ranks."""

    def __init__(self, meshes: DeviceMeshes) -> None:
        self.dims = meshes.dims
        self.context: Group = meshes.context
        self.tensor: Group = meshes.tensor
        self.sample: Group = meshes.sample
        self.length = 0  # tokens that shorter micro-batches are padded to

    def shard_tokens(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor, AttentionPlan]:
        """[T] -> [t]: T is padded to ``padded_length`` and split among the context ranks."""
        padding = self.padded_length(len(tokens)) - len(tokens)
        tokens, positions = (pad(column, (0, padding)) for column in (tokens, positions))
        if not padding and self.dims.context == 1:
            return tokens, positions, plan
        count = len(tokens) // self.dims.context
        first = dist.get_rank(self.context) * count
        local = slice(first, first + count)
        return tokens[local], positions[local], ContextPlan(plan, self.context, len(tokens) - padding)

    def padded_length(self, length: int) -> int:
        """Return ``self.length`` or more: a multiple of the sample group's size."""
        longest = max(length, self.length)
        return longest + -longest % self.dims.sample

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """[t, H], or a tensor rank's rows of it -> [T or more, H], which each rank uses for its own predictions."""
        gather = all_gather if self.dims.sequence else copy_to_ranks
        return all_gather(gather(hidden, self.tensor), self.context)

    def shard_layers(self, column: Tensor, padding: int, *, mixing: bool = False) -> Tensor:
        """[T, ...] -> [t, ...]: the rows of this context rank, and with sequence parallelism those of this tensor rank among them, unless
        they are for attention.
        """
        missing = self.padded_length(len(column)) - len(column)
        column = torch.cat([column, column.new_full((missing, *column.shape[1:]), padding)])
        column = column.chunk(self.dims.context)[dist.get_rank(self.context)]
        return column.chunk(self.dims.tensor)[dist.get_rank(self.tensor)] if self.dims.sequence and not mixing else column

    def add_counts(self, counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=self.sample)
        return counts

    def shard_predictions(self, column: Tensor) -> Tensor:
        """[N, ...] -> [n, ...], with equal n on all ranks; the last row is repeated as padding."""
        count: int = -(-len(column) // self.dims.sample)
        first: int = dist.get_rank(self.sample) * count
        local = column[first : first + count]
        padding = count - len(local)
        return torch.cat([local, column[-1:].expand(padding, *column.shape[1:])]) if padding else local

    def gather_outputs(self, outputs: OutputsT, size: int) -> OutputsT:
        columns: dict[str, Any] = {name: join_rows(value, self.sample)[:size] for name, value in tensor_fields(outputs)}
        return replace(outputs, **columns)  # type: ignore[type-var]
