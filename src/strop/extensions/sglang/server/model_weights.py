"""The part of weight sync that runs in the processes that hold an engine's model: loading weights and fingerprinting them.

SGLang fuses matrices (q, k and v into one, gate and up into one, the experts of a layer into two) and shards them over tensor-parallel
ranks. Tensors in a layout that is not known here are not read back, and then covered by their arrival and the canary.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
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
from sglang.srt.lora.utils import get_target_module_name
from sglang.srt.runtime_context import get_serving
from sglang.srt.utils import replace_submodule
from torch import Tensor, nn

from strop.models.checkpoint_names import CheckpointNames
from strop.weight_sync.base import AdapterFiles, ChannelAddress, Manifest, Receiver, TensorFingerprint
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros

PLAIN_LAYERS = (nn.Conv2d, nn.Conv3d, nn.Embedding, Conv2dLayer, Conv3dLayer)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TOWER, TOWER_QKV = "visual.", "qkv"  # of models that read images
_BASE_LAYER_SUFFIX = ".base_layer"  # of the original layer inside SGLang's LoRA layers


@dataclass(frozen=True, eq=False)
class ModelShard:
    """This process's shard of one tensor."""

    name: str  # canonical
    tensor: Tensor  # [rows, columns], [n], or of experts [E, rows, columns]
    row: int = 0  # first row, or expert, in the full tensor
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
    """Yield the matrices of the experts that this rank holds whole: with expert parallelism, or with one rank."""
    up, down = getattr(module, "w13_weight", None), getattr(module, "w2_weight", None)
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or up.dtype.itemsize < 2 or module.moe_tp_size != 1:
        return
    if up.dim() != 3 or up.shape[1] != 2 * down.shape[2] or up.shape[2] != down.shape[1]:
        return  # transposed or packed for a kernel
    first = getattr(module, "moe_ep_rank", 0) * up.shape[0]
    yield ModelShard(f"{path}.gate_up_proj", up.detach(), first)
    yield ModelShard(f"{path}.down_proj", down.detach(), first)
    done.update(id(parameter) for parameter in module.parameters(recurse=False))


PEFT_PREFIX = "base_model.model."  # of each name in PEFT's files
NamedAdapters = Mapping[str, tuple[Tensor, Tensor]]  # layer -> A [r, inputs], B [outputs, r]


@dataclass(frozen=True)
class PublishedAdapters:
    """One publish of adapters."""

    layers: NamedAdapters
    rank: int
    scale: float


def read_adapters(files: AdapterFiles) -> PublishedAdapters:
    """Read PEFT's format. Raises ValueError for adapters that do not have one rank and one scale."""
    config = json.loads(files.config)
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise ValueError("the adapters have several ranks or scales (rank_pattern, alpha_pattern), and SGLang's slot has one")
    rank = int(config["r"])
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = files.tensors()
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            layers[layer.removeprefix(PEFT_PREFIX)] = (down, tensors[f"{layer}.lora_B.weight"])
    return PublishedAdapters(layers, rank, float(scale))


