"""The weights of a sharded network for publishing: metadata first, tensors gathered one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.models.adapters import LowRank, layers_and_weights
from strop.training.torch.parallel.sharding import ManyRanks
from strop.weights.source import Weight


def exported(placement: ManyRanks, *, adapters: bool = True) -> Iterator[Weight]:
    """Yield the weights in the order and under the names of an ordinary model. Without ``adapters``, yield the base weights."""
    for name, tensor, layer in layers_and_weights(placement.network.model):
        if layer is None or not adapters:
            yield Weight(name, _described(placement, tensor), _taken(placement, tensor), _storage(tensor))
        else:
            like = torch.empty(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device="meta")
            yield Weight(name, like, _merged(placement, layer), _storage(tensor))


def _described(placement: ManyRanks, tensor: Tensor) -> Tensor:
    dtype = placement.rounded if placement.rounded is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _taken(placement: ManyRanks, tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: placement.gathered(tensor) if isinstance(tensor, DTensor) else tensor


def _merged(placement: ManyRanks, layer: LowRank) -> Callable[[], Tensor]:
    return lambda: layer.merged(lambda tensor: placement.gathered(tensor) if isinstance(tensor, DTensor) else tensor)


def _storage(tensor: Tensor) -> tuple[int, ...]:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (local.untyped_storage().data_ptr(), local.storage_offset(), *tensor.shape)
