"""Saving and loading the model and the optimizer of a Megatron Core learner, in any layout.

    weights/                config.json; see torch_dist.py
    weights/iter_0000000/   the weights, in the data type of the computation
    optimizer/              moments and float32 masters under Megatron Core's names; common.pt: steps, schedule, counters

Both are folders of ``megatron.core.dist_checkpointing``. They are written by the same code as the shards of the torch learner, which needs
no collective of the group that trains: a copy of the state can be written while training continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop.extensions.export.model_folder import save_model_config
from strop.extensions.megatron.checkpoint.stage_shards import (
    StageBlock,
    StageTensor,
    list_stage_tensors,
    read_stage_blocks,
    split_range,
)
from strop.extensions.megatron.checkpoint.torch_dist import (
    ITERATION,
    LATEST,
    find_iteration,
    open_shards,
    read_common,
    write_common,
)
from strop.extensions.megatron.megatron_network import MegatronNetwork
from strop.extensions.megatron.megatron_optimizer import set_schedule_step
from strop.extensions.megatron.stage_adapters import gather_adapters, load_adapter_folder
from strop.learner.parallel.shard_files import TensorShard, is_sharded, write_blocks
from strop.learner.parallel.sharded_checkpoint import gloo_group
from strop.learner.torch.optimizer import ScheduleUnit
from strop.models.adapters import adapter_folder

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


dist: Any = torch.distributed


@dataclass(frozen=True, eq=False)
class MegatronSnapshot:
    """This rank's part of a learner at one moment. If it was taken with copies, ``save`` may run during training."""

    weights: Sequence[StageBlock] | None  # None where ``save_config`` writes what is trained: adapters
    optimizer: Sequence[StageBlock] | None  # None where only the weights are saved
    common: Mapping[str, Any]  # what is not sharded
    save_config: Callable[[Path], object]  # writes the configuration of the Hugging Face model to a folder, or adapters
    process_group: Any

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """Write the snapshot under ``folder``. All ranks must call it; when it returns, the files of all ranks are flushed."""
        first = dist.get_rank() == 0
        if self.weights is not None:
            self._write(folder / "weights" / ITERATION, self.weights, {"iteration": 0, "checkpoint_version": 3.0})
        if first:
            if self.weights is not None:
                (folder / "weights" / LATEST).write_text("0")
            self.save_config(folder / "weights")
        if optimizer and self.optimizer is not None:
            self._write(folder / "optimizer", self.optimizer, self.common)
        dist.barrier(group=self.process_group)

    def _write(self, folder: Path, blocks: Sequence[StageBlock], common: Mapping[str, Any]) -> None:
        write_blocks(folder, [(block.name, block.shard) for block in blocks], self.process_group)
        if dist.get_rank() == 0:
            write_common(folder, common)


@torch.no_grad()
def take_megatron_snapshot(
    stages: Sequence[nn.Module],
    optimizer: Any | None,
    counters: Mapping[str, Any],
    save_config: Callable[[Path], object],
    *,
    copies: bool = True,
    weights: bool = True,
) -> MegatronSnapshot:
    """Take a snapshot of a learner whose layout is active; all ranks must call it.

    Args:
        stages: This rank's part of the model, in Megatron Core's wrappers or not.
        optimizer: What ``get_megatron_optimizer`` returned; None saves the weights only.
        counters: Numbers, text and tensors that are the same on all ranks, such as the state of the schedule.
        save_config: Writes the configuration of the Hugging Face model to a folder. Called on the first rank.
        copies: Copy everything to CPU memory, so that training may continue before it is written.
        weights: Whether shards of the weights are saved; otherwise ``save_config`` writes what is trained.
    """
    tensors = list_stage_tensors(stages)
    shards = [
        block
        for number, tensor in enumerate(tensors if weights else ())
        if tensor.first_replica and writes_replica(tensor, number)
        for block in tensor.blocks(tensor.tensor)
    ]
    blocks: list[StageBlock] | None = None
    common: dict[str, Any] = {}
    if optimizer is not None:
        states = OptimizerStates.of(optimizer)
        blocks = states.blocks(tensors)
        common = {
            "steps": _greatest(states.count_steps()),
            "grad_scaler": states.scalers[0].state_dict() if states.scalers else None,
            "counters": dict(counters),
        }
    if copies:
        shards, blocks = _copy(shards), None if blocks is None else _copy(blocks)
    return MegatronSnapshot(shards if weights else None, blocks, common, save_config, gloo_group(dist.group.WORLD))


@torch.no_grad()
def load_megatron_weights(stages: Sequence[nn.Module], folder: Path) -> None:
    """Load weights/ (or an iter_XXXXXXX folder) into this rank's stages. Raises FileNotFoundError, and ValueError if they do not fit."""
    found = find_iteration(folder)
    if found is None:
        raise FileNotFoundError(
            f"{folder} has no weights of Megatron Core: no iter_XXXXXXX folder with .metadata and metadata.json"
        )
    reader = open_shards(found)
    blocks = [block for tensor in list_stage_tensors(stages, reader) for block in tensor.blocks(tensor.tensor)]
    read_stage_blocks(reader, blocks, found)


