"""Parameters of which each rank holds a part, and that part as a plain tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


def divide(parameter: nn.Parameter, mesh: Any, dimension: int) -> nn.Parameter:
    """The same parameter, divided evenly along one dimension over a mesh of ranks that all have it whole; nothing is sent."""
    part = parameter.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()]
    own = DTensor.from_local(part.contiguous().clone(), mesh, [Shard(dimension)], run_check=False)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)


def local(tensor: Any) -> Tensor:
    """This rank's part of a divided tensor, through which gradients pass; any other tensor as it is."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part
