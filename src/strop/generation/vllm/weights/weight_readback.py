"""Read back the weights that a vLLM model computes with, under canonical names.

vLLM fuses matrices (q, k and v into one), shards them over tensor-parallel ranks, and on a CPU packs them into a kernel's layout and frees
the original. Packed weights are read through the kernel itself: a product with the identity returns every weight exactly, since all other
terms of each sum are zero. So verification covers the weights used in sampling rather than a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.conv import ConvLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from strop.generation.vllm.weights.engine_names import canonical_name, tower_name
from strop.generation.vllm.weights.expert_readback import read_experts
from strop.models.quantization.number_format import FP8_BLOCK, QuantizedTensor

_IDENTITY_ROWS = 1024  # rows of the identity per product, to limit memory
_BASE_LAYER_SUFFIX = ".base_layer"  # name of the original layer inside vLLM's LoRA layers


@dataclass(frozen=True, eq=False)
class WeightShard:
    """This process's shard of one tensor."""

    name: str  # canonical
    tensor: Tensor  # [rows, columns], or [n]
    row: int = 0  # first row in the full tensor
    column: int = 0  # first column
    part: tuple[int, int] | None = None  # of an expert: its rows in this shard, the rest being zeros (first, number)

    @property
    def region(self) -> tuple[int, int, int, int]:
        if self.part is not None:
            return self.row, 1, *self.part
        rows = self.tensor.shape[0] if self.tensor.dim() else 1
        return self.row, rows, self.column, self.tensor.numel() // max(rows, 1)


def read_weight_shards(model: Any, rank: int) -> Iterator[WeightShard]:
    """Yield a shard of every tensor of this pipeline stage that can be read back. Quantized tensors and unknown layer types are
    left out.

    Experts are yielded one by one. ``rank``: among the tensor-parallel ranks of the stage.
    """
    for shard in _read_modules(model, rank):
        yield replace(shard, name=canonical_name(model, shard.name))


def _read_modules(model: Any, rank: int) -> Iterator[WeightShard]:
    packed = getattr(model, "packed_modules_mapping", {})
    done: set[int] = set()
    for module_path, module in model.named_modules():
        path = module_path.removesuffix(_BASE_LAYER_SUFFIX)
        if isinstance(module, LinearBase):
            yield from _read_linear(path, module, packed, rank, done)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _read_embedding(path, module, done)
        elif isinstance(module, RoutedExperts):
            for each in read_experts(module):
                yield WeightShard(f"{path}.{each.name}", each.values[None], row=each.expert, part=each.part)
        elif not list(module.children()):
            yield from _read_plain(path, module, done)
        elif isinstance(sinks := getattr(module, "sinks", None), nn.Parameter):  # one per attention head
            yield WeightShard(f"{path}.sinks", sinks.detach(), rank * len(sinks))


