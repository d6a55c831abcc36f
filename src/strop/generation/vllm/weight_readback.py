"""Read back the weights that a vLLM model computes with, under canonical names.

vLLM fuses matrices (q, k and v into one), shards them over tensor-parallel ranks, and on a CPU packs them into a kernel's layout
and frees the original. Packed weights are read through the kernel itself: a product with the identity returns every weight
exactly, since all other terms of each sum are zero. So verification covers the weights used in sampling rather than a copy.

Routed experts are read one at a time. vLLM keeps those of a layer in two tensors, ``w13`` (gate and up) and ``w2`` (down), for
the experts of this process (expert parallelism) and its part of each (tensor parallelism). A CPU kernel stores them in its own
padded order. That order is found by packing indices instead of weights with the same function and shapes, so each index shows
where its weight went. Unknown kernel layouts are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
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

from strop.generation.vllm.engine_weights import canonical_name
from strop.models.quantization.number_format import FP8_BLOCK, QuantizedTensor

_DIGIT = 256  # indices are packed in digits to this base, which every floating-point type holds exactly


@dataclass(frozen=True, eq=False)
class ExpertShard:
    """The part of one expert on this process."""

    name: str  # of the tensor with all experts of its layer
    expert: int  # its row in that tensor
    values: Tensor  # as in the tensor, with zeros for parts on other processes
    part: tuple[int, int]  # the first row of gate, up or down on this process, and their number


def read_experts(layer: Any) -> Iterator[ExpertShard]:
    """Yield each expert of a layer of routed experts, for each of its tensors; nothing for an unknown layout."""
    unpack = _find_layout(layer)
    if unpack is None:
        return
    part = _ExpertPart.of(layer)
    readers: list[tuple[str, Callable[[int], Tensor]]] = [
        ("gate_up_proj", lambda slot: part.place_gate_up(unpack(layer.w13_weight[slot]))),
        ("down_proj", lambda slot: part.place_down(unpack(layer.w2_weight[slot]))),
    ]
    if layer.moe_config.has_bias:
        readers.append(("gate_up_proj_bias", lambda slot: part.place_gate_up(layer.w13_bias[slot])))
        if part.rank == 0:  # the other ranks hold zeros, and each adds its own
            readers.append(("down_proj_bias", lambda slot: layer.w2_bias[slot, : part.hidden]))
    for name, read in readers:
        for slot, expert in enumerate(_global_experts(layer)):
            yield ExpertShard(name, expert, read(slot), (part.first, part.size))


def _global_experts(layer: Any) -> list[int]:
    """Return the model's expert in each slot of this process."""
    mapping = layer.expert_map_manager.expert_map
    if mapping is None:
        return list(range(layer.local_num_experts))
    slots = {int(slot): expert for expert, slot in enumerate(mapping.tolist()) if slot >= 0}
    return [slots[slot] for slot in range(len(slots))]


