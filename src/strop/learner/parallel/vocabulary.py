"""The embedding and the output layer, divided over the tensor ranks by token ids: each rank has the rows of some tokens.

A rank embeds the tokens it has, and the ranks add their results. Of the output layer it computes the logits of its tokens, for the hidden
states of all ranks (Megatron-LM, arXiv 1909.08053). A tied weight is divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.learner.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, split_rows
from strop.learner.parallel.parallel_dims import DeviceMeshes, shard_parameter, to_local

dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


@dataclass(frozen=True)
class TokenRange:
    """The rows of a weight [V, H] on one tensor rank: a ``VocabularyDivision`` (strop.models.logprobs.lm_head)."""

    size: int  # V
    width: int  # rows of each rank; the last ones may have fewer
    group: Group

    @property
    def first(self) -> int:
        return int(dist.get_rank(self.group)) * self.width

    def local(self, parameter: Tensor) -> Tensor:
        return to_local(parameter)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return all_gather(rows, self.group)

    def own_rows(self, rows: Tensor) -> Tensor:
        return split_rows(rows, self.group)

    def stack(self, numbers: Tensor) -> Tensor:
        return all_gather(numbers[None], self.group)

    def exchange(self, logits: Tensor) -> Tensor:
        ranks = dist.get_world_size(self.group)
        blocks = all_to_all(nn.functional.pad(logits, (0, self.width - logits.shape[1])), self.group)
        rows: Tensor = blocks.unflatten(0, (ranks, -1))  # type: ignore[no-untyped-call]
        return rows.transpose(0, 1).flatten(1)[:, : self.size]


def divide_vocabulary(model: Any, meshes: DeviceMeshes) -> Iterator[nn.Parameter]:
    """Divide the embedding and a linear output layer over the tensor ranks, in place; yield the divided parameters."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [embedding, head] if isinstance(head, nn.Linear) else [embedding]
    mesh, count = meshes.dense["tensor"], meshes.dims.tensor
    weights = {id(layer.weight): layer.weight for layer in layers}
    shards = {key: shard_parameter(weight, mesh, 0) for key, weight in weights.items()}
    for layer in layers:
        size = len(layer.weight)
        layer.division = TokenRange(size, -(-size // count), meshes.tensor)
        layer.weight = shards[id(layer.weight)]
    yield from shards.values()
    if len(layers) == 2 and head.bias is not None:
        head.bias = shard_parameter(head.bias, mesh, 0)
        yield head.bias
    embedding.sum_ranks = reduce_scatter if meshes.dims.sequence else all_reduce
    if (padding := embedding.padding_idx) is not None:
        local = padding - embedding.division.first
        embedding.padding_idx = local if 0 <= local < len(to_local(embedding.weight)) else None
    kind = type(embedding)
    embedding.__class__ = type(kind.__name__, (_DividedEmbedding, kind), {})


class _DividedEmbedding(nn.Embedding):
    """The first base class of an embedding whose rows are divided."""

    division: TokenRange
    sum_ranks: Callable[[Tensor, Group], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """[1, T], equal on all tensor ranks -> [1, T, H], or with sequence parallelism this rank's rows of it."""
        whole = self._parameters["weight"]
        assert whole is not None
        weight = to_local(whole)
        places = input.squeeze(0) - self.division.first
        elsewhere = (places < 0) | (places >= len(weight))
        self._parameters["weight"] = weight  # type: ignore[assignment]  # the family's own class computes with it
        try:
            rows = super().forward(places.masked_fill(elsewhere, 0))
        finally:
            self._parameters["weight"] = whole
        return self.sum_ranks(rows.masked_fill(elsewhere[:, None], 0.0), self.division.group).unsqueeze(0)
