"""Micro-batches through Megatron Core's pipeline schedules: without stages, 1F1B, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.models.stage_row import StageRow
from strop.learner.parallel.micro_batch import MicroBatch

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
