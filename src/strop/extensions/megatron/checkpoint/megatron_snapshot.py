"""Saving and loading the model and the optimizer of a Megatron Core learner, in any layout.

    weights/                config.json; see torch_dist.py
    weights/iter_0000000/   the weights, in the data type of the computation
    optimizer/              moments and float32 masters under Megatron Core's names; common.pt: steps, schedule, counters

Both are folders of ``megatron.core.dist_checkpointing``. They are written by the same code as the shards of the torch learner, which needs
no collective of the group that trains: a copy of the state can be written while training continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strop.extensions.megatron.checkpoint.optimizer_shards import MASTER, PREFIX, OptimizerStates, writes_replica
from strop.extensions.megatron.checkpoint.stage_shards import StageBlock, list_stage_tensors, read_stage_blocks
from strop.extensions.megatron.checkpoint.torch_dist import (
    ITERATION,
    LATEST,
    find_iteration,
    open_shards,
    read_common,
    write_common,
)
from strop.learner.parallel.shard_files import is_sharded, write_blocks
from strop.learner.parallel.sharded_checkpoint import gloo_group
from strop.models.adapters import adapter_folder

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
