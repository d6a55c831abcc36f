"""This rank's parts of the tensors of a model, as blocks of whole tensors with the names that they have in every layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strop.learner.parallel.shard_files import TensorReader, TensorShard

# Norms before a linear layer are parameters of it where Transformer Engine fuses the two, and checkpoints always have those names.
_FUSED_NORMS = {
    "input_layernorm.": ("self_attention.linear_qkv.", "layer_norm_"),
    "pre_mlp_layernorm.": ("mlp.linear_fc1.", "layer_norm_"),
}
_LOCAL_EXPERT = re.compile(r"\.local_experts\.[^.]+\.")


def saved_key(name: str, layer: Collection[str]) -> str:
    """Return the name that a checkpoint has for a parameter, or part of one, of a layer with the parameters ``layer``."""
    for norm, (linear, prefix) in _FUSED_NORMS.items():
        before, found, kind = name.partition(norm)
        if found and f"{before}{linear}weight" in layer:
            return f"{before}{linear}{prefix}{kind}"
    return _LOCAL_EXPERT.sub(".experts.", name)


def possible_keys(name: str) -> Collection[str]:
    """Return the names that a checkpoint may have for a parameter of a layer whose other parameters are not known."""
    norms = [f"{name.partition(norm)[0]}{linear}weight" for norm, (linear, _) in _FUSED_NORMS.items() if norm in name]
    return {saved_key(name, norms): None, saved_key(name, ()): None}.keys()


@dataclass(frozen=True, eq=False)
class StageTensor:
    """A parameter or buffer of this rank, and how Megatron Core says that it is cut."""

    tensor: Tensor
    sharding: Any  # a ShardedTensor or ShardedTensorFactory of megatron.core.dist_checkpointing

    @property
    def first_replica(self) -> bool:
        """Whether this is the first of the copies in one data-parallel group: others are on tensor ranks, or of a tied embedding."""
        return not any(self._replica[:-1])

    @property
    def data_rank(self) -> int:
        """The rank in the group of those that have this very part."""
        return int(self._replica[-1])

    @property
    def _replica(self) -> Sequence[int]:
        replica = self.sharding.replica_id
        return (replica,) if isinstance(replica, int) else replica

    def blocks(self, values: Tensor, prefix: str = "") -> list[StageBlock]:
        """Return the blocks of ``values``, which have the shape of the tensor: one, or one for each matrix that the tensor has."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

        key = f"{prefix}{self.sharding.key}"
        if isinstance(self.sharding, ShardedTensorFactory):
            built = replace(self.sharding, key=key, data=values).build()
            return [_make_block(each) for each in _flatten(built)]
        return [_make_block(replace(self.sharding, key=key, data=values, dtype=values.dtype))]


@dataclass(frozen=True, eq=False)
class StageBlock:
    """A block of a whole tensor."""

    name: str
    shard: TensorShard
    padded: bool  # its first dimension is padded to a multiple of the tensor ranks

    def fit(self, shape: tuple[int, ...]) -> StageBlock:
        """Return the part of this block that a stored tensor of ``shape`` has. What only pads this one becomes zero."""
        if not self.padded or shape == self.shard.shape or shape[1:] != self.shard.shape[1:]:
            return self
        offset, tensor = self.shard.offset, self.shard.tensor
        rows = min(max(shape[0] - offset[0], 0), tensor.shape[0])
        tensor[rows:].zero_()
        return replace(self, shard=TensorShard(tensor[:rows], offset, shape))


def list_stage_tensors(stages: Sequence[nn.Module], stored: TensorReader | None = None) -> list[StageTensor]:
    """Return the parameters and buffers of this rank's stages, in the order of the modules.

    Args:
        stored: The checkpoint to load. Its names say whether the layers were saved stacked, or each under its own name.
    """
    from megatron.core import parallel_state

    metadata: dict[str, Any] = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    tensors: list[StageTensor] = []
    for stage in map(unwrap, stages):
        by_name = any(".layers.0." in name for name in stored.shapes) if stored is not None else stage.architecture.layers_differ
        shardings = list(_flatten(_shard(stage, {**metadata, "non_homogeneous_layers": by_name})))
        keys = {each.key for each in shardings}
        for each in shardings:
            each.key = saved_key(each.key, keys)
        tensors += [StageTensor(each.data, each) for each in shardings]
    return tensors


def _shard(stage: Any, metadata: dict[str, Any]) -> Any:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    if stage.head == "scalar":  # LanguageModule's own expects an output layer
        return super(LanguageModule, stage).sharded_state_dict(metadata=metadata)
    return stage.sharded_state_dict(metadata=metadata)


def unwrap(stage: nn.Module) -> Any:
    """Return the model in Megatron Core's data-parallel and mixed-precision wrappers."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    inner: Any = stage
    while isinstance(inner, DistributedDataParallel | Float16Module):
        inner = inner.module
    return inner


def read_stage_blocks(reader: Any, blocks: Sequence[StageBlock], source: object) -> None:
    """Read blocks in place. Raises ValueError if the checkpoint lacks one or has another shape."""
    missing = sorted({block.name for block in blocks if block.name not in reader.shapes})
    if missing:
        raise ValueError(f"{source} does not fit the model: it lacks {', '.join(missing[:3])}")
    fitting = [block.fit(reader.shapes[block.name]) for block in blocks]
    other = next((block for block in fitting if block.shard.shape != reader.shapes[block.name]), None)
    if other is not None:
        raise ValueError(
            f"{source} has {other.name} of shape {reader.shapes[other.name]}, and this run's is {other.shard.shape}: it is of another model"
        )
    reader.read_blocks([(block.name, block.shard) for block in fitting])


def split_range(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the blocks (offset, shape) that elements ``begin`` to ``end`` of a contiguous tensor are, in their order.

    A distributed optimizer keeps such ranges, and a file of shards has blocks: rows, and parts of the first and the last one.
    """
    if begin >= end:
        return
    if len(shape) < 2:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    row = torch.Size(shape[1:]).numel()
    first, head = divmod(begin, row)
    last, tail = divmod(end, row)
    if first == last or head:
        stop = tail if first == last else row
        yield from (((first, *offset), (1, *size)) for offset, size in split_range(shape[1:], head, stop))
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if first <= last:
        yield from (((last, *offset), (1, *size)) for offset, size in split_range(shape[1:], 0, tail))


def _make_block(sharded: Any) -> StageBlock:
    """Return a ShardedTensor as a block. An axis that only the whole tensor has, such as that of layers, has length 1."""
    tensor = sharded.data.detach()
    tensor = tensor.view((1,) * sharded.prepend_axis_num + tuple(tensor.shape)) if sharded.prepend_axis_num else tensor
    shard = TensorShard(tensor, tuple(sharded.global_offset), tuple(sharded.global_shape))
    return StageBlock(sharded.key, shard, bool(sharded.allow_shape_mismatch))


def _flatten(values: Any) -> Iterator[Any]:
    """Yield the sharded tensors in nested mappings and lists. Objects of Transformer Engine, which have no tensors, are left out."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flatten(value)
    elif isinstance(values, ShardedTensor | ShardedTensorFactory):
        yield values
