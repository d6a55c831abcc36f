"""The weights of a sharded network for publishing: metadata first, then tensors, each gathered on its sending rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from strop.learner.parallel.export.shard_gather import PendingShards, ShardGather, tensor_key
from strop.learner.parallel.sharded import Sharded
from strop.models.adapters import LoraLayer, lora_layers, save_adapters, weights_with_layers
from strop.models.layers.rounded_layers import weight_roundings
from strop.weight_sync.base import AdapterFiles
from strop.weight_sync.exporter import fingerprint_adapters, read_adapter_files
from strop.weight_sync.weight_source import Weight


def iter_sharded_weights(parallelism: Sharded, *, adapters: bool = True, shards: ShardGather | None = None) -> Iterator[Weight]:
    """Yield the weights in the order and under the names of an ordinary model. Without ``adapters``, yield the base weights.

    ``shards`` gathers them on the sending ranks; created here if None.
    """
    shards = shards or ShardGather(parallelism)
    shards.find_tensors()
    roundings = weight_roundings(parallelism.network.model)
    for name, tensor, layer in weights_with_layers(parallelism.network.model):
        if layer is None or not adapters:
            yield Weight(
                name,
                _describe(parallelism, tensor),
                _make_gather(parallelism, tensor),
                tensor_key(tensor),
                partial(shards.begin, tensor),
                roundings.get(name),
            )
        else:
            like = torch.empty(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device="meta")
            yield Weight(name, like, _make_merge(parallelism, layer), tensor_key(tensor), partial(_begin_merge, shards, layer))


def _begin_merge(shards: ShardGather, layer: LoraLayer, owner: int) -> PendingMerge:
    tensors = (layer.down, layer.up, layer.base.weight)
    return PendingMerge(layer, {tensor_key(tensor): shards.begin(tensor, owner) for tensor in tensors}, shards.rank == owner)


@dataclass(frozen=True, eq=False)
class PendingMerge:
    """A layer's weight and adapters in transit to the rank that merges them."""

    layer: LoraLayer
    parts: Mapping[tuple[int, ...], PendingShards]  # by ``tensor_key``
    merges: bool

    def wait(self) -> Tensor | None:
        gathered = {key: part.wait() for key, part in self.parts.items()}
        if not self.merges:
            return None

        def take(tensor: Tensor) -> Tensor:
            full = gathered[tensor_key(tensor)]
            assert full is not None
            return full

        return self.layer.merged_weight(take)


def _describe(parallelism: Sharded, tensor: Tensor) -> Tensor:
    dtype = parallelism.param_dtype if parallelism.param_dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _make_gather(parallelism: Sharded, tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: parallelism.full_tensor(tensor)


def _make_merge(parallelism: Sharded, layer: LoraLayer) -> Callable[[], Tensor]:
    return lambda: layer.merged_weight(parallelism.full_tensor)


@dataclass(frozen=True)
class ShardedWeights:
    """The weights of a sharded network, for an exporter on each rank."""

    parallelism: Sharded

    @property
    def device(self) -> torch.device:
        return self.parallelism.network.device

    @cached_property
    def shards(self) -> ShardGather:
        """Holds the locations of shards, which the ranks exchange once."""
        return ShardGather(self.parallelism)

    def iter_weights(self) -> Iterator[Weight]:
        return iter_sharded_weights(self.parallelism, shards=self.shards)

    def adapter_source(self) -> ShardedAdapterSource:
        return ShardedAdapterSource(self.parallelism, self.shards)


class ShardedAdapterSource:
    """An ``AdapterSource`` of sharded adapters. All ranks call each method at the same time."""

    def __init__(self, parallelism: Sharded, shards: ShardGather) -> None:
        self.parallelism = parallelism
        self.shards = shards

    def base_weights(self) -> Iterable[Weight]:
        return iter_sharded_weights(self.parallelism, adapters=False, shards=self.shards)

    def export_files(self) -> AdapterFiles:
        with tempfile.TemporaryDirectory(prefix="strop-adapter-") as name:
            save_adapters(self.parallelism.network.model, Path(name), self.parallelism.adapters())
            return read_adapter_files(Path(name))

    @torch.no_grad()
    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, int]:
        return fingerprint_adapters(
            (
                (layer, self.parallelism.full_tensor(layer.down), self.parallelism.full_tensor(layer.up))
                for layer in lora_layers(self.parallelism.network.model)
            ),
            dtype,
        )
