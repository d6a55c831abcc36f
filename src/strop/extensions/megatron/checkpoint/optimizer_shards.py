"""The state of Megatron Core's optimizers as blocks of whole tensors, the same whichever rank keeps them.

    optimizer.state.exp_avg.NAME       moments of the parameter NAME (exp_avg, exp_avg_sq, momentum_buffer), float32
    optimizer.state.fp32_param.NAME    float32 master of a parameter in lower precision

Megatron Core can save its optimizers itself. What it writes depends on how many optimizers there are (a mixture has two, unless its experts
are on all ranks) and whether they are distributed, and it gathers whole buffers. Here each rank writes the ranges that it has, as blocks,
so that any layout reads what any other saved, without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop.extensions.megatron.checkpoint.stage_shards import StageBlock, StageTensor, read_stage_blocks, split_range
from strop.learner.parallel.shard_files import TensorShard

MASTER = "fp32_param"
PREFIX = "optimizer.state."
TORCH_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass(frozen=True, eq=False)
class ParameterState:
    """What an optimizer of this rank has of a parameter: all of it, or a range of its elements if it is distributed."""

    optimizer: Any  # a torch.optim.Optimizer, or a fused one with its interface
    owner: Tensor  # what the optimizer steps: the parameter, its master or a range of either
    master: bool  # whether the owner is a float32 copy
    elements: tuple[int, int] | None  # range in the flattened parameter of this rank; None is all of it

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by their keys."""
        state: Mapping[str, Any] = self.optimizer.state.get(self.owner, {})
        moments = {
            key: value
            for key, value in state.items()
            if key != "step" and isinstance(value, Tensor) and value.shape == self.owner.shape
        }
        return {**moments, **({MASTER: self.owner.detach()} if self.master else {})}


