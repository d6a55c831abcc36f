"""Read back the weights that an SGLang model computes with, under canonical names.

SGLang fuses matrices (q, k and v into one, gate and up into one, the experts of a layer into two) and shards them over tensor-parallel
ranks. Tensors in a layout that is not known here are left out, and then covered by their arrival and the canary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.layers.conv import Conv2dLayer, Conv3dLayer
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

PLAIN_LAYERS = (nn.Conv2d, nn.Conv3d, nn.Embedding, Conv2dLayer, Conv3dLayer)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TOWER, TOWER_QKV = "visual.", "qkv"  # of models that read images
_BASE_LAYER_SUFFIX = ".base_layer"  # of the original layer inside SGLang's LoRA layers


@dataclass(frozen=True, eq=False)
class ModelShard:
    """This process's shard of one tensor."""

    name: str  # canonical
    tensor: Tensor  # [rows, columns], or [n]
    row: int = 0  # first row in the full tensor
    column: int = 0  # first column

    @property
    def region(self) -> tuple[int, int, int, int]:
        rows = self.tensor.shape[0] if self.tensor.dim() else 1
        return self.row, rows, self.column, self.tensor.numel() // max(rows, 1)


def read_model_shards(model: Any, rank: int) -> Iterator[ModelShard]:
    """Yield a shard of every tensor that can be read back. ``rank``: among the tensor-parallel ranks."""
    done: set[int] = set()
    for module_path, module in model.named_modules():
        path = module_path.removesuffix(_BASE_LAYER_SUFFIX)
        if isinstance(module, LinearBase):
            yield from _read_fused(path, module, rank, done)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _read_rows(path, module, done)
        elif isinstance(module, FusedMoE):
            yield from _read_experts(path, module, done)
        elif not list(module.children()):
            yield from _read_vectors(path, module, done)


def _read_vectors(path: str, module: nn.Module, done: set[int]) -> Iterator[ModelShard]:
    """Yield vectors such as norm weights, and a vision tower's plain layers: the same on every rank and named as in the checkpoint."""
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in done and (parameter.dim() == 1 or isinstance(module, PLAIN_LAYERS)):
            done.add(id(parameter))
            yield ModelShard(f"{path}.{name}", parameter.detach())


def _read_fused(path: str, module: Any, rank: int, done: set[int]) -> Iterator[ModelShard]:
    """Yield the parts of a linear layer's weight and bias. Quantized layers are left out."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return
    parent, _, leaf = path.rpartition(".")
    matrix = weight.detach()
    names = FUSED.get(leaf, (leaf,)) if isinstance(module, QKVParallelLinear | MergedColumnParallelLinear) else (leaf,)
    sizes, starts = fused_rows(module, rank)
    if len(names) != len(sizes) or sum(sizes) != matrix.shape[0]:
        return
    column = own_rank(module, rank) * matrix.shape[1] if isinstance(module, RowParallelLinear) else 0
    if path.startswith(TOWER) and len(names) == 3:  # one matrix in the checkpoint, with all rows of q before those of k and v
        names, starts = (TOWER_QKV,) * 3, [start + first for start, first in zip(starts, _part_starts(module), strict=True)]
    bias, first = getattr(module, "bias", None), 0
    for name, rows, start in zip(names, sizes, starts, strict=True):
        full = f"{parent}.{name}" if parent else name
        yield ModelShard(f"{full}.weight", matrix[first : first + rows], start, column)
        if isinstance(bias, Tensor):
            yield ModelShard(f"{full}.bias", bias.detach()[first : first + rows], start)
        first += rows
    done.update(id(parameter) for parameter in module.parameters(recurse=False))


def _part_starts(module: Any) -> list[int]:
    """Return the first row of q, k and v in the checkpoint's matrix of all three."""
    q, k = module.total_num_heads * module.head_size, module.total_num_kv_heads * module.head_size
    return [0, q, q + k]


def own_rank(module: Any, rank: int) -> int:
    """Return the rank among those that share a layer: 0 where each has all of it."""
    return getattr(module, "tp_rank", rank) if getattr(module, "tp_size", 1) > 1 else 0


def fused_rows(module: Any, rank: int) -> tuple[list[int], list[int]]:
    """Return (number of rows on this rank, first row in the full matrix) of each of the parts that a linear layer has in one."""
    rank, size = own_rank(module, rank), getattr(module, "tp_size", 1)
    if isinstance(module, QKVParallelLinear):
        return _qkv_rows(module, rank)
    if isinstance(module, MergedColumnParallelLinear):
        sizes = [each // size for each in module.output_sizes]
        return sizes, [rank * each for each in sizes]
    rows = module.weight.shape[0]
    return [rows], [rank * rows if isinstance(module, ColumnParallelLinear) else 0]


def _qkv_rows(module: Any, rank: int) -> tuple[list[int], list[int]]:
    """Return (number of rows of q, k and v, first row of each). With few key-value heads, several ranks hold the same keys and values."""
    q, k = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    v = module.num_kv_heads * getattr(module, "v_head_size", module.head_size)
    kv_rank = rank // getattr(module, "num_kv_head_replicas", 1)
    return [q, k, v], [rank * q, kv_rank * k, kv_rank * v]


def _read_rows(path: str, module: Any, done: set[int]) -> Iterator[ModelShard]:
    """Yield this rank's rows of the checkpoint's vocabulary. A head that is tied to the embedding is the same module."""
    if id(module.weight) in done or not module.weight.is_floating_point():
        return
    shard = module.shard_indices
    yield ModelShard(f"{path}.weight", module.weight.detach()[: shard.num_org_elements], shard.org_vocab_start_index)
    done.update(id(parameter) for parameter in module.parameters(recurse=False))


def _read_experts(path: str, module: Any, done: set[int]) -> Iterator[ModelShard]:
    """Yield gate, up and down matrices of the experts that this rank holds whole: with expert parallelism, or with one rank."""
    up, down = getattr(module, "w13_weight", None), getattr(module, "w2_weight", None)
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or up.dtype.itemsize < 2 or module.moe_tp_size != 1:
        return
    if up.dim() != 3 or up.shape[1] != 2 * down.shape[2] or up.shape[2] != down.shape[1]:
        return  # transposed or packed for a kernel
    width = down.shape[2]
    first = getattr(module, "moe_ep_rank", 0) * up.shape[0]
    for index in range(up.shape[0]):
        expert = f"{path}.{first + index}"
        yield ModelShard(f"{expert}.gate_proj.weight", up.detach()[index, :width])
        yield ModelShard(f"{expert}.up_proj.weight", up.detach()[index, width:])
        yield ModelShard(f"{expert}.down_proj.weight", down.detach()[index])
    done.update(id(parameter) for parameter in module.parameters(recurse=False))
