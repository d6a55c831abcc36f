"""Micro-batches through Megatron Core's pipeline schedules: without stages, 1F1B, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from torch import Tensor
from torch.nn.functional import pad

from strop import metrics
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.models.gpt_stage import StageRow
from strop.learner.parallel.collectives import all_gather, copy_to_ranks, join_rows
from strop.learner.parallel.context.context_plan import ContextPlan
from strop.learner.parallel.micro_batch import MicroBatch, OutputsT, tensor_fields
from strop.metrics import Metrics
from strop.models.attention.attention_plan import AttentionPlan
from strop.models.attention.tree_plan import TreePlan
from strop.models.routing.recorded_experts import ReplayedRoutes, RoutedLayers
from strop.types import Batch

Finish = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]  # (micro-batch, hidden states) -> (loss, result)


def prepare_schedule(config: Any) -> None:
    """Set what the schedules need in the TransformerConfig of a model's stages."""
    config.calculate_per_token_loss = True  # losses are sums: ranks add, and nothing is divided by numbers of micro-batches
    config.variable_seq_lengths = config.pipeline_model_parallel_size > 1  # rows have the length of their tokens
    config.deallocate_pipeline_outputs = False
    if config.virtual_pipeline_model_parallel_size is not None:
        # Otherwise the two messages between the same two ranks of a step are taken for each other: wrong gradients, no error.
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False


def run_schedule(
    layout: MegatronLayout,
    chunks: Sequence[Any],
    make_row: Callable[[MicroBatch], StageRow],
    micro_batches: Sequence[MicroBatch],
    finish: Finish,
    *,
    backward: bool,
) -> list[Any]:
    """Run every micro-batch through the stages, and backward. Return the results of ``finish`` on ranks of the last stage.

    All ranks of a pipeline pass the same micro-batches.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rows: dict[int, StageRow] = {}
    results: dict[int, Any] = {}

    def forward(numbers: Any, stage: Any) -> tuple[Tensor, Any]:
        number = next(numbers)
        if number not in rows:
            rows[number] = make_row(micro_batches[number])
        return stage(rows[number]), partial(finish_pass, number)

    def finish_pass(number: int, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        loss, results[number] = finish(micro_batches[number], hidden)
        return loss, torch.tensor(1, dtype=torch.int), {}

    numbers = [_number(len(micro_batches), rows if chunk is chunks[-1] else {}) for chunk in chunks]
    several = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=numbers if several else numbers[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # stages say the lengths of what they send
        micro_batch_size=1,
        forward_only=not backward,
    )
    return [results[number] for number in sorted(results)]


def _number(count: int, rows: dict[int, StageRow]) -> Iterator[int]:
    """Number micro-batches, and drop the row of each when the next one is read: the masks of a long row are large."""
    for number in range(count):
        yield number
        rows.pop(number, None)


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


NAMES = {  # moe_router_load_balancing_type -> Megatron Core's name of its loss
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class RouterLosses:
    """The losses of a model's routers, without their coefficients: means over layers and micro-batches."""

    def __init__(self, config: Any, layout: MegatronLayout, *, per_layer: bool) -> None:
        """``config``: Megatron Core's TransformerConfig. ``per_layer``: of each layer too."""
        self.layout, self.per_layer, self.layers = layout, per_layer, int(config.num_layers)
        self.names: list[str] = []
        if not config.num_moe_experts:
            return
        frequency = config.moe_layer_freq
        pattern = frequency if isinstance(frequency, list) else [int(layer % frequency == 0) for layer in range(self.layers)]
        self.routed = [layer for layer, routed in enumerate(pattern) if routed]
        kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        kinds = [kinds] if isinstance(kinds, str) else kinds
        weights = weights if isinstance(weights, list) else [weights] * len(kinds)
        self.names = [NAMES[kind] for kind, weight in zip(kinds, weights, strict=True) if weight > 0 and kind in NAMES]
        self.names += ["z_loss"] if config.moe_z_loss_coeff else []

    def start(self) -> None:
        """Forget the losses of passes before, also of other models in this process."""
        clear_aux_losses_tracker()

    def take(self, micro_batches: int) -> Metrics:
        """Return the losses since ``start``. All ranks must call it; those that lead a copy of the model return all, to be merged."""
        table, found = get_moe_layer_wise_logging_tracker(), {}
        for name in self.names:
            recorded = table.get(name)  # a stage without routers has none
            values = torch.zeros(self.layers, device=self.layout.device) if recorded is None else recorded["values"].clone()
            for group in (self.layout.pipeline, self.layout.tensor, self.layout.context):
                dist.all_reduce(values, group=group)
            values /= micro_batches
            if name == "z_loss":  # a mean over the tokens of a rank; the others are its part of a sum
                values /= self.layout.dims.tensor * self.layout.dims.context
            elif name == NAMES["global_aux_loss"]:  # a part of the sum over all ranks
                values *= self.layout.dims.data
            losses = values[self.routed].tolist()
            found[f"moe/{name}"] = metrics.mean(sum(losses) / len(losses), micro_batches)
            if self.per_layer:
                found |= {
                    f"moe/{name}_layer_{layer}": metrics.mean(loss, micro_batches)
                    for layer, loss in zip(self.routed, losses, strict=True)
                }
        return found
