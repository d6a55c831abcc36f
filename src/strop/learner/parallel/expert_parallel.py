"""Expert parallelism: each rank holds some of the experts of a layer, and tokens are dispatched to them.

A layer's experts are stored in tensors [E, ...]. For each *pair* of a token and an expert that the router selected for it, the token's
hidden state is sent to the rank of the expert (one all-to-all), computed there, and sent back (another), where the results are weighted
and summed. Every pair is computed once, so a rank's experts get their full gradient, from the tokens of all ranks that share the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.learner.parallel.collectives import all_to_all, join_rows, local_rows, split_rows
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims, shard_parameter, to_local

dist: Any = torch.distributed


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold all experts of a layer in tensors [E, ...], by name."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: nn.Module) -> bool:
    weight = module._parameters.get("down_proj")
    return weight is not None and weight.dim() == 3


def check_experts(model: Any, dims: ParallelDims) -> None:
    """Raises ValueError if a model's experts cannot be sharded by ``dims``."""
    experts = find_experts(model)
    if dims.expert > 1 and not experts:
        raise ValueError(f"expert_parallel_size is {dims.expert} and {type(model).__name__} has no expert layers; set it to 1")
    if dims.expert_size == 1:
        return
    module: Any
    for name, module in experts.items():
        counts = {len(parameter) for parameter in module.parameters(recurse=False)}
        # Attributes of Transformers' experts with the interface (hidden, index, weights), the only supported one.
        if not hasattr(module, "is_transposed") or not hasattr(module, "num_experts") or counts != {module.num_experts}:
            raise ValueError(
                f"the experts {name} ({type(module).__name__}) have a layout that cannot be sharded; set expert_parallel_size=1 and "
                "tensor_parallel_size=1, and shard only with FSDP"
            )
        if (count := int(module.num_experts)) % dims.expert_size:
            key = "expert_parallel_size" if dims.expert > 1 else "tensor_parallel_size, which shards experts too,"
            raise ValueError(f"{key} {dims.expert_size} does not divide the {count} experts of {name}; set it to a divisor")


def apply_expert_parallel(model: Any, meshes: DeviceMeshes) -> frozenset[str]:
    """Shard the experts of a model over the expert ranks, in place; return the names of the modules that hold them.

    Their parameters become DTensors on the expert mesh, with full gradients. Call it before ``fully_shard``, on a model that every rank
    has in full (or on the meta device). Afterwards all expert ranks must run each forward and backward pass together. Raises ValueError as
    ``check_experts`` does.
    """
    check_experts(model, meshes.dims)
    if meshes.dims.expert_size == 1:
        return frozenset()
    same_tokens = meshes.dims.tensor > 1 and not meshes.dims.sequence
    ranks = _ExpertGroups(meshes.expert, meshes.tensor if same_tokens else None)
    experts = find_experts(model)
    for module in experts.values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, shard_parameter(parameter, meshes.experts["expert"], 0))
        kind = type(module)
        module.__class__ = type(f"Sharded{kind.__name__}", (ShardedExperts, kind), {"whole_class": kind})
        module.__dict__["ranks"] = ranks
    return frozenset(experts)


@dataclass(frozen=True, eq=False)
class _ExpertGroups:
    """Process groups for the experts of a layer."""

    expert: Any  # the ranks that the experts are sharded over
    same_tokens: Any | None  # those of them with the same tokens; None: every rank has different tokens

    @property
    def size(self) -> int:
        return int(dist.get_world_size(self.expert))


class ShardedExperts(nn.Module):
    """Mixin for the class of a layer's experts, with the same forward: hidden [n, H], index [n, k], weights [n, k] -> [n, H]."""

    whole_class: type[nn.Module]
    ranks: _ExpertGroups
    num_experts: Any  # in the layer, over all ranks

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        same_tokens = self.ranks.same_tokens
        if same_tokens is None:
            return self._dispatch(hidden_states, top_k_index, top_k_weights)
        local = (
            split_rows(hidden_states, same_tokens),
            local_rows(top_k_index, same_tokens),
            split_rows(top_k_weights, same_tokens),
        )
        return join_rows(self._dispatch(*local), same_tokens)

    def _dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send each pair to the rank of its expert and return the weighted sum. Pairs sorted by expert are also sorted by rank."""
        pairs = index.flatten()
        order = pairs.argsort(stable=True)
        counts = torch.bincount(pairs, minlength=int(self.num_experts)).view(self.ranks.size, -1)  # [ranks, experts of each]
        incoming = all_to_all(counts, self.ranks.expert)
        sent, received = torch.stack([counts, incoming]).sum(2).tolist()
        rows = all_to_all(hidden.index_select(0, order // index.shape[1]), self.ranks.expert, received, sent)
        computed = self._compute(rows, _expert_of_each_row(incoming))
        returned = all_to_all(computed, self.ranks.expert, sent, received)
        results = returned.index_select(0, order.argsort()).view(*index.shape, -1)  # [n, k, H]
        return (results * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _compute(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Compute rows [m, H] with their local experts [m].

        Without rows, compute one row of zeros, so that the backward pass runs on every rank and every expert has a gradient.
        """
        count = len(rows)
        if not count:
            rows, expert = F.pad(rows, (0, 0, 0, 1)), expert.new_zeros(1)
        local: Any = _LocalExperts(self)
        function: Any = self.whole_class.forward
        output: Tensor = function(local, rows, expert.unsqueeze(1), rows.new_ones(len(rows), 1))
        return output[:count]


def _expert_of_each_row(incoming: Tensor) -> Tensor:
    """[ranks, experts] row counts by sender and expert -> [m], the local expert index of each received row."""
    senders, experts = incoming.shape
    return torch.arange(experts, device=incoming.device).repeat(senders).repeat_interleave(incoming.flatten())


class _LocalExperts:
    """A layer with only this rank's experts, for the original class's forward method."""

    def __init__(self, full: ShardedExperts) -> None:
        self._full = full
        for name, parameter in full.named_parameters(recurse=False):
            setattr(self, name, to_local(parameter))
        self.num_experts = int(full.num_experts) // full.ranks.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._full, name)
