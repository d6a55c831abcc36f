"""The weights of a sharded network for publishing: metadata first, tensors gathered one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.learner.parallel.sharded import Sharded
from strop.models.adapters import LoraLayer, lora_layers, save_adapters, weights_with_layers
from strop.weight_sync.base import AdapterFiles
from strop.weight_sync.exporter import fingerprint_adapters, read_adapter_files
from strop.weight_sync.weight_source import Weight


def iter_sharded_weights(parallelism: Sharded, *, adapters: bool = True) -> Iterator[Weight]:
    """Yield the weights in the order and under the names of an ordinary model. Without ``adapters``, yield the base weights."""
    for name, tensor, layer in weights_with_layers(parallelism.network.model):
        if layer is None or not adapters:
            yield Weight(name, _describe(parallelism, tensor), _make_gather(parallelism, tensor), _storage_key(tensor))
        else:
            like = torch.empty(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device="meta")
            yield Weight(name, like, _make_merge(parallelism, layer), _storage_key(tensor))


def _describe(parallelism: Sharded, tensor: Tensor) -> Tensor:
    dtype = parallelism.param_dtype if parallelism.param_dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _make_gather(parallelism: Sharded, tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: parallelism.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _make_merge(parallelism: Sharded, layer: LoraLayer) -> Callable[[], Tensor]:
    return lambda: layer.merged_weight(lambda tensor: parallelism.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor)


def _storage_key(tensor: Tensor) -> tuple[int, ...]:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (local.untyped_storage().data_ptr(), local.storage_offset(), *tensor.shape)


@dataclass(frozen=True)
class ShardedWeights:
    """The weights of a sharded network, for an exporter on each rank."""

    parallelism: Sharded

    @property
    def device(self) -> torch.device:
        return self.parallelism.network.device

    def iter_weights(self) -> Iterator[Weight]:
        return iter_sharded_weights(self.parallelism)

    def adapter_source(self) -> ShardedAdapterSource:
        return ShardedAdapterSource(self.parallelism)


class ShardedAdapterSource:
    """An ``AdapterSource`` of sharded adapters. All ranks call each method at the same time."""

    def __init__(self, parallelism: Sharded) -> None:
        self.parallelism = parallelism

    def base_weights(self) -> Iterable[Weight]:
        return iter_sharded_weights(self.parallelism, adapters=False)

    def export_files(self) -> AdapterFiles:
        with tempfile.TemporaryDirectory(prefix="strop-adapter-") as name:
            save_adapters(self.parallelism.network.model, Path(name), self.parallelism.adapters())
            return read_adapter_files(Path(name))

    @torch.no_grad()
    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, int]:
        return fingerprint_adapters(
            (
                (layer, self._full_tensor(layer.down), self._full_tensor(layer.up))
                for layer in lora_layers(self.parallelism.network.model)
            ),
            dtype,
        )

    def _full_tensor(self, tensor: Tensor) -> Tensor:
        return self.parallelism.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
