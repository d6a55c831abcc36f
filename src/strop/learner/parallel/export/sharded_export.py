"""The weights of a sharded network for publishing: metadata first, then tensors, each gathered on its sending rank.

``DTensor.full_tensor`` sends every shard to every rank, which costs each rank the bytes of the whole model. Here a shard is sent
once, to the rank that sends its tensor to the engines, and several transfers overlap: while a rank handles one tensor, the
shards of the next are already in transit.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.learner.parallel.shard_files import is_elsewhere, local_shard, storage_key
from strop.learner.parallel.sharded import Sharded
from strop.models.adapters import LoraLayer, lora_layers, save_adapters, weights_with_layers
from strop.models.layers.rounded_layers import weight_roundings
from strop.weight_sync.base import AdapterFiles
from strop.weight_sync.exporter import fingerprint_adapters, read_adapter_files
from strop.weight_sync.weight_source import Weight

dist: Any = torch.distributed


@dataclass(frozen=True)
class ShardRegion:
    """The position of a rank's shard in a full tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class TensorRegions:
    """The distinct shards of one tensor, which together cover it, and the ranks that have each."""

    number: int  # of the tensor in the model, equal on all ranks
    holders: Mapping[ShardRegion, tuple[int, ...]]

    def source(self, region: ShardRegion, owner: int) -> int:
        """Return the rank that sends a shard to ``owner``: the owner itself if it has the shard; replicas take turns."""
        holders = self.holders[region]
        return owner if owner in holders else holders[self.number % len(holders)]


class ShardGather:
    """Gathers the tensors of one network. All ranks call its methods together, in the same order."""

    def __init__(self, parallelism: Sharded) -> None:
        self.parallelism = parallelism
        self.rank = int(dist.get_rank())
        self._regions: list[TensorRegions | None] = []  # of the model's tensors, in order
        self._by_key: dict[tuple[int, ...], TensorRegions | None] = {}  # by the tensors' current memory

    def find_tensors(self) -> None:
        """Find the model's tensors, which may have moved since the last publish. The first call is a collective."""
        tensors = list(self.parallelism.network.model.state_dict().values())
        self._regions = self._regions or exchange_regions(tensors)
        self._by_key = {tensor_key(tensor): regions for tensor, regions in zip(tensors, self._regions, strict=True)}

    def begin(self, tensor: Tensor, owner: int) -> PendingShards:
        """Start gathering one of the model's tensors on the rank ``owner``, in the dtype of the computation."""
        regions = self._by_key[tensor_key(tensor)]
        if regions is None:  # not in disjoint blocks
            return PendingShards(fallback=lambda: self.parallelism.full_tensor(tensor))
        return self._receive(tensor, regions) if self.rank == owner else self._send(tensor, regions, owner)

    def _send(self, tensor: Tensor, regions: TensorRegions, owner: int) -> PendingShards:
        """Send this rank's shard, unless another rank sends the owner the same one."""
        region = _region_of(tensor)
        if region is None or region not in regions.holders or regions.source(region, owner) != self.rank:
            return PendingShards()
        shard = local_shard(tensor).tensor.to(self.parallelism.device, self._dtype_of(tensor)).contiguous()
        # Gloo matches messages by tag. NCCL ignores tags and matches the messages of two ranks by posting order; all ranks
        # process the tensors of a publish in the same order, so both find the same pairs.
        return PendingShards(works=_post([dist.P2POp(dist.isend, shard, owner, tag=regions.number)]), held=shard)

    def _receive(self, tensor: Tensor, regions: TensorRegions) -> PendingShards:
        """Receive the shards that this rank lacks directly into the full tensor."""
        dtype, device = self._dtype_of(tensor), self.parallelism.device
        sources = {region: regions.source(region, self.rank) for region in regions.holders}
        if list(sources.values()) == [self.rank]:
            return PendingShards(full=local_shard(tensor).tensor.to(device, dtype))
        full = torch.empty(tensor.shape, dtype=dtype, device=device)
        operations, copies = [], []
        for region, source in sources.items():
            target = full[region.index]
            if source == self.rank:
                target.copy_(local_shard(tensor).tensor)
                continue
            received = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
            if received is not target:
                copies.append((target, received))
            operations.append(dist.P2POp(dist.irecv, received, source, tag=regions.number))
        return PendingShards(full=full, works=_post(operations), copies=copies)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        sharded = isinstance(tensor, DTensor) or is_elsewhere(tensor)
        computed = self.parallelism.param_dtype if sharded and tensor.is_floating_point() else None
        return computed or tensor.dtype


def tensor_key(tensor: Tensor) -> tuple[int, ...]:
    """Return a key of a model's tensor that is shared by tied weights and by copies of the tensor object."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (storage_key(local), local.storage_offset(), *tensor.shape)


def exchange_regions(tensors: Sequence[Tensor]) -> list[TensorRegions | None]:
    """Return the owners of the shards of the model's tensors, in order; None for a tensor whose shards are not disjoint blocks of
    it.

    A collective of all ranks.
    """
    own = [_region_of(tensor) for tensor in tensors]
    tables: list[list[ShardRegion | None]] = [[]] * dist.get_world_size()
    dist.all_gather_object(tables, own)
    found: list[TensorRegions | None] = []
    for number, tensor in enumerate(tensors):
        holders: dict[ShardRegion, list[int]] = defaultdict(list)
        for rank, table in enumerate(tables):
            if (region := table[number]) is not None and region.numel:
                holders[region].append(rank)
        whole = sum(region.numel for region in holders) == tensor.numel() > 0
        found.append(TensorRegions(number, {region: tuple(ranks) for region, ranks in holders.items()}) if whole else None)
    return found


def _region_of(tensor: Tensor) -> ShardRegion | None:
    if is_elsewhere(tensor):
        return None
    try:
        shard = local_shard(tensor)
    except ValueError:  # not a block
        return None
    return ShardRegion(shard.offset, tuple(shard.tensor.shape))


def _post(operations: Sequence[Any]) -> list[Any]:
    works: list[Any] = dist.batch_isend_irecv(list(operations)) if operations else []
    return works


@dataclass(eq=False)
class PendingShards:
    """A tensor whose shards are in transit."""

    full: Tensor | None = None  # on the gathering rank
    works: Sequence[Any] = ()
    copies: Sequence[tuple[Tensor, Tensor]] = ()  # (position in ``full``, received tensor)
    held: Tensor | None = None  # memory being sent
    fallback: Callable[[], Tensor] | None = None  # a collective of all ranks

    @torch.no_grad()
    def wait(self) -> Tensor | None:
        """Return the full tensor on the gathering rank, None on others. A tensor that is not split into blocks is on all ranks."""
        if self.fallback is not None:
            return self.fallback()
        for work in self.works:
            work.wait()
        for target, received in self.copies:
            target.copy_(received)
        self.held = None
        return self.full


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