def map_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return {vLLM's name of a tensor: its name in ``names``} where they differ, as in models that read images."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    mapped = ((mapper.map_name(tower_name(model, name)), name) for name in names)
    return {own: name for own, name in mapped if own is not None and own != name}


def _read_plain(path: str, module: nn.Module, done: set[int]) -> Iterator[WeightShard]:
    """Yield tensors that are replicated on every rank and named as in the checkpoint: vectors such as norm weights and a router's
    bias, and a tower's embeddings.
    """
    whole = isinstance(module, (nn.Embedding, ConvLayerBase))
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in done and (parameter.dim() == 1 or whole):
            done.add(id(parameter))
            yield WeightShard(f"{path}.{name}", parameter.detach())


def _read_linear(path: str, module: Any, packed: dict[str, list[str]], rank: int, done: set[int]) -> Iterator[WeightShard]:
    matrix = _read_matrix(module)
    if matrix is None:
        return
    parent, _, leaf = path.rpartition(".")
    bias = getattr(module, "bias", None)
    if isinstance(module, QKVParallelLinear) and packed.get(leaf) == [leaf]:  # a tower's, stored as one matrix
        if module.tp_size > 1:  # the rows of a rank are not contiguous
            return
        names, sizes, starts = [leaf], [matrix.shape[0]], [0]
    elif isinstance(module, QKVParallelLinear):
        names, sizes, starts = packed[leaf], *_qkv_rows(module, rank)
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        names, starts = packed.get(leaf, [leaf]), [rank * size if module.tp_size > 1 else 0 for size in sizes]
    elif isinstance(module, ColumnParallelLinear):
        names, sizes, starts = [leaf], [matrix.shape[0]], [rank * matrix.shape[0] if module.tp_size > 1 else 0]
    else:
        names, sizes, starts = [leaf], [matrix.shape[0]], [0]
    if len(names) != len(sizes):
        return
    column = rank * matrix.shape[1] if isinstance(module, RowParallelLinear) and module.tp_size > 1 else 0
    first = 0
    for name, size, start in zip(names, sizes, starts, strict=True):
        full = f"{parent}.{name}" if parent else name
        yield WeightShard(f"{full}.weight", matrix[first : first + size], start, column)
        if isinstance(bias, Tensor):
            yield WeightShard(f"{full}.bias", bias.detach()[first : first + size].to(matrix.dtype), start)
        first += size
    done.update(id(parameter) for parameter in (module.weight, bias) if isinstance(parameter, nn.Parameter))
    yield from _read_plain(path, module, done)


def _read_matrix(module: Any) -> Tensor | None:
    """Return the weight used by a linear layer, [out, in]; None if its storage format is unknown."""
    if isinstance(module.quant_method, UnquantizedLinearMethod):
        return _dense_weight(module)
    weight, scales = module.weight.detach(), getattr(module, "weight_scale_inv", None)
    blocks = [-(-size // 128) for size in weight.shape]
    if weight.dtype != torch.float8_e4m3fn or scales is None or scales.dtype != torch.float32 or list(scales.shape) != blocks:
        return None
    if list(weight.shape) != [module.output_size_per_partition, module.input_size_per_partition]:
        return None
    stored = QuantizedTensor(FP8_BLOCK, weight, scales.detach(), torch.ones((), device=weight.device))
    return stored.dequantize(module.orig_dtype)


def _qkv_rows(module: Any, rank: int) -> tuple[list[int], list[int]]:
    """Return (number of rows of q, k and v, first row of each). With few key-value heads, several ranks hold the same keys and values."""
    q = module.num_heads * module.head_size
    k = module.num_kv_heads * module.head_size
    v = module.num_kv_heads * getattr(module, "v_head_size", module.head_size)
    kv_rank = rank // getattr(module, "num_kv_head_replicas", 1)
    return [q, k, v], [rank * q, kv_rank * k, kv_rank * v]


def _read_embedding(path: str, module: Any, done: set[int]) -> Iterator[WeightShard]:
    """Yield this rank's rows of the checkpoint's vocabulary. A head tied to the embedding is read separately, under its own name."""
    if not isinstance(module.quant_method, UnquantizedEmbeddingMethod):
        return
    shard = module.shard_indices
    rows = shard.num_org_elements
    is_head = type(module) is not VocabParallelEmbedding
    matrix = _dense_weight(module) if is_head else module.weight.detach()
    yield WeightShard(f"{path}.weight", matrix[:rows], shard.org_vocab_start_index)
    done.update(id(parameter) for parameter in module.parameters(recurse=False))


def read_adapter_shards(model: Any, manager: Any, adapter: int) -> Iterator[WeightShard]:
    """Yield this process's shards of A and B (B multiplied by the scale) for every layer changed by ``adapter``.

    They are read from the buffers that the LoRA kernels use and named by the layer's canonical name and ``.A`` or ``.B``. Yields nothing if
    the adapter is not loaded.
    """
    if adapter not in manager.list_adapters():
        return
    packed = getattr(model, "packed_modules_mapping", {})
    slot = manager.lora_index_to_id.index(adapter)
    for path, adapter_layer in manager.get_adapter(adapter).loras.items():
        layer = manager.modules.get(path)
        if layer is None:  # on another pipeline stage
            continue
        parent, _, leaf = path.rpartition(".")
        parts = adapter_layer.lora_a if isinstance(adapter_layer.lora_a, list) else [adapter_layer.lora_a]
        names = packed.get(leaf, [leaf]) if len(parts) > 1 else [leaf]
        column = layer.tp_rank * layer.input_size if isinstance(layer.base_layer, RowParallelLinear) else 0
        for index, (name, part, row) in enumerate(zip(names, parts, _lora_b_rows(layer), strict=True)):
            if part is None:
                continue
            full, rank = f"{parent}.{name}", len(part)
            yield WeightShard(f"{full}.A", layer.lora_a_stacked[index][slot, 0, :rank], column=column)
            yield WeightShard(f"{full}.B", layer.lora_b_stacked[index][slot, 0, :, :rank], row=row)


def _lora_b_rows(layer: Any) -> list[int]:
    """Return the first row of this process's shard of each B in a layer with adapters."""
    if not isinstance(layer.base_layer, ColumnParallelLinear):
        return [0]
    owners = getattr(layer, "output_ids", (layer.tp_rank,))
    return [owner * size for owner, size in zip(owners, layer.output_slices, strict=True)]


def _dense_weight(module: Any) -> Tensor:
    """Return the weight used by the layer's kernel, [out, in]."""
    kernel = getattr(module, "cpu_linear", None)
    if kernel is None:
        return module.weight.detach()  # type: ignore[no-any-return]
    is_embedding = isinstance(module, VocabParallelEmbedding)
    width = module.embedding_dim if is_embedding else getattr(module, "input_size_per_partition", module.input_size)
    dtype = module.weight.dtype
    parts = []
    for first in range(0, width, _IDENTITY_ROWS):
        rows = min(_IDENTITY_ROWS, width - first)
        identity = torch.zeros(rows, width, dtype=dtype)
        identity[torch.arange(rows), torch.arange(first, first + rows)] = 1
        parts.append(kernel(identity, module.weight, None))
    return torch.cat(parts).t().contiguous()


def refresh_packed_copies(model: Any) -> None:
    """Repack heads that vLLM does not: after a reload, a head tied to the embedding keeps a packed copy of the old weights."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
