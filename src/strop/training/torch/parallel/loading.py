"""A model that is loaded once for all ranks: by the first of them. The others have its shell, and get their shards tensor by tensor.

Host memory then holds one copy of the model, and not one for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.models.network import Network

dist: Any = torch.distributed


def load_once(load: Callable[[], Any]) -> Any:
    """The model that ``load`` gives, on the first rank; on the others the same without numbers, on the meta device.

    All ranks call it. Raises on every rank what ``load`` raised on the first.
    """
    model: Any = None

    def loaded() -> tuple[Any, Any, bool, dict[str, tuple[torch.dtype, bool]]]:
        nonlocal model
        model = load()
        parameters = {name: (one.dtype, one.requires_grad) for name, one in model.named_parameters()}
        return type(model), model.config, model.training, parameters

    kind, config, training, parameters = from_first(loaded)
    if model is None:
        with torch.device("meta"):
            model = kind(config).train(training)
        for name, parameter in model.named_parameters():
            dtype, trained = parameters[name]
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(trained)
    return model


def network_once(model: Any, make: Callable[..., Network]) -> Network:
    """``make(model)``, which finds out on the first rank how the model reads, and ``make(model, packed=what it found)`` elsewhere."""
    network: Network | None = None

    def made() -> tuple[bool, str | None]:
        nonlocal network
        network = make(model)
        return network.packed, network.fallback

    packed, fallback = from_first(made)
    if network is None:
        network = make(model, packed=packed)
        network.fallback = fallback
    return network


def from_first(find: Callable[[], Any]) -> Any:
    """What ``find`` gives on the first rank, on every rank. Raises on every rank what it raised there."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told = [find(), None]
        except Exception as error:
            told = [None, error]
    dist.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    return told[0]


def anywhere(here: bool) -> bool:
    """Whether it is so on any rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, here)
    return any(told)


def is_shell(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def hollow(model: nn.Module) -> dict[str, Tensor]:
    """Take a model's parameters out of it, leaving those of a shell; what they were, by name."""
    taken: dict[str, Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        taken[name] = parameter.detach()
        _put(model, parameter, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad))
    return taken


@torch.no_grad()
def fill(root: nn.Module, model: nn.Module, weights: Mapping[str, Tensor], device: torch.device, shards: torch.device) -> None:
    """Give a divided shell its numbers: ``weights`` of the first rank, whole; buffers and the like come from its own model.

    Each rank keeps its pieces, on the device ``shards``. Raises ValueError for a weight that the first rank does not have.
    """
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    missing = from_first(lambda: sorted({name for name, _ in parameters} - weights.keys()))
    if missing:
        raise ValueError(
            f"the model on the first rank has no {', '.join(missing[:3])}: dividing it changed the names of its weights"
        )
    for name, parameter in parameters:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if dist.get_rank() == 0:
            whole.copy_(weights[name])
        dist.broadcast(whole, 0)
        piece = _piece_of(whole, parameter).to(shards)
        filled = DTensor.from_local(
            piece, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        _put(model, parameter, nn.Parameter(filled, requires_grad=parameter.requires_grad))
    root.load_state_dict({}, strict=False)  # nothing, but FSDP then looks at its parameters anew
    for holder, key, tensor in _other_tensors(model):
        here = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)
        dist.broadcast(here, 0)
        holder[key] = here


def _piece_of(whole: Tensor, like: Any) -> Tensor:
    """This rank's piece: inner mesh dimensions cut first, which is what FSDP does to a tensor that is already divided."""
    place = like.device_mesh.get_coordinate()
    for dimension in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[dimension]
        if not placement.is_replicate():
            size = -(-whole.shape[placement.dim] // like.device_mesh.size(dimension))
            first = min(place[dimension] * size, whole.shape[placement.dim])
            whole = whole.narrow(placement.dim, first, min(size, whole.shape[placement.dim] - first))
    return whole.contiguous().clone()


def _put(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Wherever the model has one parameter, the other."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[key] = new


def _other_tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Buffers, and tensors that are plain attributes, as (where they are held, under which name, what)."""
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._buffers, vars(module))
        for holder in holders:
            for key in sorted(key for key, value in holder.items() if isinstance(value, Tensor)):
                yield holder, key, holder[key]
