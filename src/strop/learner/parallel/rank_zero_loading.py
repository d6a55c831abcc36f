"""Load a model on the first rank only. The others create it on the meta device and receive their shards tensor by tensor.

Host memory then holds one copy of the model instead of one per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.models.network import Network

dist: Any = torch.distributed


def load_on_rank_zero(load: Callable[[], Any]) -> Any:
    """Call ``load`` on the first rank and return its model; on the other ranks return the same model on the meta device.

    All ranks must call it. An error of ``load`` is raised on every rank.
    """
    model: Any = None

    def loaded() -> tuple[Any, Any, bool, dict[str, tuple[torch.dtype, bool]]]:
        nonlocal model
        model = load()
        parameters = {name: (one.dtype, one.requires_grad) for name, one in model.named_parameters()}
        return type(model), model.config, model.training, parameters

    kind, config, training, parameters = broadcast_from_rank_zero(loaded)
    if model is None:
        with torch.device("meta"):
            model = kind(config).train(training)
        for name, parameter in model.named_parameters():
            dtype, trained = parameters[name]
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(trained)
    return model


def probe_on_rank_zero(model: Any, make: Callable[..., Network]) -> Network:
    """Call ``make(model)`` on the first rank, which probes the model, and ``make(model, packed=...)`` with its result on the others."""
    network: Network | None = None

    def made() -> tuple[bool, str | None]:
        nonlocal network
        network = make(model)
        return network.packed, network.fallback

    packed, fallback = broadcast_from_rank_zero(made)
    if network is None:
        network = make(model, packed=packed)
        network.fallback = fallback
    return network


def broadcast_from_rank_zero(find: Callable[[], Any]) -> Any:
    """Call ``find`` on the first rank and return its result on every rank. Its error is raised on every rank."""
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


def any_rank(here: bool) -> bool:
    """Return whether ``here`` is true on any rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, here)
    return any(told)


def is_meta_model(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def to_meta(model: nn.Module) -> dict[str, Tensor]:
    """Replace a model's parameters by meta tensors and return the original ones by name."""
    taken: dict[str, Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        taken[name] = parameter.detach()
        _replace_parameter(
            model, parameter, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        )
    return taken


@torch.no_grad()
def broadcast_weights(
    root: nn.Module, model: nn.Module, weights: Mapping[str, Tensor], device: torch.device, shards: torch.device
) -> None:
    """Fill a sharded meta model with the first rank's full ``weights``, and with the buffers of its model.

    Each rank keeps its shards on the device ``shards``. Raises ValueError for a weight that the first rank does not have.
    """
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    missing = broadcast_from_rank_zero(lambda: sorted({name for name, _ in parameters} - weights.keys()))
    if missing:
        raise ValueError(
            f"the model on the first rank has no {', '.join(missing[:3])}: sharding changed the names of its weights"
        )
    for name, parameter in parameters:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if dist.get_rank() == 0:
            whole.copy_(weights[name])
        dist.broadcast(whole, 0)
        piece = _local_shard_of(whole, parameter).to(shards)
        filled = DTensor.from_local(
            piece, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        _replace_parameter(model, parameter, nn.Parameter(filled, requires_grad=parameter.requires_grad))
    root.load_state_dict({}, strict=False)  # loads nothing, but makes FSDP update its references to the parameters
    for holder, key, tensor in _non_parameter_tensors(model):
        here = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)
        dist.broadcast(here, 0)
        holder[key] = here


def _local_shard_of(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's shard: inner mesh dimensions are split first, as FSDP does with a tensor that is already sharded."""
    place = like.device_mesh.get_coordinate()
    for dimension in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[dimension]
        if not placement.is_replicate():
            size = -(-whole.shape[placement.dim] // like.device_mesh.size(dimension))
            first = min(place[dimension] * size, whole.shape[placement.dim])
            whole = whole.narrow(placement.dim, first, min(size, whole.shape[placement.dim] - first))
    return whole.contiguous().clone()


def _replace_parameter(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Replace a parameter everywhere in the model."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[key] = new


def _non_parameter_tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield buffers, and tensors that are plain attributes, as (dictionary, key, tensor)."""
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._buffers, vars(module))
        for holder in holders:
            for key in sorted(key for key, value in holder.items() if isinstance(value, Tensor)):
                yield holder, key, holder[key]