@torch.no_grad()
def load_megatron_checkpoint(
    stages: Sequence[nn.Module], optimizer: Any, folder: Path, load_adapters: Callable[[Path], object] | None = None
) -> Mapping[str, Any]:
    """Load what any layout saved, in place. Returns the counters. ``load_adapters`` reads weights/ where adapters are trained.

    Raises FileNotFoundError without an optimizer state, and ValueError if the checkpoint does not fit.
    """
    if load_adapters is None:
        _check_origin(folder)
        load_megatron_weights(stages, folder / "weights")
    else:
        load_adapters(folder / "weights")
    if not is_sharded(folder / "optimizer"):
        raise FileNotFoundError(
            f"{folder / 'optimizer'} is missing: the checkpoint was saved with checkpointing.save_optimizer=false and cannot resume"
        )
    optimizer.reload_model_params()  # masters that the checkpoint does not have: it was saved in float32
    source = folder / "optimizer"
    reader, common = open_shards(source), read_common(source)
    states = OptimizerStates.of(optimizer)
    steps = int(common["steps"])
    tensors = list_stage_tensors(stages, reader)
    states.load(tensors, reader, steps, source)
    masters = (
        block
        for tensor in tensors
        if tensor.tensor.dtype == torch.float32
        for block in tensor.blocks(tensor.tensor, f"{PREFIX}{MASTER}.")
    )  # float32 weights of a run that was in lower precision
    read_stage_blocks(reader, [block for block in masters if block.name in reader.shapes], source)
    states.set_steps(steps)
    for scaler in states.scalers:
        if common["grad_scaler"] is not None:
            scaler.load_state_dict(dict(common["grad_scaler"]))
    counters: Mapping[str, Any] = common["counters"]
    return counters


def _check_origin(folder: Path) -> None:
    """Raise an error that says what to do with adapters, or a checkpoint of the torch learner."""
    if adapter_folder(str(folder / "weights")) is not None:
        raise ValueError(
            f"{folder / 'weights'} has adapters, and this run trains the full model; set megatron_cfg.peft as it was when they were "
            "saved, or start with another checkpointing.checkpoint_dir"
        )
    if find_iteration(folder / "weights") is None and (folder / "weights").is_dir():
        raise ValueError(
            f"{folder} was saved by the torch learner, whose optimizer keeps its state under other names than Megatron Core's: begin a "
            f"run from its weights (`strop export`, then policy.model_name), or continue with policy.backend=torch"
        )


def _copy(blocks: Sequence[StageBlock]) -> list[StageBlock]:
    """Return blocks with copies of their tensors in CPU memory."""
    return [replace(block, shard=block.shard.with_tensor(block.shard.tensor.detach().to("cpu", copy=True))) for block in blocks]


def _greatest(value: int) -> int:
    """Return the greatest value of all ranks: with a distributed optimizer, some may have no parameter that counts the steps."""
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value, group=gloo_group(dist.group.WORLD))
    return max(values)


class SavedLearner(Protocol):
    """What is saved of a learner."""

    network: MegatronNetwork
    optimizer: Any
    scheduler: Any
    schedule_unit: ScheduleUnit


def snapshot_learner(learner: SavedLearner, *, optimizer: bool = True, copies: bool = True) -> MegatronSnapshot:
    """Take a snapshot; all ranks must call it. With ``copies``, which are in CPU memory, training may continue immediately."""
    network = learner.network
    network.gather_weights()
    stage, adapters = network.stages[0], network.adapters
    save_config: Callable[[Path], object]
    if adapters is None:
        save_config = partial(save_model_config, network.hf_config, next(stage.parameters()).dtype, scores=stage.head == "scalar")
    else:
        with network.layout.activate():
            save_config = gather_adapters(adapters, copies=copies).write
    schedule = {"steps": int(learner.scheduler.num_steps), "unit": learner.schedule_unit.state_dict()}
    with network.layout.activate():
        return take_megatron_snapshot(
            network.stages,
            learner.optimizer if optimizer else None,
            {"schedule": schedule},
            save_config,
            copies=copies,
            weights=adapters is None,
        )


def load_learner(learner: SavedLearner, folder: Path) -> None:
    """Restore what a learner with any layout saved, in place. The schedule is the configured one, at the step of the saved one.

    Raises FileNotFoundError without an optimizer state, and ValueError if the checkpoint does not fit.
    """
    network = learner.network
    network.gather_weights()
    with network.layout.activate():
        adapters = None if network.adapters is None else partial(load_adapter_folder, network.adapters)
        schedule = load_megatron_checkpoint(network.stages, learner.optimizer, folder, adapters)["schedule"]
        set_schedule_step(learner.scheduler, learner.schedule_unit.convert(schedule["steps"], schedule["unit"]))