class AdapterSlot:
    """The place of the policy's adapter in the buffers of SGLang's LoRA layers, in this process."""

    def __init__(self, manager: Any, rank: int) -> None:
        """``manager``: SGLang's ``LoRAManager``; ``rank``: among the tensor-parallel ranks."""
        self.manager, self.rank = manager, rank
        self._published: dict[str, str] = {}  # SGLang's path of a layer's part -> its name in the last publish

    @property
    def adapter(self) -> str:
        """SGLang's id of the only adapter."""
        (adapter,) = self.manager.lora_refs
        return str(adapter)

    @property
    def index(self) -> int:
        """Where the buffers hold it. None is SGLang's name of requests without an adapter."""
        if self.adapter not in self.manager.memory_pool.uid_to_buffer_id:
            self.manager.fetch_new_loras({None, self.adapter})
        return int(self.manager.memory_pool.get_buffer_id(self.adapter))

    def write(self, adapters: PublishedAdapters) -> None:
        """Replace the adapter's matrices; those of layers without an adapter become zero.

        Raises ValueError if a layer has no place in SGLang's model.
        """
        loaded, pool = self.manager.loras[self.adapter], self.manager.memory_pool
        if adapters.rank != pool.max_lora_rank:
            raise ValueError(f"the adapters have rank {adapters.rank}, and the engine was started for rank {pool.max_lora_rank}")
        self._published = self._match(adapters.layers)
        index = self.index
        for path, module, down, up in self._places():
            matrices = [adapters.layers.get(self._published.get(part, "")) for part in _part_names(path)]
            sizes = _output_sizes(module.base_layer, len(matrices))
            full_down = torch.zeros(len(matrices) * adapters.rank, _input_size(module.base_layer))
            full_up = torch.zeros(sum(sizes), adapters.rank)
            first = 0
            for number, (matrix, size) in enumerate(zip(matrices, sizes, strict=True)):
                if (
                    matrix is not None
                ):  # on a CPU SGLang pads some layers with zeros, which are behind the published rows and columns
                    full_down[number * adapters.rank : (number + 1) * adapters.rank, : matrix[0].shape[1]] = matrix[0]
                    full_up[first : first + len(matrix[1])] = matrix[1]
                first += size
            down[index].copy_(module.slice_lora_a_weights(full_down))
            up[index].copy_(module.slice_lora_b_weights(full_up))
        loaded.scaling = adapters.scale
        self.manager._notify_lora_slots_updated({index})

    def read(self) -> Iterator[ModelShard]:
        """Yield this process's shards of each published matrix from the buffers, named ``<layer>.A`` and ``<layer>.B``.

        B is multiplied by the scale.
        """
        index, scale = self.index, self.manager.loras[self.adapter].scaling
        for path, module, down, up in self._places():
            layer, names = module.base_layer, _part_names(path)
            rank = up.shape[-1]
            sizes, rows = fused_rows(layer, self.rank)
            column = own_rank(layer, self.rank) * down.shape[-1] if isinstance(layer, RowParallelLinear) else 0
            first = 0
            for number, (name, size, row) in enumerate(zip(names, sizes, rows, strict=True)):
                if (published := self._published.get(name)) is not None:
                    part = up[index, first : first + size]
                    yield ModelShard(f"{published}.A", down[index, number * rank : (number + 1) * rank], column=column)
                    yield ModelShard(f"{published}.B", part if scale == 1 else part * scale, row=row)
                first += size

    def _places(self) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
        """Yield (path, SGLang's layer, buffer of A [slots, parts * r, inputs], buffer of B [slots, outputs, r])."""
        pool = self.manager.memory_pool
        for number, modules in enumerate(self.manager.lora_modules):
            for path, module in modules.items():
                target = get_target_module_name(path, pool.target_modules)
                yield path, module, pool.A_buffer[target][number], pool.B_buffer[target][number]

    def _match(self, layers: NamedAdapters) -> dict[str, str]:
        """Return the published name of each part that has an adapter. Models that read images are named differently before ``layers``."""
        parts = [part for path, *_ in self._places() for part in _part_names(path)]
        by_tail = {_tail(part): part for part in parts}
        found = {by_tail[_tail(name)]: name for name in layers if _tail(name) in by_tail}
        missing = sorted(layers.keys() - found.values())
        if missing:
            raise ValueError(
                f"SGLang has no adapters for {', '.join(missing[:3])} ({len(missing)} of {len(layers)} layers); set "
                "policy.generation.weight_sync.adapters_alone=false to send merged weights"
            )
        return found


def _tail(name: str) -> str:
    _, found, tail = name.rpartition("layers.")
    return tail if found else name


def _part_names(path: str) -> list[str]:
    """Return the canonical names of the layers that SGLang has in one."""
    parent, _, leaf = path.rpartition(".")
    return [f"{parent}.{name}" for name in FUSED.get(leaf, (leaf,))]


def _input_size(layer: Any) -> int:
    return int(layer.input_size)


def _output_sizes(layer: Any, parts: int) -> list[int]:
    """Return the rows of each part, over all ranks."""
    if isinstance(layer, QKVParallelLinear):
        q, k = layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size
        return [q, k, layer.total_num_kv_heads * getattr(layer, "v_head_size", layer.head_size)]
    return list(layer.output_sizes) if parts > 1 else [layer.output_size]


@contextmanager
def without_adapters(model: Any, manager: Any) -> Iterator[None]:
    """Take SGLang's LoRA layers out of the model, so that it loads base weights under the names that it knows."""
    wrapped = [] if manager is None else [pair for modules in manager.lora_modules for pair in modules.items()]
    for path, module in wrapped:
        replace_submodule(model, path, module.base_layer)
    try:
        yield
    finally:
        for path, module in wrapped:
            replace_submodule(model, path, module)