@dataclass(frozen=True)
class _ExpertPart:
    """The rows of an expert's gate and up matrices, and columns of its down matrix, computed by this process."""

    first: int
    size: int  # without padding
    full: int  # of all processes together
    hidden: int
    interleaved: bool  # rows of gate and up alternate, and the canonical matrices are transposed: gpt-oss
    rank: int

    @classmethod
    def of(cls, layer: Any) -> _ExpertPart:
        config = layer.moe_config
        parallel = config.moe_parallel_config
        full = config.intermediate_size
        most = -(-full // parallel.tp_size)
        first = min(parallel.tp_rank * most, full)
        interleaved = config.activation.value == "swigluoai"
        return cls(first, min(most, full - first), full, config.hidden_dim_unpadded, interleaved, parallel.tp_rank)

    def place_gate_up(self, held: Tensor) -> Tensor:
        """Place [2 x padded size, ...] among zeros in [2 x full, ...], or its transpose."""
        placed = held.new_zeros(2 * self.full, *held.shape[1:])
        if self.interleaved:
            placed[2 * self.first : 2 * (self.first + self.size)] = held[: 2 * self.size]
        else:
            half = len(held) // 2
            for start, offset in ((0, 0), (half, self.full)):
                placed[offset + self.first : offset + self.first + self.size] = held[start : start + self.size]
        if placed.dim() == 1:
            return placed
        placed = placed[:, : self.hidden]
        return placed.t() if self.interleaved else placed

    def place_down(self, held: Tensor) -> Tensor:
        """Place [hidden, padded size] among zeros in [hidden, full], or its transpose."""
        placed = held.new_zeros(self.hidden, self.full)
        placed[:, self.first : self.first + self.size] = held[: self.hidden, : self.size]
        return placed.t() if self.interleaved else placed


class _PackedLayout:
    """Experts in the order of a CPU kernel."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def __call__(self, packed: Tensor) -> Tensor:
        """Return an expert's matrix in its natural order, still padded."""
        natural = torch.empty_like(packed).flatten()
        natural[_packing_order(self.isa, tuple(packed.shape), packed.dtype)] = packed.flatten()
        return natural.view(packed.shape)


@lru_cache(maxsize=4)
def _packing_order(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return find_packing_order(shape, dtype, lambda weight: cpu_prepack_moe_weight(weight, isa))


def find_packing_order(shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Return, for each element of ``pack(weight)``, its index in ``weight``, [rows x columns], for a function that only moves
    elements.

    ``pack`` is given [1, rows, columns]. Raises RuntimeError if it does more than move elements.
    """
    count = torch.Size(shape).numel()
    index, order, scale = torch.arange(count), torch.zeros(count, dtype=torch.long), 1
    while scale < count:
        digits = (index // scale % _DIGIT).to(dtype).reshape(1, *shape)
        order += pack(digits).flatten().long() * scale
        scale *= _DIGIT
    if not torch.equal(order.sort().values, index):
        raise RuntimeError(
            "the kernel of the experts does not store each weight exactly once, so experts cannot be read back from its layout"
        )
    return order


def _find_layout(layer: Any) -> Callable[[Tensor], Tensor] | None:
    """Return a function that unpacks an expert of a layer; None for quantised experts and unknown layouts."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = layer.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod) or not method.moe.is_act_and_mul or method.moe_kernel is None:
        return None
    if method.unquantized_backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
        return torch.Tensor.detach
    if method.unquantized_backend is not UnquantizedMoeBackend.CPU:
        return None
    experts = method.moe_kernel.fused_experts
    return None if experts._use_zentorch else _PackedLayout(experts.isa)


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
        if isinstance(
            used := getattr(module, "conv_weights", None), Tensor
        ):  # which Mamba's layers read, not the convolution's own
            parts = _row_parts(module.conv1d, len(used), rank)
            yield from _split_rows(f"{path}.conv1d.weight", used[:, None], parts)
            done.add(id(module.conv1d.weight))
        if isinstance(module, LinearBase):
            yield from _read_linear(path, module, packed, rank, done)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _read_embedding(path, module, done)
        elif isinstance(module, RoutedExperts):
            for each in read_experts(module):
                yield WeightShard(f"{path}.{each.name}", each.values[None], row=each.expert, part=each.part)
        elif not list(module.children()):
            yield from _read_plain(path, module, done)
        else:  # numbers of heads, such as attention sinks
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 1 and (name == "sinks" or "tp_size" in vars(module)):
                    yield WeightShard(f"{path}.{name}", parameter.detach(), rank * len(parameter))


def recover_log(shard: WeightShard, log: Tensor | None) -> WeightShard:
    """Replace A = -exp(A_log), with which Mamba's layers compute, by A_log as it arrived, if A is what vLLM makes of it."""
    if log is None:
        return shard
    own = log[shard.row : shard.row + len(shard.tensor)]
    return replace(shard, tensor=own) if torch.equal(-torch.exp(own.float()), shard.tensor) else shard


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
        parts = {leaf: [(matrix.shape[0], 0)]}
    elif isinstance(module, QKVParallelLinear):
        parts = {name: [part] for name, part in zip(packed[leaf], _qkv_rows(module, rank), strict=True)}
    elif isinstance(module, MergedColumnParallelLinear):
        names, sizes = packed.get(leaf, [leaf]), module.output_sizes
        joined = len(sizes) - len(names) + 1  # of the first name, if files have several matrices of the module in one
        if joined < 1:
            return
        parts = {names[0]: _divide(sizes[:joined], module.tp_size, rank)}
        parts |= {name: _divide([size], module.tp_size, rank) for name, size in zip(names[1:], sizes[joined:], strict=True)}
    else:
        parts = {leaf: _row_parts(module, matrix.shape[0], rank)}
    column = rank * matrix.shape[1] if isinstance(module, RowParallelLinear) and module.tp_size > 1 else 0
    first = 0
    for name, rows in parts.items():
        full, last = f"{parent}.{name}" if parent else name, first + sum(size for size, _ in rows)
        if id(module.weight) not in done:
            yield from _split_rows(f"{full}.weight", matrix[first:last], rows, column)
        if isinstance(bias, Tensor):
            yield from _split_rows(f"{full}.bias", bias.detach()[first:last].to(matrix.dtype), rows)
        first = last
    done.update(id(parameter) for parameter in (module.weight, bias) if isinstance(parameter, nn.Parameter))
    yield from _read_plain(path, module, done)


def _split_rows(name: str, tensor: Tensor, parts: list[tuple[int, int]], column: int = 0) -> Iterator[WeightShard]:
    """Yield the parts of a tensor, given as (number of rows, first row in the full tensor)."""
    for part, (_, start) in zip(tensor.split([size for size, _ in parts]), parts, strict=True):
        yield WeightShard(name, part, start, column)


def _divide(sizes: list[int], ranks: int, rank: int) -> list[tuple[int, int]]:
    """Return the rows of a rank of matrices that are concatenated in one tensor, each of them divided over the ranks."""
    own = rank if ranks > 1 else 0
    return [(size // ranks, sum(sizes[:index]) + own * (size // ranks)) for index, size in enumerate(sizes)]


def _row_parts(module: Any, rows: int, rank: int) -> list[tuple[int, int]]:
    """Return the rows of a rank of a layer's weight: (number, first row in the full weight) of each contiguous part."""
    if isinstance(module, MergedColumnParallelLinear):
        return _divide(module.output_sizes, module.tp_size, rank)
    if not isinstance(module, ColumnParallelLinear) or module.tp_size == 1:
        return [(rows, 0)]
    spec = _loader_of(module, "weight").get("shard_spec")
    if spec is None:
        return [(rows, rank * rows)]
    parts, start = [], 0  # of recurrent layers: queries, keys and values, or groups that several ranks hold
    for full, extra, shared in spec:
        size = full // module.tp_size
        parts.append((size, start + (0 if shared else rank * size)))
        start += full - extra
    return parts


def _loader_of(module: Any, name: str) -> Mapping[str, Any]:
    """Return what vLLM's loader of a parameter was made with. A kernel may have removed the parameter itself."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameter = get_layerwise_info(module).restore_metadata[0].get(name, getattr(module, name))
    loader = inspect.unwrap(getattr(parameter, "weight_loader", _loader_of))
    return inspect.getclosurevars(loader).nonlocals if inspect.isfunction(loader) else {}


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


def _qkv_rows(module: Any, rank: int) -> list[tuple[int, int]]:
    """Return the rows of q, k and v: (number, first). With few key-value heads, several ranks hold the same keys and values."""
    q = module.num_heads * module.head_size
    k = module.num_kv_heads * module.head_size
    v = module.num_kv_heads * getattr(module, "v_head_size", module.head_size)
    kv_rank = rank // getattr(module, "num_kv_head_replicas", 1)
    return [(q, rank * q), (k, kv_rank * k), (v, kv_rank * v)]


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
        weight: Tensor = module.weight.detach()
        return _unpack_convolution(weight) if hasattr(module, "_cpu_unpacked_conv_weight") else weight
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


def _unpack_convolution(weight: Tensor) -> Tensor:
    """Return a short convolution's weight [channels, 1, width] out of the order of its CPU kernel."""
    from vllm._custom_ops import causal_conv1d_weight_pack

    rows = weight.view(len(weight), -1)
    natural = torch.empty_like(rows).flatten()
    order = find_packing_order(
        tuple(rows.shape), rows.dtype, lambda unpacked: causal_conv1d_weight_pack(unpacked[0].contiguous())
    )
    natural[order] = rows.flatten()
    return natural.view(weight.shape)


def refresh_packed_copies(model: Any) -> None:
    """Update what vLLM leaves at the old weights after a reload: the packed copy of a head that is tied to the embedding, and the
    convolutions of Mamba's layers whose own weights are packed.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        unpacked = getattr(getattr(module, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if unpacked is not None and isinstance(used := getattr(module, "conv_weights", None), Tensor):
            used.copy_(unpacked)
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
