"""LoRA adapters of the policy in an SGLang engine: written into the slot that its kernels read, and read back from there.

SGLang is started with one empty adapter, which every request names. A publish replaces its matrices in place, between two steps of the
scheduler: SGLang's own way would unload the adapter, and wait for the requests that use it. Its loader is not used for another reason
too: it takes alpha / r for the scale whatever ``use_rslora`` says, and fails on adapters of only q.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.lora.utils import get_target_module_name
from sglang.srt.utils import replace_submodule
from torch import Tensor

from strop.extensions.sglang.server.sglang_readback import FUSED, ModelShard, fused_rows, own_rank
from strop.weight_sync.base import AdapterFiles

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
