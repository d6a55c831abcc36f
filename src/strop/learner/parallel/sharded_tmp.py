"""Shard parameters over a mesh, and get the local shards as plain tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


def shard_parameter(parameter: nn.Parameter, mesh: Any, dimension: int) -> nn.Parameter:
    """Shard a parameter evenly along one dimension over a mesh. Every rank has it in full, so there is no communication."""
    part = parameter.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()]
    own = DTensor.from_local(part.contiguous().clone(), mesh, [Shard(dimension)], run_check=False)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)


def to_local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, differentiably; return any other tensor unchanged."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part