@dataclass(frozen=True, eq=False)
class OptimizerStates:
    """The states of all optimizers of this rank by parameter, and their counts of steps."""

    by_parameter: Mapping[int, ParameterState]  # by id
    optimizers: Sequence[Any]
    scalers: Sequence[Any] = field(default_factory=list)

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerStates:
        """Find the states in what ``get_megatron_optimizer`` returned. Raises ValueError for an optimizer that cannot be saved."""
        states: dict[int, ParameterState] = {}
        inner = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        for each in inner:
            if any(getattr(each.config, name, False) for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload")):
                raise ValueError(
                    "Megatron's precision-aware and offloaded optimizers keep states that cannot be saved in parts: set "
                    "megatron_cfg.optimizer.use_precision_aware_optimizer=false and optimizer_cpu_offload=false, or "
                    "checkpointing.save_optimizer=false"
                )
            for parameter, state in _list_states(each):
                states[id(parameter)] = state
        scalers = [each.grad_scaler for each in inner if getattr(each, "grad_scaler", None) is not None]
        return cls(states, [each.optimizer for each in inner if each.optimizer is not None], scalers)

    def blocks(self, tensors: Sequence[StageTensor]) -> list[StageBlock]:
        """Return the blocks that this rank saves. Each part is saved by one of the ranks that have it, in turn."""
        return [
            block
            for number, (tensor, state) in enumerate(self._of_stages(tensors))
            if tensor.first_replica and (state.elements is not None or writes_replica(tensor, number))
            for key, values in state.tensors().items()
            for block in cut_blocks(tensor, state.elements, values, f"{PREFIX}{key}.")
        ]

    def load(self, tensors: Sequence[StageTensor], reader: Any, steps: int, source: object) -> None:
        """Restore the states in place, which a fresh optimizer does not have yet. Raises ValueError if the checkpoint does not fit."""
        keys = _stored_keys(reader)
        blocks: list[StageBlock] = []
        for tensor, state in self._of_stages(tensors):
            values = _make_state(state, keys - {MASTER}, steps)
            if state.master and MASTER in keys:
                values[MASTER] = state.owner.detach()
            for key, value in values.items():
                blocks += cut_blocks(tensor, state.elements, value, f"{PREFIX}{key}.")
        read_stage_blocks(reader, blocks, source)

    def count_steps(self) -> int:
        """Return how many steps the optimizers have made."""
        counts = [
            int(values["step"]) for optimizer in self.optimizers for values in optimizer.state.values() if "step" in values
        ]  # torch's optimizers count for each parameter, fused ones for each group
        counts += [int(group["step"]) for optimizer in self.optimizers for group in optimizer.param_groups if "step" in group]
        return max(counts, default=0)

    def set_steps(self, steps: int) -> None:
        """Set the count of fused optimizers, which have one for each group."""
        for optimizer in self.optimizers:
            if not isinstance(optimizer, TORCH_OPTIMIZERS):
                for group in optimizer.param_groups:
                    group["step"] = steps

    def _of_stages(self, tensors: Sequence[StageTensor]) -> Iterator[tuple[StageTensor, ParameterState]]:
        for tensor in tensors:
            state = self.by_parameter.get(id(tensor.tensor))
            if state is not None:
                yield tensor, state


def writes_replica(tensor: StageTensor, number: int) -> bool:
    """Whether this rank writes a part that all ranks of its data-parallel group have. They take turns."""
    from megatron.core import parallel_state

    if getattr(tensor.tensor, "allreduce", True):
        size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    else:
        size = parallel_state.get_expert_data_parallel_world_size()
    return bool(number % size == tensor.data_rank)


def cut_blocks(tensor: StageTensor, elements: tuple[int, int] | None, values: Tensor, prefix: str) -> list[StageBlock]:
    """Return blocks that share the memory of ``values``: all of a parameter of this rank, or a flat range of its elements."""
    if elements is None:
        return tensor.blocks(values, prefix)
    begin, end = elements
    whole = torch.empty(tensor.tensor.shape, dtype=values.dtype, device="meta")
    blocks: list[StageBlock] = []
    for block in tensor.blocks(whole, prefix):
        shard = block.shard
        if not shard.tensor.is_contiguous():
            raise ValueError(
                f"Megatron Core cuts {block.name} into parts that are not contiguous, and a distributed optimizer has ranges of it: set "
                "megatron_cfg.distributed_data_parallel_config.use_distributed_optimizer=false, or checkpointing.save_optimizer=false"
            )
        start = int(shard.tensor.storage_offset())
        first, last = max(begin, start), min(end, start + shard.tensor.numel())
        position = first - begin
        for offset, size in split_range(tuple(shard.tensor.shape), first - start, last - start):
            count = torch.Size(size).numel()
            part = values[position : position + count].view(size)
            position += count
            place = tuple(a + b for a, b in zip(shard.offset, offset, strict=True))
            blocks.append(StageBlock(block.name, TensorShard(part, place, shard.shape), block.padded))
    return blocks


def _list_states(inner: Any) -> Iterator[tuple[Tensor, ParameterState]]:
    """Yield the parameters of one of Megatron Core's optimizers with their states."""
    if hasattr(inner, "model_param_group_index_map"):  # distributed: ranges of parameters
        for parameter, (group, order) in inner.model_param_group_index_map.items():
            elements = inner._get_model_param_range_map(parameter)["param"]
            owner = inner.optimizer.param_groups[group]["params"][order]
            yield parameter, ParameterState(inner.optimizer, owner, _is_lower(parameter), (elements.start, elements.end))
    elif hasattr(inner, "float16_groups"):
        for models, masters in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True):
            for parameter, owner in zip(models, masters, strict=True):
                yield parameter, ParameterState(inner.optimizer, owner, True, None)
        for group in inner.fp32_from_fp32_groups:
            for parameter in group:
                yield parameter, ParameterState(inner.optimizer, parameter, False, None)
    else:
        for group in inner.optimizer.param_groups if inner.optimizer is not None else ():
            for parameter in group["params"]:
                yield parameter, ParameterState(inner.optimizer, parameter, False, None)


def _is_lower(parameter: Tensor) -> bool:
    return parameter.dtype not in (torch.float32, torch.float64)


def _stored_keys(reader: Any) -> set[str]:
    return {name.removeprefix(PREFIX).split(".", 1)[0] for name in reader.shapes if name.startswith(PREFIX)}


def _make_state(state: ParameterState, keys: set[str], steps: int) -> dict[str, Tensor]:
    """Make the state of a parameter that has none yet, to be read into. Returns its tensors by key."""
    existing: Mapping[str, Any] = state.optimizer.state.get(state.owner, {})
    tensors = {
        key: existing[key] if isinstance(existing.get(key), Tensor) else torch.zeros_like(state.owner, requires_grad=False)
        for key in sorted(keys)
    }
    if not tensors:
        state.optimizer.state.pop(state.owner, None)  # saved before its first step
        return {}
    counter: dict[str, Any] = {}
    if isinstance(state.optimizer, torch.optim.Adam | torch.optim.AdamW):
        counter["step"] = torch.tensor(float(steps))  # one for each parameter: torch counts each of them up
    state.optimizer.state[state.owner] = {**counter, **tensors}
    return dict(tensors)
