"""The shares of a batch: what each rank reads of it, divided before it is sent.

The driver divides a batch before sending it, so that each rank receives only what it reads; ranks that read the same
micro-batches receive the same share. A rank given a whole batch takes its own share in the same way.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.data.rollout_selector import RolloutSelector, SubBatch
from strop.data.splitting import BatchPartition, RankPlan, partition_batch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How the ranks of one network cut a batch into micro-batches: the arguments of ``strop.data.splitting.partition_batch``."""

    ranks: int  # that read different micro-batches
    token_budget: int  # of a micro-batch
    padded: bool = False
    whole_groups: bool = False
    fills_up: bool = False  # the schedule may run dummies in addition to those that keep ranks in step


@dataclass(frozen=True, kw_only=True)
class ShareRequest:
    """The share of a batch that one rank reads in one kind of pass. Ranks that read the same micro-batches have equal requests."""

    rule: SplitRule
    number: int  # of the share, from 0
    read_columns: bool = False  # whether it reads what engines recorded of the tokens that they read


_ALIGNMENT = 16  # bytes: a multiple of the size of every element


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchShare:
    """The rollouts of a batch that one rank reads, and their partition into micro-batches.

    The micro-batches are, to the last bit, the same as cut from the whole batch: the denominators are those of the whole
    optimizer step (law 1).
    """

    batch: Batch | None  # the rank's rollouts; None if it reads none
    index: Tensor  # [n] int64: where the predicted tokens of ``batch`` are in the whole batch's N
    plan: RankPlan  # as tuples of rollouts of ``batch``
    dummy: Batch | None  # the shortest rollout of the whole batch, for dummy micro-batches; None if the rank runs none
    rule: SplitRule
    number: int  # of this share among ``rule.ranks``
    whole_tokens: int  # T of the whole batch
    max_over_mean: float  # tokens of the fullest rank over the mean of all ranks

    def micro_batches(self) -> Iterator[tuple[SubBatch | None, bool]]:
        """Yield each micro-batch, with positions in the whole batch's N, and whether it has zero gradient; None for a dummy."""
        selector = None if self.batch is None else RolloutSelector(self.batch)
        for parts, zero_gradient in ((self.plan.trained, False), (self.plan.forward_only, True)):
            for part in parts:
                yield (self._select(selector, part) if selector is not None and part else None), zero_gradient

    def _select(self, selector: RolloutSelector, part: tuple[int, ...]) -> SubBatch:
        selected = selector.select(part)
        return SubBatch(selected.batch, self.index[selected.index])

    def require_dummy(self) -> Batch:
        """Return the input of a dummy micro-batch. Only for a rank that runs one."""
        assert self.dummy is not None, f"share {self.number} was divided by {self.rule}, which runs no dummies"
        return self.dummy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle all tensors as one piece of memory."""
        tensors: dict[str, Tensor] = {"index": self.index}
        parts = {name: _take_apart(part, name, tensors) for name, part in (("batch", self.batch), ("dummy", self.dummy))}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("index", *parts)}
        return _restore_share, (_flatten(tensors, protocol), parts, values)


_OfBatch = dict[str, Any]  # what a batch has besides tensors; of columns, their names
_COLUMNS = ("columns", "read_columns", "rollout_columns")  # fields of a batch that are tensors by name


def _take_apart(batch: Batch | None, name: str, tensors: dict[str, Tensor]) -> _OfBatch | None:
    """Move the tensors of a batch to ``tensors``, as name.field and name.field.column. Return the rest."""
    if batch is None:
        return None
    values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name not in _COLUMNS}
    tensors |= {f"{name}.{field}": value for field, value in values.items() if isinstance(value, Tensor)}
    for field in _COLUMNS:
        tensors |= {f"{name}.{field}.{column}": value for column, value in getattr(batch, field).items()}
    rest = {field: None if isinstance(value, Tensor) else value for field, value in values.items()}
    return {**rest, **{field: list(getattr(batch, field)) for field in _COLUMNS}}


def _restore_share(flat: _FlatTensors, parts: dict[str, _OfBatch | None], values: dict[str, Any]) -> BatchShare:
    tensors = flat.unflatten()
    restored: dict[str, Any] = {name: _put_together(part, name, tensors) for name, part in parts.items()}
    return BatchShare(**{"index": tensors["index"], **restored, **values})


def _put_together(rest: _OfBatch | None, name: str, tensors: dict[str, Tensor]) -> Batch | None:
    if rest is None:
        return None
    columns = {field: {column: tensors[f"{name}.{field}.{column}"] for column in rest[field]} for field in _COLUMNS}
    values: dict[str, Any] = {field: tensors.get(f"{name}.{field}", value) for field, value in rest.items()}
    return Batch(**{**values, **columns})


BatchT = TypeVar("BatchT", bound=Batch | BatchShare)


def without_read_columns(batch: BatchT) -> BatchT:
    """Return a batch without what the policy's engine recorded of the tokens that it read, for another network than the policy's."""
    if isinstance(batch, BatchShare):
        own, dummy = (None if part is None else without_read_columns(part) for part in (batch.batch, batch.dummy))
        return replace(batch, batch=own, dummy=dummy)
    return replace(batch, read_columns={})


def count_tokens(batch: Batch | BatchShare) -> int:
    """Return the number of tokens of a batch read by the networks of all ranks, T."""
    return batch.whole_tokens if isinstance(batch, BatchShare) else len(batch.tokens)


def require_whole(batch: Batch | BatchShare) -> Batch:
    """Return a batch that has not been divided. Raises TypeError for a share."""
    if isinstance(batch, BatchShare):
        raise TypeError(
            f"share {batch.number} of {batch.rule.ranks} of a batch arrived at a network on a single device, which reads whole batches; "
            "send it the batch"
        )
    return batch


@dataclass(frozen=True)
class _FlatTensors:
    """Tensors by name in one piece of memory, for pickling.

    Pickling a tensor takes a tenth of a millisecond and a kilobyte, whatever its size; a share of a batch has some twenty of them, and a
    thousand ranks a thousand shares.
    """

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # name, data type, shape
    memory: Any  # bytes, or an out-of-band pickle buffer

    def unflatten(self) -> dict[str, Tensor]:
        """Return the tensors, copied into writable memory."""
        memory = bytearray(memoryview(self.memory))
        tensors, start = {}, 0
        for name, dtype, shape in self.entries:
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(shape)
            start += _padded(count * dtype.itemsize)
        return tensors


def _flatten(tensors: Mapping[str, Tensor], protocol: int) -> _FlatTensors:
    """Copy CPU tensors into one piece of memory, for a pickle of ``protocol``."""
    flat = torch.empty(sum(_padded(tensor.nbytes) for tensor in tensors.values()), dtype=torch.uint8)
    start = 0
    for tensor in tensors.values():
        flat[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        start += _padded(tensor.nbytes)
    entries = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    memory: Any = flat.numpy()
    return _FlatTensors(entries, pickle.PickleBuffer(memory) if protocol >= 5 else memory.tobytes())


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def divide_batch(batch: Batch, rule: SplitRule, numbers: Sequence[int] | None = None) -> list[BatchShare]:
    """Return the shares ``numbers`` of a batch; None: of all ranks, in order. Takes a few passes over the batch."""
    partition = partition_batch(batch, rule.ranks, rule.token_budget, padded=rule.padded, whole_groups=rule.whole_groups)
    selector = RolloutSelector(batch)
    dummy = selector.select((partition.dummy_sequence,)).batch
    wanted = range(rule.ranks) if numbers is None else numbers
    return [_make_share(selector, partition, rule, number, dummy) for number in wanted]


def take_share(batch: Batch | BatchShare, rule: SplitRule, number: int) -> BatchShare:
    """Return the share ``number`` of a batch, or the given share itself. Raises ValueError for another rank's share, or one
    divided by another rule.
    """
    if not isinstance(batch, BatchShare):
        return divide_batch(batch, rule, (number,))[0]
    if (batch.rule, batch.number) != (rule, number):
        raise ValueError(
            f"this rank was sent share {batch.number} of a batch, divided by {batch.rule}, and reads share {number} by {rule}: get the "
            "ranks' requests (share_requests) again after every change of their sizes"
        )
    return batch


def _make_share(selector: RolloutSelector, partition: BatchPartition, rule: SplitRule, number: int, dummy: Batch) -> BatchShare:
    plan = partition.ranks[number]
    rollouts = sorted(rollout for part in (*plan.trained, *plan.forward_only) for rollout in part)
    selected = selector.select(rollouts) if rollouts else None
    runs_dummies = rule.fills_up or () in (*plan.trained, *plan.forward_only)
    return BatchShare(
        batch=None if selected is None else selected.batch,
        index=torch.zeros(0, dtype=torch.int64) if selected is None else selected.index,
        plan=_renumber(plan, rollouts),
        dummy=dummy if runs_dummies else None,
        rule=rule,
        number=number,
        whole_tokens=len(selector.batch.tokens),
        max_over_mean=partition.max_over_mean,
    )


def _renumber(plan: RankPlan, rollouts: Sequence[int]) -> RankPlan:
    new = {old: number for number, old in enumerate(rollouts)}
    kinds = (tuple(tuple(new[rollout] for rollout in part) for part in parts) for parts in (plan.trained, plan.forward_only))
    return RankPlan(*kinds)
