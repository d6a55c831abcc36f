"""Tensor parallelism: linear layers, the embedding and the output layer are sharded over the ranks that read the same tokens.

A *region* (``tensor_plan.py``) has a replicated input and returns the sum of the tensor ranks' results, with one collective at each end.
Without sequence parallelism all tensor ranks have all tokens between regions and compute the same; with it each rank has some of
the tokens, which are gathered at the start of a region and reduce-scattered at its end, at the same cost and with less memory.

The embedding and the output layer are divided by token ids. A rank embeds the tokens it has, and the ranks add their results. Of the
output layer it computes the logits of its tokens, for the hidden states of all ranks. A tied weight is divided once. (Megatron-LM,
arXiv 1909.08053 and 2205.05198.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.learner.parallel.collectives import all_gather, all_reduce, all_to_all, copy_to_ranks, reduce_scatter, split_rows
from strop.learner.parallel.derived_plan import find_mixers
from strop.learner.parallel.expert_parallel import check_experts, find_experts
from strop.learner.parallel.parallel_dims import DeviceMeshes, shard_parameter, to_local
from strop.learner.parallel.tensor_mixers import RowExchange, exchange_rows, is_exchanged, shard_mixer
from strop.learner.parallel.tensor_plan import PLAN_KEY, Region, ShardedLayer, TensorPlan, find_regions
from strop.models.adapters import ADAPTER
from strop.models.layers.rounded_layers import RoundedLinear

log = logging.getLogger(__name__)
dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


@dataclass(frozen=True)
class TokenRange:
    """The rows of a weight [V, H] on one tensor rank: a ``VocabularyDivision`` (strop.models.logprobs.lm_head)."""

    size: int  # V
    width: int  # rows of each rank; the last ones may have fewer
    group: Group

    @property
    def first(self) -> int:
        return int(dist.get_rank(self.group)) * self.width

    def local(self, parameter: Tensor) -> Tensor:
        return to_local(parameter)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return all_gather(rows, self.group)

    def own_rows(self, rows: Tensor) -> Tensor:
        return split_rows(rows, self.group)

    def stack(self, numbers: Tensor) -> Tensor:
        return all_gather(numbers[None], self.group)

    def exchange(self, logits: Tensor) -> Tensor:
        ranks = dist.get_world_size(self.group)
        blocks = all_to_all(nn.functional.pad(logits, (0, self.width - logits.shape[1])), self.group)
        rows: Tensor = blocks.unflatten(0, (ranks, -1))  # type: ignore[no-untyped-call]
        return rows.transpose(0, 1).flatten(1)[:, : self.size]


def divide_vocabulary(model: Any, meshes: DeviceMeshes) -> Iterator[nn.Parameter]:
    """Divide the embedding and a linear output layer over the tensor ranks, in place; yield the divided parameters."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [embedding, head] if isinstance(head, nn.Linear) else [embedding]
    mesh, count = meshes.dense["tensor"], meshes.dims.tensor
    weights = {id(layer.weight): layer.weight for layer in layers}
    shards = {key: shard_parameter(weight, mesh, 0) for key, weight in weights.items()}
    for layer in layers:
        size = len(layer.weight)
        layer.division = TokenRange(size, -(-size // count), meshes.tensor)
        layer.weight = shards[id(layer.weight)]
    yield from shards.values()
    if len(layers) == 2 and head.bias is not None:
        head.bias = shard_parameter(head.bias, mesh, 0)
        yield head.bias
    embedding.sum_ranks = reduce_scatter if meshes.dims.sequence else all_reduce
    if (padding := embedding.padding_idx) is not None:
        local = padding - embedding.division.first
        embedding.padding_idx = local if 0 <= local < len(to_local(embedding.weight)) else None
    kind = type(embedding)
    embedding.__class__ = type(kind.__name__, (_DividedEmbedding, kind), {})


class _DividedEmbedding(nn.Embedding):
    """The first base class of an embedding whose rows are divided."""

    division: TokenRange
    sum_ranks: Callable[[Tensor, Group], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """[1, T], equal on all tensor ranks -> [1, T, H], or with sequence parallelism this rank's rows of it."""
        whole = self._parameters["weight"]
        assert whole is not None
        weight = to_local(whole)
        places = input.squeeze(0) - self.division.first
        elsewhere = (places < 0) | (places >= len(weight))
        self._parameters["weight"] = weight  # type: ignore[assignment]  # the family's own class computes with it
        try:
            rows = super().forward(places.masked_fill(elsewhere, 0))
        finally:
            self._parameters["weight"] = whole
        return self.sum_ranks(rows.masked_fill(elsewhere[:, None], 0.0), self.division.group).unsqueeze(0)


def apply_tensor_parallel(model: Any, meshes: DeviceMeshes, plan: TensorPlan | None = None) -> frozenset[str]:
    """Shard a model over the tensor ranks, in place; return the names of the parameters with a partial gradient on each of them.

    Without ``plan``, the model's own is used. Call it before ``fully_shard``, on a model that every rank has in full (or on the meta
    device). Sharded parameters become DTensors on the tensor mesh; the gradients of all other parameters that are not returned are equal
    on all tensor ranks.

    Afterwards call the model with the same tokens [1, T] on all tensor ranks, where T is a multiple of their number. It returns hidden
    states [1, T, H], or with sequence parallelism this rank's rows [1, T / ranks, H]. Seed the random generators equally on all
    tensor ranks, so that dropout in adapters outside of regions is equal. Raises ValueError as ``check_tensor_plan`` does.
    """
    if meshes.dims.tensor == 1:
        return frozenset()
    check_experts(model, meshes.dims)
    regions = find_regions(model, meshes.dims, plan)
    if whole := [name for name, layout in find_mixers(model).items() if layout is None]:
        log.warning("each tensor rank computes all of %s, recurrent layers with weights of no known kind", ", ".join(whole))
    group, sequence = meshes.tensor, meshes.dims.sequence
    sharded: set[int] = set()
    shard = _Sharder(meshes.dense["tensor"])
    for region in regions:
        hooks = _RegionHooks(region, group, sequence)
        region.module.register_forward_pre_hook(hooks.on_enter, with_kwargs=True)
        if not region.is_known:
            region.module.register_forward_hook(hooks.check_output)
        if region.layout is not None:
            shard_mixer(region.module, region.layout, group)
        for layer in region.layers:
            sharded |= {id(parameter) for parameter in _shard_layer(layer, shard, group)}
            _register_layer_hooks(layer, group, hooks)
    sharded |= {id(parameter) for parameter in divide_vocabulary(model, meshes)}
    partial_ids = {id(parameter) for parameter in _partial_gradient_parameters(model, regions, sequence)} - sharded
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in partial_ids)


def _partial_gradient_parameters(model: Any, regions: list[Region], sequence: bool) -> Iterator[nn.Parameter]:
    """Yield the parameters with partial gradients on tensor ranks: those applied to some of the tokens, or inside of a region."""
    experts = {id(parameter) for module in find_experts(model).values() for parameter in module.parameters()}
    if sequence:
        yield from (parameter for parameter in model.parameters() if id(parameter) not in experts)
        return
    decoder = {id(parameter) for parameter in model.base_model.parameters()}
    # A score layer is applied to some of the tokens.
    yield from (parameter for parameter in model.parameters() if id(parameter) not in decoder)
    after_sum = {id(layer.base.bias) for region in regions for layer in region.layers if not layer.is_colwise}
    for region in regions:
        yield from (parameter for parameter in region.module.parameters() if id(parameter) not in after_sum)


# --- weights -------------------------------------------------------------------------------------------------------------


class LocalLinear(nn.Linear):
    """A linear layer that uses this rank's shard of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, to_local(self.weight), None if self.bias is None else to_local(self.bias))


class LocalRowwiseLinear(LocalLinear):
    """A layer sharded by rows. Its bias is added after the sum over the ranks, by a hook."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, to_local(self.weight))


class _Sharder:
    """Shards each parameter once: layers may share it."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, parameter: nn.Parameter, dimension: int) -> nn.Parameter:
        if parameter not in self._done:
            self._done[parameter] = shard_parameter(parameter, self.mesh, dimension)
        return self._done[parameter]


def _shard_layer(layer: ShardedLayer, shard: _Sharder, group: Group) -> Iterator[nn.Parameter]:
    """Shard a layer's weights, and the adapter weight that has the sharded dimension; yield the sharded parameters."""
    base = layer.base
    exchange = RowExchange(layer.sections, group) if is_exchanged(layer.sections, shard.mesh.size()) else None
    if isinstance(base, RoundedLinear):
        base.shard(group, 0 if layer.is_colwise else 1)
    else:
        base.__class__ = LocalLinear if layer.is_colwise else LocalRowwiseLinear
    base.weight = shard(base.weight, 0 if layer.is_colwise else 1)
    yield base.weight
    if exchange is not None:
        exchange_rows(base, exchange)
    elif layer.is_colwise and base.bias is not None:
        base.bias = shard(base.bias, 0)
        yield base.bias
    if layer.module is not base:
        wrapper: Any = layer.module
        adapter = (wrapper.lora_B if layer.is_colwise else wrapper.lora_A)[ADAPTER]
        adapter.__class__ = LocalLinear
        adapter.weight = shard(adapter.weight, 0 if layer.is_colwise else 1)
        yield adapter.weight
        if exchange is not None:
            exchange_rows(adapter, exchange)


# --- hooks ---------------------------------------------------------------------------------------------------------------


class _RegionHooks:
    """The hooks at the start and the end of a region."""

    def __init__(self, region: Region, group: Group, sequence: bool) -> None:
        self.region, self.group = region, group
        self.enter_collective, self.sum_collective = (all_gather, reduce_scatter) if sequence else (copy_to_ranks, all_reduce)
        self.last_sum_pointer = 0  # data pointer of the last sum

    def on_enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Apply the collective to the input, which is the first argument or ``hidden_states``."""
        if args:
            return (_apply_to_rows(self.enter_collective, args[0], self.group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _apply_to_rows(self.enter_collective, kwargs["hidden_states"], self.group)}

    def sum_outputs(self, layer: Any, _: tuple[Any, ...], output: Tensor) -> Tensor:
        """Sum the output of a layer sharded by rows, including its adapter, over the ranks; add the bias once."""
        summed = _apply_to_rows(self.sum_collective, output, self.group)
        bias = getattr(layer, "base_layer", layer).bias
        summed = summed if bias is None else summed + bias.to(summed.dtype)
        self.last_sum_pointer = summed.data_ptr()
        return summed

    def check_output(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        """Raises RuntimeError unless the region returns its sum unchanged: gradients of further computations would be too large."""
        first: Tensor = output[0] if isinstance(output, tuple) else output
        if first.data_ptr() != self.last_sum_pointer:
            raise RuntimeError(
                f"{self.region.name} ({type(module).__name__}) does not return the sum of its sharded layers unchanged, so it cannot be "
                f"sharded; name a plan without its layers in {PLAN_KEY}, or set tensor_parallel_size=1"
            )


def _register_layer_hooks(layer: ShardedLayer, group: Group, hooks: _RegionHooks) -> None:
    if layer.is_colwise and layer.is_boundary_replicated:
        layer.module.register_forward_hook(partial(_gather_columns, group))
    if not layer.is_colwise:
        if layer.is_boundary_replicated:
            layer.module.register_forward_pre_hook(partial(_local_columns, group))
        inside = hooks.region.layout.inputs[:-1] if hooks.region.layout is not None else ()
        if layer.name.removeprefix(f"{hooks.region.name}.") in inside:
            layer.module.register_forward_hook(partial(_sum_inside, group))
        else:
            layer.module.register_forward_hook(hooks.sum_outputs)


def _sum_inside(group: Group, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
    """Sum a layer's outputs, of which each rank goes on to compute its own heads."""
    return copy_to_ranks(all_reduce(output, group), group)


def _apply_to_rows(collective: Callable[[Tensor, Group], Tensor], tensor: Tensor, group: Group) -> Tensor:
    """Apply a collective to the rows of [n, H] or [1, n, H]."""
    rows = collective(tensor.reshape(-1, tensor.shape[-1]), group)
    return rows.view(*tensor.shape[:-2], -1, tensor.shape[-1])


def _gather_columns(group: Group, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
    return all_gather(output.movedim(-1, 0), group).movedim(0, -1)


def _local_columns(group: Group, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Select this rank's columns, without a collective in the backward pass: inside a region gradients are partial sums."""
    count, rank = args[0].shape[-1] // dist.get_world_size(group), dist.get_rank(group)
    return args[0].narrow(-1, rank * count, count), *args[1:]