class ModelWeights:
    """The weights of one tensor-parallel rank. Its methods are called by name, between two steps of the scheduler."""

    def __init__(self, manager: Any) -> None:
        """``manager``: SGLang's updater of weights, of this process."""
        self.manager = manager
        self.runner: Any = manager.tp_worker.model_runner
        self.rank: int = torch.distributed.get_rank(group=manager.tp_cpu_group)
        self.device = torch.device(self.runner.device)
        self.adapters = None if self.runner.lora_manager is None else AdapterSlot(self.runner.lora_manager, self.rank)
        self._receiver: Receiver | None = None
        self._names: dict[str, str] = {}  # SGLang's name of each published tensor -> its own, where they differ

    @cached_property
    def checkpoint(self) -> CheckpointNames:
        """The names that SGLang's loaders expect, which take a moment to find."""
        return CheckpointNames.of(self.runner.model_config.model_path)

    def connect(self, address: ChannelAddress, first: int) -> None:
        """Connect to the sender at ``address`` as its receiver number ``first`` + rank."""
        self.disconnect()
        device = torch.device("cuda", torch.cuda.current_device()) if self.device.type == "cuda" else self.device
        self._receiver = address.connect(first + self.rank, device)

    def disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    @torch.no_grad()
    def load(self, manifest: Manifest) -> tuple[dict[str, int], float]:
        """Receive one publish and load it. Return the fingerprint of each tensor as it arrived, and seconds.

        On a CPU the model is unchanged until all tensors have arrived. On a GPU an aborted publish leaves it unusable until the next one.
        """
        if self._receiver is None:
            raise RuntimeError("no channel is connected")
        started = time.perf_counter()
        held = ((engine_name(self.runner.model, self.checkpoint.module_name(name)), name) for name in manifest.names)
        self._names = {name: published for name, published in held if name != published}
        fingerprints: dict[str, int] = {}
        tensors = _fingerprint_each(self._receiver.receive(manifest), fingerprints)
        self._apply(list(tensors) if self.device.type == "cpu" else tensors)
        missing = set(manifest.names) - fingerprints.keys()
        if missing:
            raise RuntimeError(f"the publish ended without {', '.join(sorted(missing)[:3])}")
        return fingerprints, time.perf_counter() - started

    def _apply(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors into the model, and into a draft that shares its weights."""
        runners = [runner for _, runner in self.manager._select_runners("all")]
        loaded = list(tensors) if len(runners) > 1 else tensors
        for runner in runners:
            runner.weight_updater.begin_weight_update()
            with without_adapters(runner.model, getattr(runner, "lora_manager", None)):
                stored = (part for name, tensor in loaded for part in self.checkpoint.convert(name, tensor))
                runner.model.load_weights((engine_name(runner.model, name), tensor) for name, tensor in stored)
            runner.weight_updater.end_weight_update(run_post_load=False)

    @torch.no_grad()
    def load_adapter(self, files: AdapterFiles) -> float:
        """Replace the policy's adapters by those of a publish. Return the seconds that it took."""
        started = time.perf_counter()
        self._require_adapters().write(read_adapters(files))
        return time.perf_counter() - started

    def flush(self) -> bool:
        """Drop cached keys and values, and return whether that was possible: not while requests run."""
        return bool(self.manager.flush_cache(empty_cache=False))  # which on a CPU would only collect garbage, for half a second

    def version(self) -> str:
        """Return the version that the scheduler gives to tokens it samples now."""
        return str(get_serving().weight_version)

    @torch.no_grad()
    def fingerprints(self) -> dict[str, tuple[TensorFingerprint, ...]]:
        """Return the fingerprints of this rank's shards of each tensor that it computes with, by canonical name."""
        shards = read_model_shards(self.runner.model, self.rank)
        return fingerprint_shards(replace(shard, name=self._names.get(shard.name, shard.name)) for shard in shards)

    @torch.no_grad()
    def adapter_fingerprints(self) -> dict[str, tuple[TensorFingerprint, ...]]:
        """Return the same for the matrices of the adapters, which its kernels add to the base."""
        return fingerprint_shards(self._require_adapters().read())

    def _require_adapters(self) -> AdapterSlot:
        if self.adapters is None:
            raise RuntimeError("the engine was started without adapters")
        return self.adapters


def fingerprint_shards(shards: Iterable[ModelShard]) -> dict[str, tuple[TensorFingerprint, ...]]:
    found: dict[str, tuple[TensorFingerprint, ...]] = {}
    for shard in shards:
        row, _, column, _ = shard.region
        value = fingerprint(normalize_zeros(shard.tensor), rows=row, columns=column)
        found[shard.name] = (*found.get(shard.name, ()), TensorFingerprint(value, shard.region))
    return found


def _fingerprint_each(incoming: Iterable[tuple[str, Tensor]], fingerprints: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Copy each tensor, which is valid only until the next one, and record its fingerprint."""
    for name, tensor in incoming:
        copy = tensor.clone()
        fingerprints[name] = fingerprint(copy)
        yield name, copy


# Names of tensors in SGLang's models that read images: those of the hub's files, and Strop sends those of Transformers.


PREFIXES = (("model.language_model.", "model."), ("model.visual.", "visual."))


def engine_name(model: Any, name: str) -> str:
    """Return the name under which a model of SGLang has a tensor."""
    if not hasattr(model, "visual"):
        return name
    for sent, held in PREFIXES:
        if name.startswith(sent):
            return held + name.removeprefix(sent)
    return name
