"""Micro-batches of a rank, their outputs, and the combination of all ranks' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop import metrics
from strop.algorithms.base import Outputs
from strop.data.rollout_selector import SubBatch
from strop.device_copies import move, move_fields
from strop.learner.base import BackwardResult
from strop.metrics import Metrics
from strop.monitoring.process_profile import RECORDER
from strop.types import Batch

OutputsT = TypeVar("OutputsT")  # a dataclass of tensors


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch of one rank."""

    sub_batch: SubBatch
    zero_gradient: bool  # its loss has zero gradient, so it runs without one
    dummy: bool = False  # runs only to match the number of passes of other ranks; its results are ignored


@dataclass(frozen=True, eq=False)
class MicroBatchOutputs:
    """The results of a rank's micro-batches; empty if another rank with the same micro-batches reports them."""

    outputs: tuple[tuple[Tensor, Outputs], ...] = ()  # (index [n] into the batch's N, outputs of these n tokens on the CPU)
    metrics: Metrics | None = None  # merged over its micro-batches


LocalOutputs = tuple[tuple[Tensor, OutputsT], ...]
"""Outputs [n] of this rank's micro-batches, with their index [n] into the batch's N."""


def make_dummy(batch: Batch, *, zero_gradient: bool) -> MicroBatch:
    """Return a dummy that reads ``batch``, one rollout. Nothing recorded is replayed in it, which would be counted."""
    nothing = torch.zeros_like(batch.mask)
    return MicroBatch(
        SubBatch(replace(batch, read_columns={}, mask=nothing), torch.arange(len(batch.target))), zero_gradient, dummy=True
    )


def run_in_turn(
    network: Any,
    micro_batches: Sequence[MicroBatch],
    compute: Callable[[Batch], OutputsT],
    loss: Callable[[MicroBatch, OutputsT], Tensor] | None,
    *,
    backward: bool,
    before_last: Callable[[], None] = lambda: None,
) -> LocalOutputs[OutputsT]:
    """Run the passes of ``Parallelism.run_passes`` on a device with all layers: one micro-batch after another.

    The host does not wait for a GPU until the last micro-batch. ``before_last`` is called before the last one that has a backward pass.
    """
    results = []
    last = max((index for index, each in enumerate(micro_batches) if backward and not each.zero_gradient), default=None)
    for index, micro_batch in enumerate(send_to(network, each) for each in micro_batches):
        if index == last:
            before_last()
        trained = backward and not micro_batch.zero_gradient
        with RECORDER.span("learner", "forward"), torch.set_grad_enabled(trained):
            outputs = compute(micro_batch.sub_batch.batch)
            value = None if loss is None else loss(micro_batch, outputs)
        if trained and value is not None:
            with RECORDER.span("learner", "backward"):
                value.backward()  # type: ignore[no-untyped-call]
        if not micro_batch.dummy:
            results.append((micro_batch.sub_batch.index, _detach(outputs)))
    return tuple(zip((index for index, _ in results), move_fields([outputs for _, outputs in results], "cpu"), strict=True))


def assemble_result(results: Sequence[MicroBatchOutputs], size: int) -> BackwardResult:
    """Combine the results of all ranks for a batch of ``size`` predicted tokens. Raises ValueError if one is missing."""
    logged = [result.metrics for result in results if result.metrics is not None]
    return BackwardResult(metrics=metrics.merge(*logged), outputs=assemble_outputs(results, size))


def assemble_outputs(results: Sequence[MicroBatchOutputs], size: int) -> Outputs:
    """Combine the outputs only, [size]. Raises ValueError unless they cover every predicted token once."""
    parts = [part for result in results for part in result.outputs]
    covered = sum(len(index) for index, _ in parts)
    if covered != size or not parts:
        raise ValueError(
            f"the outputs cover {covered} of the batch's {size} predicted tokens: some ranks are missing; combine the outputs of all "
            "ranks"
        )
    first = parts[0][1]
    columns: dict[str, Any] = {}
    for name, example in tensor_fields(first):
        column = torch.zeros(size, *example.shape[1:], dtype=example.dtype)
        for index, outputs in parts:
            column[index] = getattr(outputs, name)
        columns[name] = column
    return replace(first, **columns)


def tensor_fields(outputs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor fields of outputs by name, without those that are None."""
    for item in fields(outputs):
        if (value := getattr(outputs, item.name)) is not None:
            yield item.name, value


def detach_to_cpu(outputs: OutputsT) -> OutputsT:
    """Return outputs detached, in float32 on the CPU; integers keep their type."""
    return move_fields([_detach(outputs)], "cpu")[0]


def _detach(outputs: OutputsT) -> OutputsT:
    """Return outputs detached, in float32; integers keep their type. Candidates (many numbers per token) are moved to the CPU at
    once.
    """
    columns: dict[str, Any] = {}
    for name, value in tensor_fields(outputs):
        value = value.detach().float() if value.is_floating_point() else value.detach()
        columns[name] = value.cpu() if value.dim() > 1 else value
    return replace(outputs, **columns)  # type: ignore[type-var]


def dummy_loss(outputs: Outputs) -> Tensor:
    """Return the loss of a dummy micro-batch: a zero gradient that reaches every weight."""
    _, first = next(tensor_fields(outputs))
    return first.sum() * 0.0


def sum_outputs(micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
    """Return a loss whose gradient reaches everything the network computed, for a pass that is only measured."""
    sums = [value.sum() for _, value in tensor_fields(outputs) if value.requires_grad]
    return torch.stack(sums).sum()


def send_to(network: Any, micro_batch: MicroBatch) -> MicroBatch:
    """Move the columns of a micro-batch that a network and its loss read to their device, in one copy; no rows that it cuts or
    pads first.
    """
    if not getattr(network, "reads_plain_rows", False):
        return micro_batch
    part = micro_batch.sub_batch
    sent = to_device(part.batch, network.device, (*READ_COLUMNS, *LOSS_COLUMNS))
    return replace(micro_batch, sub_batch=replace(part, batch=sent))


LOSS_COLUMNS = ("target", "sequence", "rollout_logprobs", "versions", "advantages", "mask", "group", "rewards")
READ_COLUMNS = ("tokens", "positions", "source")


def to_device(batch: Batch, device: torch.device, names: Sequence[str] = LOSS_COLUMNS) -> Batch:
    """Move columns of a batch to a device in one copy: by default those that a loss reads, and any added ones."""
    if device.type == "cpu":
        return batch
    moved = move([*(getattr(batch, name) for name in names), *batch.columns.values()], device)
    added = dict(zip(batch.columns, moved[len(names) :], strict=True))
    own: dict[str, Any] = dict(zip(names, moved, strict=False))
    return replace(batch, **own, columns=added)
