"""Tensor parallelism: the linear layers of attentions and MLPs are sharded over the ranks that read the same tokens.

A *region* (``tensor_plan.py``) has a replicated input and returns the sum of the tensor ranks' results, with one collective at each end.
Without sequence parallelism all tensor ranks have all tokens between regions and compute the same; with it each has some of the tokens,
which are gathered at the start of a region and reduce-scattered at its end, at the same cost and with less memory.

The embedding and the output layer are replicated, and each rank applies them to some of the tokens. (Megatron-LM, arXiv 1909.08053 and
2205.05198.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.models.adapters import ADAPTER
from strop.training.torch.parallel.collectives import copy, gather, join, own_rows, reduce_sum, scatter_sum
from strop.training.torch.parallel.experts import check_experts, experts_of
from strop.training.torch.parallel.layout import Meshes
from strop.training.torch.parallel.plan import KEY, Layer, Plan, Region, regions_of
from strop.training.torch.parallel.sharded import divide, local

dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


def apply_tensor_parallel(model: Any, meshes: Meshes, plan: Plan | None = None) -> frozenset[str]:
    """Shard a model over the tensor ranks, in place; return the names of the parameters with a partial gradient on each of them.

    ``plan`` None is the model's own. Call it before ``fully_shard``, on a model that every rank has in full (or on the meta device).
    Sharded parameters become DTensors on the tensor mesh; the gradients of all other parameters that are not returned are equal on all
    tensor ranks.

    Afterwards call the model with the same tokens [1, T] on all tensor ranks, T a multiple of their number. It returns hidden states [1,
    T, H], or with sequence parallelism this rank's rows [1, T / ranks, H]. Seed the random generators equally on all tensor ranks, so that
    dropout in adapters outside of regions is equal. Raises ValueError as ``check_tensor_plan`` does.
    """
    if meshes.sizes.tensor == 1:
        return frozenset()
    check_experts(model, meshes.sizes)
    regions = regions_of(model, meshes.sizes, plan)
    group, sequence = meshes.tensor, meshes.sizes.sequence
    divided: set[int] = set()
    for region in regions:
        ends = _Ends(region, group, sequence)
        region.module.register_forward_pre_hook(ends.enter, with_kwargs=True)
        region.module.register_forward_hook(ends.leave)
        for layer in region.layers:
            divided |= {id(parameter) for parameter in _divide(layer, meshes.dense["tensor"])}
            _connect(layer, group, ends)
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(partial(_own_tokens, group))
    if not sequence:
        embedding.register_forward_hook(partial(_all_tokens, group))
    parts = {id(parameter) for parameter in _partial(model, regions, sequence)} - divided
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in parts)


def _partial(model: Any, regions: list[Region], sequence: bool) -> Iterator[nn.Parameter]:
    """Yield the parameters with partial gradients on tensor ranks: those applied to some of the tokens, or inside of a region."""
    experts = {id(parameter) for module in experts_of(model).values() for parameter in module.parameters()}
    if sequence:
        yield from (parameter for parameter in model.parameters() if id(parameter) not in experts)
        return
    yield from model.get_input_embeddings().parameters()
    inner = {id(parameter) for parameter in model.base_model.parameters()}
    yield from (
        parameter for parameter in model.parameters() if id(parameter) not in inner
    )  # the head is applied to some of the tokens
    after_sum = {id(layer.base.bias) for region in regions for layer in region.layers if not layer.by_columns}
    for region in regions:
        yield from (parameter for parameter in region.module.parameters() if id(parameter) not in after_sum)


# --- weights -------------------------------------------------------------------------------------------------------------


class LocalLinear(nn.Linear):
    """A linear layer that computes with this rank's shard of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local(self.weight), None if self.bias is None else local(self.bias))


class LocalRows(LocalLinear):
    """A layer sharded by rows. Its bias is added after the sum over the ranks, by a hook."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local(self.weight))


def _divide(layer: Layer, mesh: Any) -> Iterator[nn.Parameter]:
    """Shard a layer's weights, and the adapter weight that has the sharded dimension; yield the sharded parameters."""
    base = layer.base
    base.__class__ = LocalLinear if layer.by_columns else LocalRows
    base.weight = divide(base.weight, mesh, 0 if layer.by_columns else 1)
    yield base.weight
    if layer.by_columns and base.bias is not None:
        base.bias = divide(base.bias, mesh, 0)
        yield base.bias
    if layer.module is not base:
        held: Any = layer.module
        adapter = (held.lora_B if layer.by_columns else held.lora_A)[ADAPTER]
        adapter.__class__ = LocalLinear
        adapter.weight = divide(adapter.weight, mesh, 0 if layer.by_columns else 1)
        yield adapter.weight


# --- hooks ---------------------------------------------------------------------------------------------------------------


class _Ends:
    """The hooks at the start and the end of a region."""

    def __init__(self, region: Region, group: Group, sequence: bool) -> None:
        self.region, self.group = region, group
        self.begin, self.total = (gather, scatter_sum) if sequence else (copy, reduce_sum)
        self.summed = 0  # data pointer of the last sum

    def enter(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Apply the collective to the input, which is the first argument or ``hidden_states``."""
        if given:
            return (_over_rows(self.begin, given[0], self.group), *given[1:]), named
        return given, named | {"hidden_states": _over_rows(self.begin, named["hidden_states"], self.group)}

    def sum(self, layer: Any, _: tuple[Any, ...], output: Tensor) -> Tensor:
        """Sum the output of a layer sharded by rows, including its adapter, over the ranks; add the bias once."""
        summed = _over_rows(self.total, output, self.group)
        bias = getattr(layer, "base_layer", layer).bias
        summed = summed if bias is None else summed + bias.to(summed.dtype)
        self.summed = summed.data_ptr()
        return summed

    def leave(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        """Raises RuntimeError unless the region returns its sum unchanged: gradients of further computations would be too large."""
        first: Tensor = output[0] if isinstance(output, tuple) else output
        if first.data_ptr() != self.summed:
            raise RuntimeError(
                f"{self.region.name} ({type(module).__name__}) does not return the sum of its sharded layers unchanged, so it cannot be "
                f"sharded; name a plan without its layers in {KEY}, or set tensor_parallel_size=1"
            )


def _connect(layer: Layer, group: Group, ends: _Ends) -> None:
    if layer.by_columns and layer.outside_whole:
        layer.module.register_forward_hook(partial(_all_columns, group))
    if not layer.by_columns:
        if layer.outside_whole:
            layer.module.register_forward_pre_hook(partial(_own_columns, group))
        layer.module.register_forward_hook(ends.sum)


def _over_rows(collective: Callable[[Tensor, Group], Tensor], tensor: Tensor, group: Group) -> Tensor:
    """Apply a collective to the rows of [n, H] or [1, n, H]."""
    rows = collective(tensor.reshape(-1, tensor.shape[-1]), group)
    return rows.view(*tensor.shape[:-2], -1, tensor.shape[-1])


def _all_columns(group: Group, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
    return gather(output.movedim(-1, 0), group).movedim(0, -1)


def _own_columns(group: Group, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Select this rank's columns, without a collective in the backward pass: inside a region gradients are partial sums."""
    count, place = given[0].shape[-1] // dist.get_world_size(group), dist.get_rank(group)
    return given[0].narrow(-1, place * count, count), *given[1:]


def _own_tokens(group: Group, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return own_rows(given[0].squeeze(0), group).unsqueeze(0), *given[1:]


def _all_tokens(group: Group, _: nn.Module, __: tuple[Any, ...], embedded: Tensor) -> Tensor:
    return _over_rows(join, embedded, group)
