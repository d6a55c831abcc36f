"""Load a model on the first rank only. The others create it on the meta device and receive their shards tensor by tensor.

Host memory then holds one copy of the model instead of one per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.models.network import Network

dist: Any = torch.distributed


class RankZeroLoader:
    """Loads a model on the first rank; the others hold it on the meta device until it is sharded."""

    def load_model(self, load: Callable[..., Any], name: str, device: torch.device, **options: Any) -> Any:
        return load_on_rank_zero(lambda: load(name, device="cpu", **options))

    def make_network(self, kind: Callable[..., Any], model: Any, **options: Any) -> Any:
        return probe_on_rank_zero(model, partial(kind, **options))

    def measure(self, find: Callable[[], Any]) -> Any:
        return broadcast_from_rank_zero(find)


def load_on_rank_zero(load: Callable[[], Any]) -> Any:
    """Call ``load`` on the first rank and return its model; on the other ranks return the same model on the meta device.

    All ranks must call it. If ``load`` fails, its error is raised on every rank.
    """
    model: Any = None

    def load_and_describe() -> tuple[Any, Any, bool, dict[str, tuple[torch.dtype, bool]]]:
        nonlocal model
        model = load()
        parameters = {name: (parameter.dtype, parameter.requires_grad) for name, parameter in model.named_parameters()}
        return type(model), model.config, model.training, parameters

    kind, config, training, parameters = broadcast_from_rank_zero(load_and_describe)
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

    def probe() -> tuple[bool, str | None]:
        nonlocal network
        network = make(model)
        return network.packed, network.fallback

    packed, fallback = broadcast_from_rank_zero(probe)
    if network is None:
        network = make(model, packed=packed)
        network.fallback = fallback
    return network


def broadcast_from_rank_zero(find: Callable[[], Any]) -> Any:
    """Call ``find`` on the first rank and return its result, or raise its error, on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [find(), None]
        except Exception as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank."""
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


def is_meta_model(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def to_meta(model: nn.Module, names: frozenset[str] | None = None) -> dict[str, Tensor]:
    """Replace a model's parameters, or those with ``names``, by meta tensors and return the original ones by name."""
    originals: dict[str, Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        if names is not None and name not in names:
            continue
        originals[name] = parameter.detach()
        _replace_parameter(
            model, parameter, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        )
    return originals


@torch.no_grad()
def broadcast_weights(
    root: nn.Module,
    model: nn.Module,
    weights: Mapping[str, Tensor],
    device: torch.device,
    shard_device: torch.device,
    elsewhere: Collection[str] = (),
) -> None:
    """Fill a sharded meta model with the first rank's full ``weights`` and buffers.

    Each rank keeps its shards on ``shard_device``, and nothing of the weights ``elsewhere``. Raises ValueError for a weight
    missing on the first rank.
    """
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    missing = broadcast_from_rank_zero(lambda: sorted({name for name, _ in parameters} - weights.keys()))
    if missing:
        raise ValueError(
            f"the model on the first rank has no {', '.join(missing[:3])}: sharding changed the names of its weights"
        )
    for name, parameter in parameters:
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if dist.get_rank() == 0:
            full.copy_(weights[name])
        dist.broadcast(full, 0)
        if name in elsewhere:
            continue
        local = _local_shard_of(full, parameter).to(shard_device)
        sharded = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        _replace_parameter(model, parameter, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    root.load_state_dict({}, strict=False)  # loads nothing, but makes FSDP update its references to the parameters
    for holder, key, tensor in non_parameter_tensors(model):
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)
        dist.broadcast(received, 0)
        holder[key] = received


def _local_shard_of(full: Tensor, like: Any) -> Tensor:
    """Return this rank's shard: inner mesh dimensions are split first, as FSDP does with a tensor that is already sharded."""
    coordinate = like.device_mesh.get_coordinate()
    for dimension in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[dimension]
        if not placement.is_replicate():
            size = -(-full.shape[placement.dim] // like.device_mesh.size(dimension))
            first = min(coordinate[dimension] * size, full.shape[placement.dim])
            full = full.narrow(placement.dim, first, min(size, full.shape[placement.dim] - first))
    return full.contiguous().clone()


def _replace_parameter(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Replace a parameter everywhere in the model."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[key] = new


def non_parameter_tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield buffers and tensors that are plain attributes, as (dictionary, key, tensor)."""
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._buffers, vars(module))
        for holder in holders:
            for key in sorted(key for key, value in holder.items() if isinstance(value, Tensor)):
                yield holder, key, holder[key]
