"""How the ranks of a layout share the tokens of a micro-batch, and the places that it predicts from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.models.stage_row import StageRow
from strop.learner.parallel.collectives import all_gather, copy_to_ranks, join_rows
from strop.learner.parallel.context.context_plan import ContextPlan
from strop.learner.parallel.micro_batch import OutputsT, tensor_fields
from strop.models.attention.attention_plan import AttentionPlan
from strop.models.attention.tree_plan import TreePlan
from strop.models.routing.recorded_experts import ReplayedRoutes, RoutedLayers
from strop.types import Batch

dist: Any = torch.distributed


class RowSharding:
    """Context ranks have contiguous parts of a row; tensor ranks the same part or, with sequence parallelism, parts of it.

    Each context rank predicts an equal part of the tokens and gathers all results, so that every rank computes the same loss.
    """

    def __init__(self, layout: MegatronLayout, multiple: int = 1) -> None:
        """``multiple``: of tokens that each rank has, as kernels require."""
        self.layout = layout
        self.multiple = multiple
        self.dims = layout.dims
        self.device = layout.device

    def make_row(self, batch: Batch, routed: RoutedLayers | None = None) -> StageRow:
        """Return this rank's part of the row. T is padded so that ranks have equal parts of it. ``routed``: with router replay."""
        count = len(batch.tokens)
        padding = -count % (self.dims.tensor * self.dims.context * self.multiple)
        tokens, positions = (pad(column, (0, padding)).to(self.device) for column in (batch.tokens, batch.positions))
        plan: AttentionPlan = TreePlan(batch.segment_start, batch.segment_length, batch.segment_parent, self.device)
        if padding or self.dims.context > 1:
            plan = ContextPlan(plan, self.layout.context, count)
        length = len(tokens) // self.dims.context
        local = slice(dist.get_rank(self.layout.context) * length, (dist.get_rank(self.layout.context) + 1) * length)
        experts, recorded = None, None if routed is None else batch.read_columns.get(routed.column.name)
        if routed is not None and recorded is not None:
            recorded = torch.cat([recorded, recorded.new_full((padding, *recorded.shape[1:]), routed.column.fill)])
            counted = torch.bincount(batch.source, minlength=len(tokens))
            experts = ReplayedRoutes(routed, self._shard_layers(recorded[local]), self._shard_layers(counted[local]))
        return StageRow(tokens[local], positions[local], plan, experts)

    def _shard_layers(self, column: Tensor) -> Tensor:
        """Return the rows of a context rank's column that this tensor rank has between attentions."""
        if self.dims.sequence:
            column = column.chunk(self.dims.tensor)[dist.get_rank(self.layout.tensor)]
        return column.to(self.device)

    def add_counts(self, counts: Tensor) -> Tensor:
        """Return the sum of the counts of all ranks that read the same micro-batches."""
        for group in (self.layout.tensor, self.layout.context, self.layout.pipeline):
            dist.all_reduce(counts, group=group)
        return counts

    def gather_hidden(self, hidden: Tensor, *, vocab_parallel: bool) -> Tensor:
        """Hidden states of this rank's tokens, [t, 1, H] -> those of all T tokens, [T or more, H].

        ``vocab_parallel``: tensor ranks use them for different parts of the vocabulary, so their gradients are added. Otherwise every
        tensor rank computes the same with them, and has the same gradient.
        """
        rows = hidden.squeeze(1)
        if vocab_parallel:
            rows = (all_gather if self.dims.sequence else copy_to_ranks)(rows, self.layout.tensor)
        elif self.dims.sequence:
            rows = join_rows(rows, self.layout.tensor)
        return all_gather(rows, self.layout.context)

    def shard_predictions(self, column: Tensor) -> Tensor:
        """[N, ...] -> the rows [n, ...] that this context rank predicts, equally many on each; the last row is repeated as padding."""
        count: int = -(-len(column) // self.dims.context)
        local = column[dist.get_rank(self.layout.context) * count :][:count]
        padding = count - len(local)
        local = torch.cat([local, column[-1:].expand(padding, *column.shape[1:])]) if padding else local
        return local.to(self.device)

    def gather_outputs(self, outputs: OutputsT, size: int) -> OutputsT:
        """Outputs of this rank's predictions -> all N = ``size`` outputs, equal on all ranks."""
        columns: dict[str, Any] = {name: join_rows(value, self.layout.context)[:size] for name, value in tensor_fields(outputs)}
        return replace(outputs, **columns)  # type: ignore[type-var]
