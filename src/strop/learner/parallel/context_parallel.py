"""Context parallelism: the ranks of a sample group share the tokens and the predicted tokens of a micro-batch.

Outside of attention, tokens are independent. In attention, an all-to-all gives each rank all tokens of some heads, and each rank attends as
a single device would (DeepSpeed-Ulysses, arXiv 2309.14509), so prefixes, windows and softcaps need no special handling. Each rank applies
the output layer to an equal part of the predicted tokens and gathers all results: every rank computes the same loss.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.learner.parallel.collectives import all_gather, all_to_all, copy_to_ranks, join_rows
from strop.learner.parallel.micro_batch import tensor_fields
from strop.learner.parallel.parallel_dims import DeviceMeshes
from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec
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
        return tokens[local], positions[local], UlyssesPlan(plan, self.context, len(tokens) - padding)

    def padded_length(self, length: int) -> int:
        """Return ``self.length`` or more: a multiple of the sample group's size."""
        longest = max(length, self.length)
        return longest + -longest % self.dims.sample

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """[t, H], or a tensor rank's rows of it -> [T or more, H], which each rank uses for its own predictions."""
        gather = all_gather if self.dims.sequence else copy_to_ranks
        return all_gather(gather(hidden, self.tensor), self.context)

    def shard_layers(self, column: Tensor, padding: int) -> Tensor:
        """[T, ...] -> [t, ...]: the rows of this context rank, and with sequence parallelism those of this tensor rank among them."""
        missing = self.padded_length(len(column)) - len(column)
        column = torch.cat([column, column.new_full((missing, *column.shape[1:]), padding)])
        column = column.chunk(self.dims.context)[dist.get_rank(self.context)]
        return column.chunk(self.dims.tensor)[dist.get_rank(self.tensor)] if self.dims.sequence else column

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


class UlyssesPlan:
    """An attention plan that exchanges some tokens of all heads for all tokens of some heads, and calls ``plan`` with these."""

    def __init__(self, plan: AttentionPlan, group: Group, length: int) -> None:
        self.plan = plan
        self.group = group
        self.world_size: int = dist.get_world_size(group)
        self.length = length  # tokens of the row without padding

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """[t, heads, D] -> [t, heads, D]. Raises ValueError if the heads cannot be split among the ranks."""
        heads, kv_heads = query.shape[1], key.shape[1]
        check_heads(heads, self.world_size)
        repeats = self.world_size // gcd(kv_heads, self.world_size)
        if repeats > 1:  # send a key to every rank with a query head that uses it
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        query, key, value = self._to_heads(query, key, value)
        padding = len(query) - self.length
        query, key, value = (tensor[: self.length] for tensor in (query, key, value))
        attended = self.plan.attend(query, key, value, spec)
        return self._to_tokens(pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended)

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[t, heads, D] each -> [ranks * t, heads / ranks, D] each, in one exchange."""
        if self.world_size == 1:
            return list(tensors)
        blocks = [tensor.unflatten(1, (self.world_size, -1)) for tensor in tensors]  # [t, ranks, heads / ranks, D]
        rows = torch.cat([block.flatten(2) for block in blocks], dim=2).transpose(0, 1).flatten(0, 1)
        received = all_to_all(rows, self.group).split([block.shape[2] * block.shape[3] for block in blocks], dim=1)
        return [rows.unflatten(1, block.shape[2:]) for rows, block in zip(received, blocks, strict=True)]

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """[ranks * t, heads / ranks, D] -> [t, heads, D]."""
        if self.world_size == 1:
            return attended
        received: Tensor = all_to_all(attended, self.group).unflatten(0, (self.world_size, -1))  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).flatten(1, 2)


def check_heads(heads: int, ranks: int) -> None:
    """Raises ValueError unless attention heads can be split among context ranks."""
    if heads % ranks:
        raise ValueError(
            f"each layer has {heads} attention heads on a rank, which cannot be split evenly among {ranks} context ranks; set "
            f"context_parallel_size to a divisor of {heads}"
        )
