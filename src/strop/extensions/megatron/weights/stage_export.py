"""The weights of the stages as those of the ordinary Hugging Face model: metadata first, tensors gathered one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.extensions.megatron.models.gpt_stage import GptStage
from strop.extensions.megatron.weights.weight_map import PlacedWeight, WeightMap
from strop.weight_sync.weight_source import Weight

Take = Callable[[Tensor], Tensor]


def iter_weights(
    stages: Sequence[GptStage],
    hf_config: Any,
    take: Take = torch.Tensor.detach,
    place: Callable[[PlacedWeight], PlacedWeight] = lambda placed: placed,
) -> Iterator[Weight]:
    """Yield the weights in the order and under the names of the ordinary model. ``gather`` is a collective of all ranks.

    Every rank knows all shapes and data types. ``take`` returns what is sent of a parameter: with its main copy in float32, or an adapter,
    that; ``place`` says in which data type.
    """
    weights = WeightMap(stages, hf_config)
    for placed in map(place, weights.weights):
        like = torch.empty(placed.weight.shape, dtype=weights.dtype(placed), device="meta")
        yield Weight(placed.weight.name, like, partial(gather_weight, placed, weights, take), (placed.weight.storage,))


@torch.no_grad()
def gather_weight(placed: PlacedWeight, weights: WeightMap, take: Take = torch.Tensor.detach) -> Tensor:
    """Gather a weight over the ranks of its stage, and send it to the other stages."""
    group = weights.groups.pp
    if weights.is_local(placed):
        whole = _gather_in_stage(placed, weights, take)
    else:
        whole = torch.empty(placed.weight.shape, dtype=weights.dtype(placed), device=torch.cuda.current_device())
    if group.size() > 1:
        dist.broadcast(whole, dist.get_global_rank(group, placed.place.pipeline_rank), group=group)
    return whole


def _gather_in_stage(placed: PlacedWeight, weights: WeightMap, take: Take) -> Tensor:
    if placed.rule.of_experts:
        count = len(weights.local_experts(placed))
        local = torch.stack([take(weights.parameter(placed, expert)) for expert in range(count)])
        group, dim = weights.groups.tp_ep, None if placed.rule.dim is None else placed.rule.dim + 1
    else:
        local = take(weights.parameter(placed))
        group, dim = weights.groups.tp, placed.rule.dim
    if dim is None and not placed.rule.of_experts:
        return local
    return _assemble(placed, local, dim, group, weights)


def _assemble(placed: PlacedWeight, local: Tensor, dim: int | None, group: Any, weights: WeightMap) -> Tensor:
    """Gather the parts of a weight over a group and put them in their places."""
    rank, ranks = weights.ranks_of(placed)
    parts = [placed.pieces_of_rank(other, ranks) for other in range(ranks)]
    sizes = [sum(piece.length for piece in pieces) for pieces in parts]
    assert dim is not None
    mine = [local.narrow(dim, piece.whole, piece.length) for piece in parts[rank]]
    shape = [max(sizes) if axis == dim else size for axis, size in enumerate(local.shape)]
    sent = local.new_zeros(shape)  # of equal size on all ranks; with more ranks than groups of heads some have more rows
    torch.cat([*mine, local.narrow(dim, 0, 0)], dim, out=sent.narrow(dim, 0, sizes[rank]))
    gathered = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(gathered, sent, group=group)
    whole = local.new_empty(placed.weight.shape)
    for member, part in enumerate(gathered):  # tensor-parallel ranks are next to each other in the group
        target = whole if not placed.rule.of_experts else whole.narrow(0, member // ranks * len(part), len(part))
        taken = 0
        for piece in parts[member % ranks]:
            target.narrow(dim, piece.start, piece.length).copy_(part.narrow(dim, taken, piece.length))
            taken += piece.length
    return whole
